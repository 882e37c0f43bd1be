"""What every GPU backend shares: memory at fixed addresses, a stream for computing and one for copies to the host, and reports.

All graphs, writes and copies on the device run in order on the compute stream. Results travel on the copy stream, so that the next round
may run meanwhile. Knows nothing about what programs are.
"""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from xpress_runtime.backends.base import Buffer, TensorInfo
from xpress_runtime.backends.cuda import CopyKind, Cuda, CudaError
from xpress_runtime.errors import EnvironmentProblem

logger = logging.getLogger("xpress_runtime.backends")

# TensorRT takes no address that is aligned to less.
ALIGNMENT = 256
# Host values wait here for the device; more than this goes in pieces.
_STAGING_BYTES = 1 << 20


class Device:
    """Everything that a backend owns on a GPU, freed together. ``capturing``: the compute stream records what it gets, and runs nothing."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.capturing = False
        self.closed = False
        # The reports that were marked since this was last emptied, and how often.
        self.marked: dict[DeviceReport, int] = {}
        self._owned = ExitStack()
        try:
            self.compute = self._stream()
            self.copies = self._stream()
            self._staging = self.allocate_host(_STAGING_BYTES)
        except BaseException:
            self.close()
            raise
        self._staged = 0

    def allocate(self, num_bytes: int) -> int:
        """Device memory of at least one byte, not zeroed."""
        address = self.cuda.allocate(max(num_bytes, 1))
        self._owned.callback(self.cuda.free, address)
        return address

    def allocate_host(self, num_bytes: int) -> int:
        address = self.cuda.allocate_host(num_bytes)
        self._owned.callback(self.cuda.free_host, address)
        return address

    def event(self) -> int:
        event = self.cuda.create_event()
        self._owned.callback(self.cuda.destroy_event, event)
        return event

    def own(self, release: Callable[[], object]) -> None:
        """Call ``release`` when the device is closed, before what was owned earlier."""
        self._owned.callback(release)

    def upload(self, address: int, values: NDArray[Any]) -> None:
        """Queue a copy of host values; they may change as soon as this returns."""
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        for start in range(0, data.size, _STAGING_BYTES):
            piece = data[start : start + _STAGING_BYTES]
            if self._staged + piece.size > _STAGING_BYTES:
                # Around once: what was staged first must have been copied. Rounds write nothing, so none waits for this.
                self.cuda.synchronise_stream(self.compute)
                self._staged = 0
            staged = self._staging + self._staged
            ctypes.memmove(staged, piece.ctypes.data, piece.size)
            self.cuda.copy(address + start, staged, piece.size, CopyKind.TO_DEVICE, self.compute)
            self._staged += piece.size

    def download(self, address: int, values: NDArray[Any]) -> None:
        """Fill a host array, behind everything that was queued; waits."""
        self.cuda.copy(values.ctypes.data, address, values.nbytes, CopyKind.TO_HOST, self.compute)
        self.cuda.synchronise_stream(self.compute)

    def synchronise(self) -> None:
        self.cuda.synchronise_stream(self.compute)
        self.cuda.synchronise_stream(self.copies)

    def close(self) -> None:
        """Free everything, the latest first: streams last, since they were owned first."""
        self.closed = True
        self._owned.close()

    def _stream(self) -> int:
        stream = self.cuda.create_stream()
        self._owned.callback(self.cuda.destroy_stream, stream)
        return stream


class DeviceBuffer:
    """Device memory under a shape; ``num_bytes`` of it belong to the buffer, which may be more than the shape needs."""

    def __init__(self, device: Device, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], num_bytes: int) -> None:
        self.device = device
        self.address = address
        self.shape = shape
        self.dtype = dtype
        self._num_bytes = num_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the shape."""
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, *shape: int) -> Self:
        needed = math.prod(shape) * self.dtype.itemsize
        if needed > self._num_bytes:
            raise ValueError(f"a view of {list(shape)} needs {needed} bytes, and the buffer has {self._num_bytes}")
        return type(self)(self.device, self.address, shape, self.dtype, self._num_bytes)

    def row(self, index: int) -> Self:
        num_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        return type(self)(self.device, self.address + index * num_bytes, (1, *self.shape[1:]), self.dtype, num_bytes)

    def write(self, values: NDArray[Any]) -> None:
        if values.shape != self.shape or values.dtype != self.dtype:
            raise ValueError(f"values are {values.dtype} {list(values.shape)}, expected {self.dtype} {list(self.shape)}")
        self.device.upload(self.address, values)

    def read(self) -> NDArray[Any]:
        values = np.empty(self.shape, self.dtype)
        self.device.download(self.address, values)
        return values


