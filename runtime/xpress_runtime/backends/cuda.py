"""The part of CUDA that the GPU backends need, as a protocol, and its implementation over ``cuda.bindings.runtime``.

Addresses, streams, events and graphs are plain integers. Every status that is not success becomes an EnvironmentProblem of one line. Works
on device 0 (CUDA_VISIBLE_DEVICES says which one that is); knows nothing about buffers, engines or rounds.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from xpress_runtime.errors import EnvironmentProblem, MissingExtraError


class CudaError(EnvironmentProblem):
    """A CUDA call failed. ``status`` is CUDA's own name of what happened."""

    def __init__(self, message: str, status: str) -> None:
        super().__init__(message)
        self.status = status


class CopyKind(Enum):
    """Between which memories a copy goes."""

    TO_DEVICE = "cudaMemcpyHostToDevice"
    TO_HOST = "cudaMemcpyDeviceToHost"
    ON_DEVICE = "cudaMemcpyDeviceToDevice"


@dataclass(frozen=True)
class DeviceInfo:
    """A GPU: its name, its compute capability such as ``8.9``, and the newest CUDA version that its driver knows, such as ``13.0``."""

    name: str
    compute_capability: str
    driver_cuda_version: str


class Cuda(Protocol):
    """Memory, streams, events and graphs of one GPU. What takes a stream is queued on it; only ``synchronise_*`` wait."""

    def device(self) -> DeviceInfo: ...

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of device memory."""

    def allocate(self, num_bytes: int) -> int:
        """Device memory, aligned to 256 bytes and not zeroed."""

    def free(self, address: int) -> None: ...

    def allocate_host(self, num_bytes: int) -> int:
        """Pinned host memory: the device copies from and to it without the host's help."""

    def free_host(self, address: int) -> None: ...

    def fill_zero(self, address: int, num_bytes: int, stream: int) -> None: ...

    def copy(self, destination: int, source: int, num_bytes: int, kind: CopyKind, stream: int) -> None: ...

    def create_stream(self) -> int:
        """A stream that does not wait for the default stream."""

    def destroy_stream(self, stream: int) -> None: ...

    def create_event(self) -> int:
        """An event that notes the time."""

    def destroy_event(self, event: int) -> None: ...

    def record(self, event: int, stream: int, *, external: bool = False) -> None:
        """Note when the stream comes here. ``external`` is for a stream that is being captured: every launch of the graph records anew."""

    def wait(self, stream: int, event: int) -> None:
        """Let the stream wait for the latest record of an event; it does not wait where there is none."""

    def synchronise_stream(self, stream: int) -> None: ...

    def synchronise_event(self, event: int) -> None: ...

    def elapsed_seconds(self, start: int, end: int) -> float:
        """Time between two events that have happened."""

    def begin_capture(self, stream: int) -> None:
        """What this thread queues on the stream from here on is recorded instead of run."""

    def end_capture(self, stream: int) -> int:
        """A graph of what was recorded, ready to launch."""

    def abandon_capture(self, stream: int) -> None:
        """End a capture and forget what was recorded, in whatever state it is."""

    def launch(self, graph: int, stream: int) -> None: ...

    def destroy_graph(self, graph: int) -> None: ...


