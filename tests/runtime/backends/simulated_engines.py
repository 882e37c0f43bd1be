"""Engines for the simulated GPU: ONNX Runtime on the CPU runs a graph at the very addresses that were bound, when the stream gets there."""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from tests.runtime.backends.simulated_cuda import SimulatedCuda, Violation
from xpress_engines.profiles import BlockSizes, ProfileSet, dim_ranges, input_ranges
from xpress_export.parity.runner import updated_in_place
from xpress_runtime.backends.engine import EngineTensor
from xpress_runtime.bundle import Bundle
from xpress_runtime.engines import ENGINES_FILE, EngineManifest, EngineRecord, ProfileRecord, engines_folder, graphs_identity
from xpress_runtime.errors import EnvironmentProblem

VERSION = "1.7.1.116"
SCRATCH_BYTES = 4096
_DTYPES = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(float16)": np.dtype(np.float16),
    "tensor(int64)": np.dtype(np.int64),
}


def write_engines(bundle: Bundle, graph_set: str, kind: str = "tensorrt-rtx", *, batch: int = 1, layout: str = "shared") -> EngineManifest:
    """A folder of engines as the builder leaves it, where each "engine" says which graph it stands for."""
    manifest = bundle.manifest
    folder = engines_folder(bundle, kind)
    folder.mkdir(parents=True, exist_ok=True)
    profile = ProfileSet(manifest.prefill_chunk, batch, manifest.capacity, layout)
    engines = {}
    for graph, record in manifest.graph_set(graph_set).graphs.items():
        content = json.dumps({"graph": graph, "path": str(bundle.folder / record.file)}).encode()
        (folder / f"{graph}.engine").write_bytes(content)
        session = open_graph(bundle.folder / record.file)
        inputs = {value.name: tuple(value.shape) for value in session.get_inputs()}
        profiles = input_ranges(inputs, dim_ranges(graph, profile, layout, BlockSizes.of(manifest)))
        engines[graph] = EngineRecord(f"{graph}.engine", len(content), hashlib.sha256(content).hexdigest(), 0.1, 3, profiles)
    written = EngineManifest(
        kind=kind,
        builder=kind,
        builder_version=VERSION,
        graph_set=graph_set,
        precision=graph_set.split("-", maxsplit=1)[0],
        built_from=graphs_identity(bundle, graph_set),
        compute_capabilities=("8.6", "8.9"),
        profile=ProfileRecord(profile.prefill_chunk, manifest.drafter.block_size, profile.batch, profile.capacity, layout),
        engines=engines,
        build_seconds=0.6,
        peak_build_bytes=None,
        built_with={},
    )
    (folder / ENGINES_FILE).write_text(json.dumps(written.to_json()), encoding="utf-8")
    return written