class DeviceReport:
    """Results in pinned memory, and stage times from events on the compute stream."""

    def __init__(self, device: Device, buffers: Sequence[DeviceBuffer]) -> None:
        self._device = device
        self._buffers = tuple(buffers)
        self._host = [device.allocate_host(buffer.nbytes) for buffer in self._buffers]
        self._marks: list[int] = []
        self._num_marks = 0
        self._through = device.event()
        self._arrived = device.event()

    def begin(self) -> None:
        if not self._device.capturing:
            self.expect(0)
        self._num_marks = 0
        self.mark()

    def mark(self) -> None:
        device = self._device
        if self._num_marks == len(self._marks):
            self._marks.append(device.event())
        device.cuda.record(self._marks[self._num_marks], device.compute, external=device.capturing)
        self._num_marks += 1
        device.marked[self] = self._num_marks

    def expect(self, num_marks: int) -> None:
        """Queue on the compute stream, ahead of a round with this many marks, that the buffers' last copies have left."""
        self._num_marks = num_marks
        self._device.cuda.wait(self._device.compute, self._arrived)

    def send(self) -> None:
        device = self._device
        device.cuda.record(self._through, device.compute)
        device.cuda.wait(device.copies, self._through)
        for buffer, host in zip(self._buffers, self._host, strict=True):
            device.cuda.copy(host, buffer.address, buffer.nbytes, CopyKind.TO_HOST, device.copies)
        device.cuda.record(self._arrived, device.copies)

    def wait(self) -> tuple[list[NDArray[Any]], list[float]]:
        cuda = self._device.cuda
        cuda.synchronise_event(self._arrived)
        values = [_copy_of(host, buffer) for host, buffer in zip(self._host, self._buffers, strict=True)]
        return values, [cuda.elapsed_seconds(start, end) for start, end in pairwise(self._marks[: self._num_marks])]


class DeviceBackend:
    """The part of a backend that does not depend on what its programs are."""

    flexible_shapes = False
    # One runs while the host reads and handles the one before.
    rounds_in_flight = 2

    def __init__(self, cuda: Cuda) -> None:
        self.device = Device(cuda)

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceBuffer:
        num_bytes = math.prod(shape) * dtype.itemsize
        address = self.device.allocate(num_bytes)
        if address % ALIGNMENT:
            raise EnvironmentProblem(f"CUDA gave memory at {address:#x}, which is not aligned to {ALIGNMENT} bytes")
        self.device.cuda.fill_zero(address, num_bytes, self.device.compute)
        return DeviceBuffer(self.device, address, shape, dtype, num_bytes)

    def report(self, buffers: Sequence[Buffer]) -> DeviceReport:
        return DeviceReport(self.device, [on_device(buffer) for buffer in buffers])

    def relayout(self, cache: Buffer, cache_rows: int, *, keep: bool) -> DeviceBuffer:  # noqa: ARG002
        raise AssertionError("caches on a device have one length")

    def copy(self, source: Buffer, destination: Buffer) -> None:
        source, destination = on_device(source), on_device(destination)
        if source.nbytes != destination.nbytes:
            raise ValueError(f"a copy from {source.nbytes} bytes to {destination.nbytes}")
        device = self.device
        device.cuda.copy(destination.address, source.address, source.nbytes, CopyKind.ON_DEVICE, device.compute)

    def synchronise(self) -> None:
        self.device.synchronise()

    def close(self) -> None:
        """Wait for what runs and free everything; no buffer, program or report can be used afterwards. A second call does nothing."""
        if self.device.closed:
            return
        # After a failure on the device every call fails, and that failure has been raised already.
        for step in (self.device.synchronise, self.device.close):
            try:
                step()
            except CudaError as problem:
                logger.warning("while closing: %s", problem)


def on_device(buffer: Buffer | None) -> DeviceBuffer:
    """The buffer as one of a device; ValueError."""
    if not isinstance(buffer, DeviceBuffer):
        raise ValueError("a buffer is missing or not on the device")
    return buffer


def checked(name: str, info: TensorInfo, buffer: Buffer | None) -> DeviceBuffer:
    """The device buffer for a graph's input or output; ValueError where it is missing or does not fit."""
    if not isinstance(buffer, DeviceBuffer):
        raise ValueError(f"no device buffer given for {name}")
    if not info.accepts(buffer):
        raise ValueError(f"{name} is {buffer.dtype} {list(buffer.shape)}, expected {info.dtype} {list(info.dims)}")
    if buffer.address % ALIGNMENT:
        raise ValueError(f"{name} is not aligned to {ALIGNMENT} bytes")
    return buffer


def _copy_of(host: int, buffer: DeviceBuffer) -> NDArray[Any]:
    return np.frombuffer(ctypes.string_at(host, buffer.nbytes), buffer.dtype).reshape(buffer.shape)
