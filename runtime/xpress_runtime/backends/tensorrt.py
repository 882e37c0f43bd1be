"""TensorRT and TensorRT-RTX engines on a GPU: everything on one compute stream, a round as one CUDA graph.

Checks that the engines fit this machine before it loads them; knows nothing about how they were built.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Hashable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from xpress_runtime.backends.admission import MemoryPlan
from xpress_runtime.backends.base import Buffer, TensorInfo
from xpress_runtime.backends.capture import RoundGraphs
from xpress_runtime.backends.cuda import Cuda
from xpress_runtime.backends.device import ALIGNMENT, DeviceBackend, DeviceBuffer, checked
from xpress_runtime.backends.engine import Engine, EngineContext, EngineLibrary
from xpress_runtime.bundle import Bundle
from xpress_runtime.engines import EngineRecord, Engines, open_engines
from xpress_runtime.errors import BundleError, EnvironmentProblem, OptionError
from xpress_runtime.graph_names import BASE_HEAD, refiner_name
from xpress_runtime.sets import AttentionForm, Precision, set_name

logger = logging.getLogger("xpress_runtime.backends")


class BoundEngine:
    """A context, and the programs' common way to queue it."""

    def __init__(self, context: EngineContext, rounds: RoundGraphs, stream: int) -> None:
        self._context = context
        self._rounds = rounds
        self._stream = stream

    def run(self) -> None:
        self._rounds.note(self._context)
        self._context.enqueue(self._stream)


class EngineProgram:
    """A loaded engine; each binding is a context of its own, so that no run has to set anything."""

    def __init__(self, backend: TensorRtBackend, graph: str, record: EngineRecord, engine: Engine) -> None:
        self._backend = backend
        self._graph = graph
        self._record = record
        self._engine = engine
        infos = {name: TensorInfo(_named(tensor.dims), tensor.dtype) for name, tensor in engine.tensors.items()}
        self.inputs: Mapping[str, TensorInfo] = {name: infos[name] for name, tensor in engine.tensors.items() if tensor.is_input}
        self.outputs: Mapping[str, TensorInfo] = {name: infos[name] for name, tensor in engine.tensors.items() if not tensor.is_input}

    def bind(self, buffers: Mapping[str, Buffer]) -> BoundEngine:
        infos = {**self.inputs, **self.outputs}
        bound = {name: checked(name, info, buffers.get(name)) for name, info in infos.items()}
        for name, tensor in self._engine.tensors.items():
            # The engine writes where it reads; elsewhere the cache would stay as it was.
            if tensor.aliases is not None and bound[name].address != bound[tensor.aliases].address:
                raise ValueError(f"{name} must be the memory of {tensor.aliases}")
        profile = self._record.profile_for({name: bound[name].shape for name in self.inputs})
        if profile is None:
            shapes = ", ".join(f"{name} {list(bound[name].shape)}" for name in self.inputs if bound[name].shape != self.inputs[name].dims)
            raise ValueError(f"the engine of {self._graph} has no profile for {shapes}")
        return self._backend.bound(self._backend.context(self._engine, profile, bound, self.inputs))