def open_graph(path: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


class SimulatedContext:
    """As picky as the real one: a first run inside a capture fails, since it has yet to pick kernels."""

    def __init__(self, engine: SimulatedEngine, profile: int, binding: Any, scratch: tuple[int, int]) -> None:
        self.engine = engine
        self.profile = profile
        self._binding = binding
        self._scratch = scratch
        self._warm = False
        self.first_output = (0, 0)

    def spoil(self) -> None:
        """Make the first element of the first output wrong beyond any rounding."""
        address, size = self.first_output
        ctypes.memset(address, 0x47, size)

    def enqueue(self, stream: int) -> None:
        cuda, library = self.engine.library.cuda, self.engine.library
        if self.engine.graph == library.fails_to_run:
            raise EnvironmentProblem(f"the engine {self.engine.graph} failed to run")
        if cuda.capturing == stream and (not self._warm or self.engine.graph == library.fails_in_capture):
            raise EnvironmentProblem(f"the engine {self.engine.graph} cannot run inside a capture")
        self._warm = True
        cuda.log.append(("engine", self.engine.graph, stream))
        cuda.enqueue(stream, self.engine.graph, self._run)

    def capturable(self, stream: int) -> bool:  # noqa: ARG002
        return self.engine.graph != self.engine.library.not_capturable

    def close(self) -> None:
        self.engine.library.open_contexts -= 1

    def _run(self) -> None:
        # Scratch memory holds rubbish after every run.
        cuda = self.engine.library.cuda
        cuda.check_device_address(*self._scratch)
        cuda.memory_at[self._scratch[0]][:] ^= 0xFF
        self.engine.session.run_with_iobinding(self._binding)


class SimulatedEngine:
    def __init__(self, library: SimulatedLibrary, path: Path, cache: bytes | None) -> None:
        described = json.loads(path.read_bytes())
        self.library = library
        self.graph: str = described["graph"]
        self.cache = cache or b""
        self.session = open_graph(Path(described["path"]))
        self.scratch_bytes = SCRATCH_BYTES
        self.shapes: list[tuple[int, Mapping[str, tuple[int, ...]]]] = []
        self.tensors = {value.name: _tensor(value, is_input=True) for value in self.session.get_inputs()}
        self.tensors |= {value.name: _tensor(value, is_input=False) for value in self.session.get_outputs()}

    def context(
        self,
        profile: int,
        shapes: Mapping[str, tuple[int, ...]],
        addresses: Mapping[str, int],
        scratch: tuple[int, int],
        stream: int,  # noqa: ARG002
    ) -> SimulatedContext:
        if self.library.cuda.capturing is not None:
            raise Violation("a context is made inside a capture")
        if scratch[1] < self.scratch_bytes:
            raise Violation("too little scratch memory")
        cuda = self.library.cuda
        binding = self.session.io_binding()
        sizes: dict[str, int] = {}
        for value in self.session.get_inputs():
            shape = shapes[value.name]
            sizes |= {dim: size for dim, size in zip(value.shape, shape, strict=True) if isinstance(dim, str)}
            self._bind(binding.bind_input, value, shape, addresses[value.name])
        for value in self.session.get_outputs():
            shape = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in value.shape)
            self._bind(binding.bind_output, value, shape, addresses[value.name])
        self.shapes.append((profile, shapes))
        cuda.log.append(("context", self.graph, dict(addresses)))
        self.library.open_contexts += 1
        context = SimulatedContext(self, profile, binding, scratch)
        first = self.session.get_outputs()[0]
        context.first_output = (addresses[first.name], _DTYPES[first.type].itemsize)
        return context

    def runtime_cache(self) -> bytes | None:
        return self.cache + f"{self.graph}:{len(self.shapes)} ".encode() if self.library.compiles_at_run_time else None

    def close(self) -> None:
        self.library.open_engines -= 1

    def _bind(self, bind: Any, value: Any, shape: tuple[int, ...], address: int) -> None:
        dtype = _DTYPES[value.type]
        if address % 256:
            raise Violation(f"{value.name} at {address:#x} is not aligned")
        self.library.cuda.check_device_address(address, int(np.prod(shape)) * dtype.itemsize)
        bind(value.name, "cpu", 0, dtype.type, list(shape), address)


class SimulatedLibrary:
    """:class:`xpress_runtime.backends.engine.EngineLibrary`; ``not_capturable`` and the like name the graph that behaves so."""

    name = "TensorRT-RTX"

    def __init__(self, cuda: SimulatedCuda, *, version: str = VERSION, compiles_at_run_time: bool = True) -> None:
        self.cuda = cuda
        self.version = version
        self.compiles_at_run_time = compiles_at_run_time
        self.not_capturable = self.fails_in_capture = self.fails_to_run = self.fails_to_load = ""
        self.engines: dict[str, SimulatedEngine] = {}
        self.caches: dict[str, bytes | None] = {}
        self.open_engines = 0
        self.open_contexts = 0

    def load(self, path: Path, runtime_cache: bytes | None) -> SimulatedEngine:
        if path.stem == self.fails_to_load:
            raise EnvironmentProblem(f"{self.name} cannot load {path}")
        engine = SimulatedEngine(self, path, None)
        self.caches[engine.graph] = runtime_cache
        self.engines[engine.graph] = engine
        self.open_engines += 1
        return engine


def _tensor(value: Any, *, is_input: bool) -> EngineTensor:
    dims = tuple(dim if isinstance(dim, int) else -1 for dim in value.shape)
    return EngineTensor(is_input, dims, _DTYPES[value.type], None if is_input else updated_in_place(value.name))
