"""ONNX Runtime on the CPU: buffers are numpy arrays, bound by address, so that caches are updated in place."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from xpress_runtime.backends.base import Buffer, TensorInfo
from xpress_runtime.errors import BundleError

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


class OrtCpuBackend:
    """Runs the ``fp32-length`` graphs. ``threads`` is the number of threads of one operator."""

    name = "ort-cpu"
    graph_set = "fp32-length"
    # The attention kernel works through every row of a cache, valid or not.
    flexible_caches = True

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or _usable_cores()

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> ArrayBuffer:
        return ArrayBuffer(np.zeros(shape, dtype))

    def load(self, path: Path) -> OrtProgram:
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
