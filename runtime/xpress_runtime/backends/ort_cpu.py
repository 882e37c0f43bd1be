"""ONNX Runtime on the CPU: buffers are numpy arrays, bound by address, so that caches are updated in place."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from xpress_runtime.backends.base import Buffer, TensorInfo
from xpress_runtime.bundle import Bundle
from xpress_runtime.errors import BundleError, EnvironmentProblem
from xpress_runtime.sets import AttentionForm, Precision, set_name

_DTYPES: dict[str, np.dtype[Any]] = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(float16)": np.dtype(np.float16),
    "tensor(int64)": np.dtype(np.int64),
}


class ArrayBuffer:
    """Host memory under a shape; views share ``memory``, which may hold more elements than the shape."""

    def __init__(self, array: NDArray[Any], memory: NDArray[Any] | None = None) -> None:
        self.array = array
        self.memory = array.reshape(-1) if memory is None else memory

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype

    def view(self, *shape: int) -> Self:
        return type(self)(self.memory[: math.prod(shape)].reshape(shape), self.memory)

    def row(self, index: int) -> Self:
        return type(self)(self.array[index : index + 1])

    def write(self, values: NDArray[Any]) -> None:
        np.copyto(self.array, values, casting="no")

    def read(self) -> NDArray[Any]:
        return self.array.copy()


class BoundOrtProgram:
    def __init__(self, session: Any, binding: Any, buffers: tuple[ArrayBuffer, ...]) -> None:
        self._session = session
        self._binding = binding
        # The binding holds bare addresses; this keeps the memory behind them.
        self._buffers = buffers

    def run(self) -> None:
        self._session.run_with_iobinding(self._binding)


class OrtProgram:
    def __init__(self, session: Any) -> None:
        self._session = session
        self.inputs: Mapping[str, TensorInfo] = {value.name: _info(value) for value in session.get_inputs()}
        self.outputs: Mapping[str, TensorInfo] = {value.name: _info(value) for value in session.get_outputs()}

    def bind(self, buffers: Mapping[str, Buffer]) -> BoundOrtProgram:
        binding = self._session.io_binding()
        for name, info in self.inputs.items():
            binding.bind_input(name, *_address(name, info, buffers))
        for name, info in self.outputs.items():
            binding.bind_output(name, *_address(name, info, buffers))
        return BoundOrtProgram(self._session, binding, tuple(b for b in buffers.values() if isinstance(b, ArrayBuffer)))


class ArrayReport:
    """Everything has happened when its call returns, so a stage's time is the host's."""

    def __init__(self, buffers: tuple[ArrayBuffer, ...]) -> None:
        self._buffers = buffers
        self._marks: list[float] = []
        self._sent: tuple[list[NDArray[Any]], list[float]] = ([], [])

    def begin(self) -> None:
        self._marks = [time.perf_counter()]

    def mark(self) -> None:
        self._marks.append(time.perf_counter())

    def send(self) -> None:
        seconds = [end - start for start, end in pairwise(self._marks)]
        self._sent = [buffer.read() for buffer in self._buffers], seconds

    def wait(self) -> tuple[list[NDArray[Any]], list[float]]:
        return self._sent


class OrtCpuBackend:
    """Runs the ``fp32-length`` graphs; parity checks give it the masked graphs of a GPU as ``graph_set``.

    ``threads`` is the number of threads of one operator.
    """

    name = "ort-cpu"
    rounds_in_flight = 1

    def __init__(self, threads: int | None = None, graph_set: str = set_name(Precision.FP32, AttentionForm.LENGTH)) -> None:
        self.threads = threads or _usable_cores()
        self.graph_set = graph_set
        # The attention kernel works through every row of a cache, valid or not; masked graphs have caches of one length.
        self.flexible_shapes = graph_set.endswith(f"-{AttentionForm.LENGTH.value}")

    def admit(self, bundle: Bundle, num_rows: int) -> None:
        """A system that swaps or overcommits has no figure to compare with."""

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> ArrayBuffer:
        try:
            return ArrayBuffer(np.zeros(shape, dtype))
        except (MemoryError, ValueError):
            needed = math.prod(shape) * dtype.itemsize
            raise EnvironmentProblem(
                f"{needed / 1e9:.1f} GB of memory for a buffer of shape {list(shape)} are not there; "
                "build the bundle with a smaller --capacity"
            ) from None

    def load(self, bundle: Bundle, graph: str) -> OrtProgram:
        path = bundle.graph_path(self.graph_set, graph)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        # A round goes from one graph's threads to the next one's; threads that spin on after a run would take their cores (half the speed).
        options.add_session_config_entry("session.force_spinning_stop", "1")
        # Errors only: a caller sees them as exceptions anyway.
        options.log_severity_level = 3
        try:
            return OrtProgram(onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"]))
        except Exception as problem:
            first_line = str(problem).splitlines()[0]
            raise BundleError(f"ONNX Runtime {onnxruntime.__version__} cannot load {path}: {first_line}") from problem

    def run_round(self, key: Hashable, queue: Callable[[], None]) -> None:  # noqa: ARG002
        queue()

    def report(self, buffers: Sequence[Buffer]) -> ArrayReport:
        return ArrayReport(tuple(buffer for buffer in buffers if isinstance(buffer, ArrayBuffer)))

    def relayout(self, cache: Buffer, cache_rows: int, *, keep: bool) -> ArrayBuffer:
        assert isinstance(cache, ArrayBuffer)
        batch, num_heads, old_rows, head_dim = cache.shape
        kept = cache.array[:, :, : min(old_rows, cache_rows)].copy() if keep else None
        longer = cache.view(batch, num_heads, cache_rows, head_dim)
        if kept is not None:
            longer.array[:, :, : kept.shape[2]] = kept
        return longer

    def copy(self, source: Buffer, destination: Buffer) -> None:
        assert isinstance(source, ArrayBuffer)
        destination.write(source.array)

    def synchronise(self) -> None:
        """Nothing is ever queued here."""

    def close(self) -> None:
        """Arrays go with the last who holds them."""


def _usable_cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        # A container's share of the machine; "max" is all of it.
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores


def _info(value: Any) -> TensorInfo:
    return TensorInfo(tuple(value.shape), _DTYPES[value.type])


def _address(name: str, info: TensorInfo, buffers: Mapping[str, Buffer]) -> tuple[str, int, Any, list[int], int]:
    buffer = buffers.get(name)
    if not isinstance(buffer, ArrayBuffer):
        raise ValueError(f"no host buffer given for {name}")
    if not info.accepts(buffer):
        raise ValueError(f"{name} is {buffer.dtype} {list(buffer.shape)}, expected {info.dtype} {list(info.dims)}")
    if not buffer.array.flags.c_contiguous:
        raise ValueError(f"{name} is not contiguous")
    return "cpu", 0, buffer.dtype.type, list(buffer.shape), buffer.array.ctypes.data
