"""The part of TensorRT that the backend needs, as a protocol, and one implementation for ``tensorrt`` and ``tensorrt_rtx``.

An engine is loaded, tells its tensors, and makes contexts: one profile, fixed shapes, fixed addresses, scratch memory that the caller owns.
Knows nothing about bundles, buffers or rounds.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from xpress_runtime.errors import EnvironmentProblem, MissingExtraError

logger = logging.getLogger("xpress_runtime.backends")

# The package of each kind of engine, and the extra that brings it.
PACKAGES = {"tensorrt": ("tensorrt", "gpu"), "tensorrt-rtx": ("tensorrt_rtx", "rtx")}

_DTYPES: dict[str, np.dtype[Any]] = {
    "FLOAT": np.dtype(np.float32),
    "HALF": np.dtype(np.float16),
    # numpy has no bfloat16; nothing on the host computes with these, so their bits will do.
    "BF16": np.dtype(np.uint16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "BOOL": np.dtype(np.bool_),
}

# What each bit of TensorRT-RTX's diagnostics means for the user.
_INVALID = {
    "VERSION_MISMATCH": "it was built by another version of TensorRT-RTX",
    "UNSUPPORTED_CC": "it does not cover this GPU's compute capability",
    "OLD_CUDA_DRIVER": "the NVIDIA driver is too old for it",
    "OLD_CUDA_RUNTIME": "the CUDA runtime is too old for it",
    "INSUFFICIENT_GPU_MEMORY": "the GPU has too little memory for it",
    "MALFORMED_ENGINE": "it is not an engine of TensorRT-RTX, or a damaged one",
    "CUDA_ERROR": "the CUDA driver or runtime is not installed correctly",
}


# By the package's id, which stays its own as long as the package is kept.
_LOGS: dict[int, tuple[Any, Any]] = {}


@dataclass(frozen=True)
class EngineTensor:
    """An input or output of an engine; dynamic dims are -1. ``aliases``: the input whose memory an output must share, if it must."""

    is_input: bool
    dims: tuple[int, ...]
    dtype: np.dtype[Any]
    aliases: str | None = None


class EngineContext(Protocol):
    """An engine with shapes and addresses."""

    def enqueue(self, stream: int) -> None:
        """Queue one run; EnvironmentProblem."""

    def capturable(self, stream: int) -> bool:
        """Whether a run on the stream can become part of a CUDA graph."""

    def close(self) -> None: ...


class Engine(Protocol):
    """A loaded engine. ``scratch_bytes`` is the most that a run of any profile needs."""

    @property
    def tensors(self) -> Mapping[str, EngineTensor]: ...

    @property
    def scratch_bytes(self) -> int: ...

    def context(
        self,
        profile: int,
        shapes: Mapping[str, tuple[int, ...]],
        addresses: Mapping[str, int],
        scratch: tuple[int, int],
        stream: int,
    ) -> EngineContext:
        """A context for input shapes within ``profile``; ``scratch`` is an address and its bytes. What it needs to set up is queued on
        ``stream``.
        """

    def runtime_cache(self) -> bytes | None:
        """The kernels that were compiled for this GPU so far; None where the library compiles none at run time."""

    def close(self) -> None: ...


class EngineLibrary(Protocol):
    """TensorRT or TensorRT-RTX. ``compiles_at_run_time`` says whether there is such a thing as a runtime cache."""

    name: str
    version: str
    compiles_at_run_time: bool

    def load(self, path: Path, runtime_cache: bytes | None) -> Engine:
        """Load an engine onto the GPU; EnvironmentProblem says why not. A runtime cache that does not fit is dropped with a warning."""


class TensorRtLibrary:
    """:class:`EngineLibrary` over the package of a kind; MissingExtraError, EnvironmentProblem."""

    def __init__(self, kind: str) -> None:
        import importlib

        package, extra = PACKAGES[kind]
        try:
            self._trt: Any = importlib.import_module(package)
        except ModuleNotFoundError:
            raise MissingExtraError(kind, extra) from None
        except (ImportError, OSError) as problem:
            # The package is a front for shared libraries, which may lack others.
            raise EnvironmentProblem(f"{package} is installed, but cannot be loaded: {_first_line(problem)}") from None
        self.name = "TensorRT-RTX" if kind == "tensorrt-rtx" else "TensorRT"
        self.version: str = self._trt.__version__
        self.compiles_at_run_time = hasattr(self._trt, "IRuntimeCache")
        self._log = _log(self._trt)
        try:
            self._runtime = self._trt.Runtime(self._log)
        except (RuntimeError, TypeError, ValueError) as problem:
            raise EnvironmentProblem(f"{self.name} {self.version} cannot start: {self._log.error or _first_line(problem)}") from None

    def load(self, path: Path, runtime_cache: bytes | None) -> _TensorRtEngine:
        self._log.error = ""
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            self._check(path, content)
            engine = self._runtime.deserialize_cuda_engine(content)
        if engine is None:
            reason = self._log.error or "it gives no reason"
            raise EnvironmentProblem(f"{self.name} {self.version} cannot load {path}: {_first_line(reason)}")
        return _TensorRtEngine(self._trt, self.name, engine, self._log, runtime_cache, path)

    def _check(self, path: Path, content: mmap.mmap) -> None:
        """Ask the library first, where it can be asked: its answer is clearer than its error."""
        if not hasattr(self._runtime, "get_engine_validity"):
            return
        validity, diagnostics = self._runtime.get_engine_validity(content[: self._runtime.engine_header_size])
        if validity == self._trt.EngineValidity.INVALID:
            bits = self._trt.EngineInvalidityDiagnostics.__members__
            reasons = [_INVALID.get(name, name) for name, bit in bits.items() if int(diagnostics) & int(bit)]
            # It may find no bit for what it logs, such as a driver that it cannot ask.
            reason = "; ".join(reasons) or _first_line(self._log.error or "it gives no reason")
            raise EnvironmentProblem(
                f"{self.name} {self.version} cannot use {path}: {reason}; build engines for this machine with: xpress-export engine"
            )


class _TensorRtEngine:
    def __init__(self, trt: Any, library: str, engine: Any, log: Any, runtime_cache: bytes | None, path: Path) -> None:
        self._trt = trt
        self._library = library
        self._engine = engine
        self._log = log
        self._path = path
        self._config: Any = None
        self._cache: Any = None
        if hasattr(trt, "IRuntimeCache"):
            self._configure(runtime_cache)
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        self.tensors: Mapping[str, EngineTensor] = {name: self._tensor(name) for name in names}
        self.scratch_bytes = max(engine.get_device_memory_size_for_profile_v2(index) for index in range(engine.num_optimization_profiles))

    def context(
        self,
        profile: int,
        shapes: Mapping[str, tuple[int, ...]],
        addresses: Mapping[str, int],
        scratch: tuple[int, int],
        stream: int,
    ) -> _TensorRtContext:
        self._log.error = ""
        what = self._config or self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        context = self._engine.create_execution_context(what)
        if context is None:
            raise self._failed("cannot make a context")
        if not context.set_optimization_profile_async(profile, stream):
            raise self._failed(f"refused profile {profile}")
        for name, shape in shapes.items():
            if not context.set_input_shape(name, shape):
                raise self._failed(f"refused shape {list(shape)} for {name}")
        for name, address in addresses.items():
            if not context.set_tensor_address(name, address):
                raise self._failed(f"refused the memory of {name}")
        needed = context.update_device_memory_size_for_shapes()
        address, num_bytes = scratch
        if needed > num_bytes:
            raise self._failed(f"needs {needed} bytes of scratch memory, more than the {num_bytes} that it announced")
        context.set_device_memory(address, num_bytes)
        return _TensorRtContext(context, self._failed)

    def runtime_cache(self) -> bytes | None:
        return bytes(self._cache.serialize()) if self._cache is not None else None

    def close(self) -> None:
        self._cache = self._config = self._engine = None

    def _configure(self, runtime_cache: bytes | None) -> None:
        trt, config = self._trt, self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        # Kernels for the very shapes before the first run: a CUDA graph would keep a stopgap kernel for good.
        config.dynamic_shapes_kernel_specialization_strategy = trt.DynamicShapesKernelSpecializationStrategy.EAGER
        # Whole rounds are captured, and a graph inside a graph is none.
        config.cuda_graph_strategy = trt.CudaGraphStrategy.DISABLED
        cache = config.create_runtime_cache()
        if runtime_cache is not None and not cache.deserialize(runtime_cache):
            logger.warning("the runtime cache for %s is damaged or of another machine; it is made again", self._path.name)
        config.set_runtime_cache(cache)
        self._config, self._cache = config, cache

    def _tensor(self, name: str) -> EngineTensor:
        engine = self._engine
        type_name = engine.get_tensor_dtype(name).name
        if type_name not in _DTYPES:
            raise EnvironmentProblem(f"{self._path}: tensor {name} has type {type_name}, which this runtime does not know")
        is_input = engine.get_tensor_mode(name) == self._trt.TensorIOMode.INPUT
        aliases = engine.get_aliased_input_tensor(name) if not is_input and hasattr(engine, "get_aliased_input_tensor") else None
        return EngineTensor(is_input, tuple(engine.get_tensor_shape(name)), _DTYPES[type_name], aliases or None)

    def _failed(self, what: str) -> EnvironmentProblem:
        reason = f": {_first_line(self._log.error)}" if self._log.error else ""
        return EnvironmentProblem(f"{self._library}: the engine {self._path.name} {what}{reason}")


class _TensorRtContext:
    def __init__(self, context: Any, failed: Any) -> None:
        self._context = context
        self._failed = failed

    def enqueue(self, stream: int) -> None:
        if not self._context.execute_async_v3(stream):
            raise self._failed("failed to run")

    def capturable(self, stream: int) -> bool:
        # Only TensorRT-RTX can be asked.
        ask = getattr(self._context, "is_stream_capturable", None)
        return True if ask is None else bool(ask(stream))

    def close(self) -> None:
        self._context = None


def _log(trt: Any) -> Any:
    """The package's logger, which keeps the first error for the message of an exception. A process has one: later ones are ignored."""
    if id(trt) in _LOGS:
        return _LOGS[id(trt)][1]

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.error = ""

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                # The first one is the cause; those after it say that something failed because of it.
                self.error = self.error or message
            logger.log(logging.WARNING if severity == trt.ILogger.WARNING else logging.DEBUG, "TensorRT: %s", message)

    log = Log()
    _LOGS[id(trt)] = trt, log
    return log


def _first_line(problem: object) -> str:
    return next(iter(str(problem).splitlines()), "no reason given")