class TensorRtBackend(DeviceBackend):
    """Runs the engines of ``kind`` ("tensorrt" or "tensorrt-rtx") in a bundle.

    ``runtime_cache``: a folder that keeps the kernels that TensorRT-RTX compiles for this GPU, so that the next start is quick; OptionError
    where the kind compiles none.
    """

    def __init__(self, kind: str, cuda: Cuda, library: EngineLibrary, runtime_cache: Path | None = None) -> None:
        if runtime_cache is not None and not library.compiles_at_run_time:
            raise OptionError(f"a runtime cache is of no use to backend {kind}, which compiles nothing at run time; leave it out")
        self.name = kind
        self.graph_set = set_name(Precision.FP16, AttentionForm.MASK)
        self._library = library
        self._cache_folder = runtime_cache
        self._caches: dict[Path, tuple[Engine, bytes | None]] = {}
        self._engines: Engines | None = None
        self._memory: MemoryPlan | None = None
        self._scratch = (0, 0)
        self._scratch_bytes = 0
        super().__init__(cuda)
        self._rounds = RoundGraphs(self.device, self._save_caches)

    def admit(self, bundle: Bundle, num_rows: int) -> None:
        # Every engine is hashed when it is loaded.
        engines = open_engines(bundle, self.name, verify=False)
        manifest = engines.manifest
        self._check_machine(engines)
        self._check_rows(bundle, engines, num_rows)
        self.graph_set = manifest.graph_set
        default = refiner_name(bundle.manifest.num_passes[0], bundle.manifest.shortlists[0])
        used = ("embed", "target", "head", "drafter", "accept", default, *((BASE_HEAD,) if bundle.manifest.base_head else ()))
        weights = sum(manifest.engines[graph].bytes for graph in used)
        self._memory = MemoryPlan(bundle.manifest, manifest.graph_set, weights, num_rows)
        self._memory.check(*self.device.cuda.memory())
        self._engines = engines

    def load(self, bundle: Bundle, graph: str) -> EngineProgram:  # noqa: ARG002
        assert self._engines is not None, "a plan is admitted before it loads"
        path, record = self._engines.path(graph), self._engines.manifest.engines[graph]
        cache = self._cache_folder and self._cache_folder / f"{self.name}-{graph}-{record.sha256[:16]}.cache"
        engine = self._library.load(path, _read_cache(cache) if cache else None)
        self.device.own(engine.close)
        self._scratch_bytes = max(self._scratch_bytes, engine.scratch_bytes)
        if self._memory is not None:
            # Only a loaded engine tells its scratch memory, so this is asked again; buffers come after the engines.
            self._memory.check(*self.device.cuda.memory(), loaded=True, scratch=self._scratch_bytes)
        if cache:
            self._caches[cache] = (engine, engine.runtime_cache())
        return EngineProgram(self, graph, record, engine)

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceBuffer:
        # From here on free memory is no longer what is left of the plan.
        self._memory = None
        return super().allocate(shape, dtype)

    def context(self, engine: Engine, profile: int, buffers: Mapping[str, DeviceBuffer], inputs: Collection[str]) -> EngineContext:
        """A context on these buffers, for good: shapes and addresses never change."""
        if self._scratch[1] < engine.scratch_bytes:
            # Runs follow each other on one stream, so all contexts work in the same memory. Those made before keep theirs.
            self._scratch = (self.device.allocate(self._scratch_bytes), self._scratch_bytes)
        shapes = {name: buffers[name].shape for name in inputs}
        addresses = {name: buffer.address for name, buffer in buffers.items()}
        context = engine.context(profile, shapes, addresses, self._scratch, self.device.compute)
        self.device.own(context.close)
        return context

    def bound(self, context: EngineContext) -> BoundEngine:
        return BoundEngine(context, self._rounds, self.device.compute)

    def run_round(self, key: Hashable, queue: Callable[[], None]) -> None:
        self._rounds.run(key, queue)

    def close(self) -> None:
        self._save_caches()
        self._caches.clear()
        super().close()

    def _check_machine(self, engines: Engines) -> None:
        manifest, device = engines.manifest, self.device.cuda.device()
        again = f"build engines for this machine: xpress-export engine BUNDLE --kind {self.name} --force"
        if manifest.builder_version != self._library.version:
            raise EnvironmentProblem(
                f"{engines.folder}: the engines were built by {manifest.builder} {manifest.builder_version}, and {self._library.name} "
                f"{self._library.version} is installed, which reads only its own; install that version, or {again}"
            )
        if device.compute_capability not in manifest.compute_capabilities:
            # TensorRT builds for the GPU present; TensorRT-RTX for those that are named, or says why not.
            wanted = f" --compute-capability {device.compute_capability}" if self._library.compiles_at_run_time else ""
            raise EnvironmentProblem(
                f"{engines.folder}: the engines are for compute capability {', '.join(manifest.compute_capabilities)}, and this GPU "
                f"({device.name}) has {device.compute_capability}; {again}{wanted}"
            )

    def _check_rows(self, bundle: Bundle, engines: Engines, num_rows: int) -> None:
        # Acceptance is called for all rows of a round and for nothing else, so its profiles say which numbers of rows there are.
        ranges = [(profile["position"].min[0], profile["position"].max[0]) for profile in engines.manifest.engines["accept"].profiles]
        if not any(least <= num_rows <= most for least, most in ranges):
            listed = ", ".join(dict.fromkeys(str(most) if least == most else f"{least} to {most}" for least, most in ranges))
            raise BundleError(
                f"{engines.folder}: the engines take {listed} rows at a time, and {num_rows} were asked for; "
                f"build them again with: xpress-export engine BUNDLE --kind {self.name} --batch {num_rows} --force"
            )
        element = Precision(engines.manifest.precision).element_bytes
        own = bundle.manifest.draft_model
        for caches in (bundle.manifest.target.caches, bundle.manifest.drafter.caches, *([own.caches] if own is not None else [])):
            row_bytes = element * caches.num_kv_heads * bundle.manifest.cache_rows * caches.head_dim
            if num_rows > 1 and row_bytes % ALIGNMENT:
                raise BundleError(
                    f"{bundle.folder}: the caches of one row take {row_bytes} bytes, and engines need a multiple of {ALIGNMENT} to work on "
                    "rows of a batch; build the bundle again with a --capacity that is a multiple of 16"
                )

    def _save_caches(self) -> None:
        for path, (engine, saved) in self._caches.items():
            content = engine.runtime_cache()
            if content is None or content == saved:
                continue
            partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                partial.write_bytes(content)
                partial.replace(path)
            except OSError as problem:
                logger.warning("the runtime cache %s cannot be written: %s", path, problem.strerror)
                with suppress(OSError):
                    partial.unlink(missing_ok=True)
            self._caches[path] = (engine, content)


def _read_cache(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as problem:
        logger.warning("the runtime cache %s cannot be read: %s; it is made again", path, problem.strerror)
        return None


def _named(dims: tuple[int, ...]) -> tuple[int | str, ...]:
    """An engine's dims, where -1 stands for any length, as those of a graph."""
    return tuple(dim if dim >= 0 else f"dim{index}" for index, dim in enumerate(dims))
