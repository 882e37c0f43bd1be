"""ONNX Runtime on a GPU: the same device buffers and streams, and graphs of a masked half-precision set instead of engines.

A provider that is missing or does not load is an error, and so is a graph whose real work would end up on the CPU. Rounds are not captured
as CUDA graphs: ONNX Runtime's kernels may allocate and its shape arithmetic runs on the host, neither of which a capture allows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from xpress_runtime.backends.admission import MemoryPlan
from xpress_runtime.backends.base import Buffer, TensorInfo
from xpress_runtime.backends.cuda import Cuda
from xpress_runtime.backends.device import DeviceBackend, checked
from xpress_runtime.bundle import Bundle
from xpress_runtime.errors import BundleError, EnvironmentProblem, OptionError
from xpress_runtime.sets import AttentionForm, Precision, set_name

logger = logging.getLogger("xpress_runtime.backends")

# The provider of each backend, and for a provider that is a package of its own, that package.
PROVIDERS = {"ort-cuda": "CUDAExecutionProvider", "ort-trt-rtx": "NvTensorRTRTXExecutionProvider"}
RTX_PLUGIN = "onnxruntime_ep_nv_tensorrt_rtx"

# Graph sets that GPUs run, the preferred one first.
GPU_GRAPH_SETS = tuple(set_name(precision, AttentionForm.MASK) for precision in (Precision.FP16, Precision.BF16))

# Type name → numpy's dtype, and what a binding is told: ONNX's own number where numpy has no such type (then the host sees bits).
_TYPES: dict[str, tuple[np.dtype[Any], Any]] = {
    "tensor(float)": (np.dtype(np.float32), np.float32),
    "tensor(float16)": (np.dtype(np.float16), np.float16),
    "tensor(bfloat16)": (np.dtype(np.uint16), 16),
    "tensor(int64)": (np.dtype(np.int64), np.int64),
}

# Arithmetic on shapes belongs on the host, where shapes are known; a GPU provider leaves it there. It touches no tensor of the device.
_SHAPE_OPERATORS = frozenset(
    "Add Cast Concat Constant Div Gather Identity Mul Range Reshape Shape Slice Squeeze Sub Unsqueeze".split()  # noqa: SIM905
)


class BoundGpuGraph:
    def __init__(self, session: Any, binding: Any, options: Any, buffers: tuple[Buffer, ...]) -> None:
        self._session = session
        self._binding = binding
        self._options = options
        self._buffers = buffers

    def run(self) -> None:
        self._session.run_with_iobinding(self._binding, self._options)


class GpuGraph:
    """A session whose inputs and outputs are bound by device address."""

    def __init__(self, session: Any, options: Any) -> None:
        self._session = session
        self._options = options
        self._types = {value.name: value.type for value in (*session.get_inputs(), *session.get_outputs())}
        self.inputs: Mapping[str, TensorInfo] = {value.name: _info(value) for value in session.get_inputs()}
        self.outputs: Mapping[str, TensorInfo] = {value.name: _info(value) for value in session.get_outputs()}

    def bind(self, buffers: Mapping[str, Buffer]) -> BoundGpuGraph:
        binding = self._session.io_binding()
        bound = []
        for bind, infos in ((binding.bind_input, self.inputs), (binding.bind_output, self.outputs)):
            for name, info in infos.items():
                buffer = checked(name, info, buffers.get(name))
                bind(name, "cuda", 0, _TYPES[self._types[name]][1], list(buffer.shape), buffer.address)
                bound.append(buffer)
        return BoundGpuGraph(self._session, binding, self._options, tuple(bound))


class OrtGpuBackend(DeviceBackend):
    """Runs the masked half-precision graphs on ONNX Runtime's provider of ``name`` ("ort-cuda" or "ort-trt-rtx").

    ``ort`` is the package onnxruntime; ``runtime_cache`` a folder for kernels that ort-trt-rtx compiles (OptionError for ort-cuda).
    """

    def __init__(self, name: str, cuda: Cuda, ort: Any, runtime_cache: Path | None = None) -> None:
        if runtime_cache is not None and name != "ort-trt-rtx":
            raise OptionError(f"a runtime cache is of no use to backend {name}, which compiles nothing at run time; leave it out")
        self.name = name
        self.graph_set = GPU_GRAPH_SETS[0]
        self._ort = ort
        self._cache_folder = runtime_cache
        self._provider = PROVIDERS[name]
        super().__init__(cuda)

    def admit(self, bundle: Bundle, num_rows: int) -> None:
        self.graph_set = gpu_graph_set(bundle)
        folder = f"graphs/{self.graph_set}/"
        weights = sum(record.bytes for file, record in bundle.manifest.files.items() if file.startswith(folder))
        # What operators need beside it ONNX Runtime allocates as it goes, and does not tell.
        MemoryPlan(bundle.manifest, self.graph_set, weights, num_rows).check(*self.device.cuda.memory())

    def load(self, bundle: Bundle, graph: str) -> GpuGraph:
        path = bundle.graph_path(self.graph_set, graph)
        options = self._ort.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        providers = self._register(options)
        try:
            # Without the fallback of the Python package, which would print and go on with the CPU.
            session = self._ort.InferenceSession(path, options, providers=providers, enable_fallback=0)
        except Exception as problem:
            reason = next(iter(str(problem).splitlines()), "no reason given")
            raise EnvironmentProblem(
                f"ONNX Runtime {self._ort.__version__} cannot load {path} with {self._provider}: {reason}"
            ) from problem
        self._check_provider(session, graph)
        run_options = self._ort.RunOptions()
        # The stream is ours, and so is the waiting.
        run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        return GpuGraph(session, run_options)

    def run_round(self, key: Hashable, queue: Callable[[], None]) -> None:  # noqa: ARG002
        queue()

    def _register(self, options: Any) -> list[tuple[str, dict[str, str]]] | None:
        """Providers for a session, or None where they were put into its options."""
        settings = {"device_id": "0", "user_compute_stream": str(self.device.compute)}
        if self.name == "ort-cuda":
            if self._provider not in self._ort.get_available_providers():
                raise EnvironmentProblem(f"the installed onnxruntime has no {self._provider}; install onnxruntime-gpu in its place")
            # fp32 means fp32: TF32 would round fc and the logits to 10 bits. Memory is planned, so it does not grow in powers of two.
            return [(self._provider, {**settings, "use_tf32": "0", "arena_extend_strategy": "kSameAsRequested"})]
        settings["has_user_compute_stream"] = "1"
        if self._cache_folder is not None:
            self._cache_folder.mkdir(parents=True, exist_ok=True)
            settings["nv_runtime_cache_path"] = str(self._cache_folder)
        options.add_provider_for_devices(self._plugin_devices(), settings)
        return None

    def _plugin_devices(self) -> list[Any]:
        import importlib

        found = [device for device in self._ort.get_ep_devices() if device.ep_name == self._provider]
        if not found:
            try:
                plugin = importlib.import_module(RTX_PLUGIN)
                self._ort.register_execution_provider_library(plugin.get_ep_name(), plugin.get_library_path())
            except Exception as problem:
                reason = next(iter(str(problem).splitlines()), "no reason given")
                raise EnvironmentProblem(f"ONNX Runtime's TensorRT-RTX provider cannot be loaded: {reason}") from problem
            found = [device for device in self._ort.get_ep_devices() if device.ep_name == self._provider]
        if not found:
            raise EnvironmentProblem("ONNX Runtime's TensorRT-RTX provider is loaded, but shows no GPU that it runs on")
        return found[:1]

    def _check_provider(self, session: Any, graph: str) -> None:
        first = session.get_providers()[0]
        if first != self._provider:
            raise EnvironmentProblem(f"ONNX Runtime would run graph {graph} with {first}: {self._provider} did not load (see its log)")
        left = {
            node.op_type
            for part in session.get_provider_graph_assignment_info()
            if part.ep_name != self._provider
            for node in part.get_nodes()
        }
        if left - _SHAPE_OPERATORS:
            listed = ", ".join(sorted(left - _SHAPE_OPERATORS))
            raise EnvironmentProblem(
                f"ONNX Runtime {self._ort.__version__} has no {self._provider} kernels for {listed} in graph {graph} and would run them on "
                "the CPU; use another backend, or another version of ONNX Runtime"
            )
        if left:
            logger.debug("graph %s: shape arithmetic on the host: %s", graph, ", ".join(sorted(left)))


def gpu_graph_set(bundle: Bundle) -> str:
    """The graph set of a bundle that GPUs run; BundleError lists what there is."""
    held = [graph_set.name for graph_set in bundle.manifest.graph_sets]
    for name in GPU_GRAPH_SETS:
        if name in held:
            return name
    raise BundleError(
        f"{bundle.folder} holds no graphs for GPUs ({' or '.join(GPU_GRAPH_SETS)}; it holds: {', '.join(held)}); "
        "build it again with --precision fp16"
    )


def _info(value: Any) -> TensorInfo:
    return TensorInfo(tuple(value.shape), _TYPES[value.type][0])