def require_cuda_bindings(extra: str) -> None:
    """MissingExtraError unless cuda-bindings is installed; imports nothing of it."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        raise MissingExtraError("cuda-bindings", extra)


class CudaRuntime:
    """:class:`Cuda` on the real device 0. EnvironmentProblem where there is none that works."""

    def __init__(self) -> None:
        from cuda.bindings import runtime

        self._runtime = runtime
        self._kinds = {kind: getattr(runtime.cudaMemcpyKind, kind.value) for kind in CopyKind}
        self._capture_mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        if self._call("cudaGetDeviceCount") == 0:
            raise self._problem("cudaGetDeviceCount", runtime.cudaError_t.cudaErrorNoDevice)

    def device(self) -> DeviceInfo:
        attributes = self._runtime.cudaDeviceAttr
        capability = [
            str(self._call("cudaDeviceGetAttribute", attribute, 0))
            for attribute in (attributes.cudaDevAttrComputeCapabilityMajor, attributes.cudaDevAttrComputeCapabilityMinor)
        ]
        name: bytes = self._call("cudaGetDeviceProperties", 0).name
        return DeviceInfo(name.decode(errors="replace").rstrip("\0"), ".".join(capability), _version(self._call("cudaDriverGetVersion")))

    def memory(self) -> tuple[int, int]:
        free, total = self._call("cudaMemGetInfo")
        return free, total

    def allocate(self, num_bytes: int) -> int:
        try:
            return int(self._call("cudaMalloc", num_bytes))
        except CudaError as problem:
            if problem.status != "cudaErrorMemoryAllocation":
                raise
            free, total = self.memory()
            raise CudaError(
                f"the GPU has {show_bytes(free)} of {show_bytes(total)} free and was asked for {show_bytes(num_bytes)} more; "
                "end other programs on it, or build for a smaller --capacity or --batch",
                problem.status,
            ) from None

    def free(self, address: int) -> None:
        self._call("cudaFree", address)

    def allocate_host(self, num_bytes: int) -> int:
        return int(self._call("cudaHostAlloc", num_bytes, self._runtime.cudaHostAllocDefault))

    def free_host(self, address: int) -> None:
        self._call("cudaFreeHost", address)

    def fill_zero(self, address: int, num_bytes: int, stream: int) -> None:
        self._call("cudaMemsetAsync", address, 0, num_bytes, stream)

    def copy(self, destination: int, source: int, num_bytes: int, kind: CopyKind, stream: int) -> None:
        self._call("cudaMemcpyAsync", destination, source, num_bytes, self._kinds[kind], stream)

    def create_stream(self) -> int:
        return int(self._call("cudaStreamCreateWithFlags", self._runtime.cudaStreamNonBlocking))

    def destroy_stream(self, stream: int) -> None:
        self._call("cudaStreamDestroy", stream)

    def create_event(self) -> int:
        return int(self._call("cudaEventCreateWithFlags", self._runtime.cudaEventDefault))

    def destroy_event(self, event: int) -> None:
        self._call("cudaEventDestroy", event)

    def record(self, event: int, stream: int, *, external: bool = False) -> None:
        flags = self._runtime.cudaEventRecordExternal if external else self._runtime.cudaEventRecordDefault
        self._call("cudaEventRecordWithFlags", event, stream, flags)

    def wait(self, stream: int, event: int) -> None:
        self._call("cudaStreamWaitEvent", stream, event, self._runtime.cudaEventWaitDefault)

    def synchronise_stream(self, stream: int) -> None:
        self._call("cudaStreamSynchronize", stream)

    def synchronise_event(self, event: int) -> None:
        self._call("cudaEventSynchronize", event)

    def elapsed_seconds(self, start: int, end: int) -> float:
        return 1e-3 * float(self._call("cudaEventElapsedTime", start, end))

    def begin_capture(self, stream: int) -> None:
        # Thread-local: what other threads of a server do meanwhile on streams of their own spoils nothing.
        self._call("cudaStreamBeginCapture", stream, self._capture_mode)

    def end_capture(self, stream: int) -> int:
        graph = self._call("cudaStreamEndCapture", stream)
        try:
            return int(self._call("cudaGraphInstantiate", graph, 0))
        finally:
            self._call("cudaGraphDestroy", graph)

    def abandon_capture(self, stream: int) -> None:
        # A capture that went wrong ends with an error and without a graph; either way the stream is as before.
        status, graph = self._runtime.cudaStreamEndCapture(stream)
        if status == self._runtime.cudaError_t.cudaSuccess:
            self._call("cudaGraphDestroy", graph)

    def launch(self, graph: int, stream: int) -> None:
        self._call("cudaGraphLaunch", graph, stream)

    def destroy_graph(self, graph: int) -> None:
        self._call("cudaGraphExecDestroy", graph)

    def _call(self, function: str, *arguments: Any) -> Any:
        """Call a function; its result without the status: nothing, one value, or a tuple."""
        status, *results = getattr(self._runtime, function)(*arguments)
        if status != self._runtime.cudaError_t.cudaSuccess:
            raise self._problem(function, status)
        return results[0] if len(results) == 1 else tuple(results)

    def _problem(self, function: str, status: Any) -> CudaError:
        runtime = self._runtime
        _, driver = runtime.cudaDriverGetVersion()
        _, needed = runtime.cudaRuntimeGetVersion()
        if not driver:
            message = "no NVIDIA driver is installed here"
        elif status == runtime.cudaError_t.cudaErrorInsufficientDriver:
            message = (
                f"the NVIDIA driver is too old: it knows CUDA up to {_version(driver)}, and cuda-bindings needs {_version(needed)}; "
                "install a newer driver"
            )
        elif status == runtime.cudaError_t.cudaErrorNoDevice:
            message = "an NVIDIA driver is installed, but it shows no GPU to this process (see CUDA_VISIBLE_DEVICES and nvidia-smi)"
        else:
            _, text = runtime.cudaGetErrorString(status)
            reason = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
            message = f"CUDA failed in {function}: {reason} ({status.name})"
        return CudaError(message, str(status.name))


def show_bytes(num_bytes: int) -> str:
    """A size for people, such as ``1.5 GiB``; anything below a GiB in whole MiB."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{-(-num_bytes // 2**20)} MiB"


def _version(number: int) -> str:
    """CUDA's 13050 as 13.5."""
    return f"{number // 1000}.{number % 1000 // 10}"
