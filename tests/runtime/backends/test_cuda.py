"""The CUDA surface over a stand-in for cuda-bindings: what is called, and that every status becomes one clear line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from xpress_runtime.backends.cuda import CopyKind, CudaError, CudaRuntime, show_bytes

pytest.importorskip("cuda.bindings.runtime", exc_type=ImportError)
from cuda.bindings import runtime as real


class Answers:
    """The module's constants, and functions that answer what a test says; each call is kept."""

    def __init__(self, **answers: Any) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        defaults = {
            "cudaGetDeviceCount": (1,),
            "cudaDriverGetVersion": (13000,),
            "cudaRuntimeGetVersion": (13050,),
            "cudaMemGetInfo": (3 << 30, 8 << 30),
            "cudaDeviceGetAttribute": (8,),
            "cudaGetDeviceProperties": (SimpleNamespace(name=b"Some GPU\0\0"),),
        }
        self._answers = {**defaults, **answers}

    def __getattr__(self, name: str) -> Any:
        value = getattr(real, name)
        if not callable(value) or isinstance(value, type) or name == "cudaGetErrorString":
            return value

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, arguments))
            answer = self._answers.get(name, ())
            return (answer, None) if isinstance(answer, real.cudaError_t) else (real.cudaError_t.cudaSuccess, *answer)

        return call


def runtime_with(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> tuple[CudaRuntime, Answers]:
    stand_in = Answers(**answers)
    monkeypatch.setattr("cuda.bindings.runtime", stand_in)
    return CudaRuntime(), stand_in


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (
            {"cudaGetDeviceCount": real.cudaError_t.cudaErrorInsufficientDriver, "cudaDriverGetVersion": (0,)},
            "no NVIDIA driver is installed",
        ),
        (
            {"cudaGetDeviceCount": real.cudaError_t.cudaErrorInsufficientDriver, "cudaDriverGetVersion": (12040,)},
            "driver is too old: it knows CUDA up to 12.4, and cuda-bindings needs 13.5",
        ),
        ({"cudaGetDeviceCount": real.cudaError_t.cudaErrorNoDevice}, "shows no GPU to this process"),
        ({"cudaGetDeviceCount": (0,)}, "shows no GPU to this process"),
        ({"cudaGetDeviceCount": real.cudaError_t.cudaErrorSystemDriverMismatch}, "cudaErrorSystemDriverMismatch"),
    ],
)
def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any], expected: str) -> None:
    with pytest.raises(CudaError, match=expected) as caught:
        runtime_with(monkeypatch, **answers)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 3


def test_too_little_memory_says_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, _ = runtime_with(monkeypatch, cudaMalloc=real.cudaError_t.cudaErrorMemoryAllocation)
    with pytest.raises(CudaError, match=r"has 3.0 GiB of 8.0 GiB free and was asked for 5.0 GiB more"):
        cuda.allocate(5 << 30)


def test_any_other_failure_names_function_and_status(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, _ = runtime_with(monkeypatch, cudaGraphLaunch=real.cudaError_t.cudaErrorIllegalAddress)
    with pytest.raises(CudaError, match=r"cudaGraphLaunch: an illegal memory access .*cudaErrorIllegalAddress"):
        cuda.launch(1, 2)


def test_every_function_calls_what_it_should(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"cudaMalloc": (4096,), "cudaHostAlloc": (8192,), "cudaStreamCreateWithFlags": (11,), "cudaEventCreateWithFlags": (12,)}
    answers |= {"cudaEventElapsedTime": (1.5,), "cudaStreamEndCapture": (13,), "cudaGraphInstantiate": (14,)}
    cuda, stand_in = runtime_with(monkeypatch, **answers)
    assert cuda.device().name == "Some GPU" and cuda.device().compute_capability == "8.8" and cuda.device().driver_cuda_version == "13.0"
    assert cuda.memory() == (3 << 30, 8 << 30)
    assert (cuda.allocate(10), cuda.allocate_host(10), cuda.create_stream(), cuda.create_event()) == (4096, 8192, 11, 12)
    assert cuda.elapsed_seconds(1, 2) == pytest.approx(1.5e-3)
    stand_in.calls.clear()
    cuda.fill_zero(4096, 10, 11)
    cuda.copy(4096, 8192, 10, CopyKind.TO_DEVICE, 11)
    cuda.record(12, 11)
    cuda.record(12, 11, external=True)
    cuda.wait(11, 12)
    cuda.synchronise_stream(11)
    cuda.synchronise_event(12)
    cuda.begin_capture(11)
    assert cuda.end_capture(11) == 14
    cuda.launch(14, 11)
    cuda.abandon_capture(11)
    assert stand_in.calls == [
        ("cudaMemsetAsync", (4096, 0, 10, 11)),
        ("cudaMemcpyAsync", (4096, 8192, 10, real.cudaMemcpyKind.cudaMemcpyHostToDevice, 11)),
        ("cudaEventRecordWithFlags", (12, 11, real.cudaEventRecordDefault)),
        ("cudaEventRecordWithFlags", (12, 11, real.cudaEventRecordExternal)),
        ("cudaStreamWaitEvent", (11, 12, real.cudaEventWaitDefault)),
        ("cudaStreamSynchronize", (11,)),
        ("cudaEventSynchronize", (12,)),
        ("cudaStreamBeginCapture", (11, real.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal)),
        ("cudaStreamEndCapture", (11,)),
        ("cudaGraphInstantiate", (13, 0)),
        ("cudaGraphDestroy", (13,)),
        ("cudaGraphLaunch", (14, 11)),
        ("cudaStreamEndCapture", (11,)),
        ("cudaGraphDestroy", (13,)),
    ]
    stand_in.calls.clear()
    cuda.free(4096)
    cuda.free_host(8192)
    cuda.destroy_event(12)
    cuda.destroy_stream(11)
    cuda.destroy_graph(14)
    expected = ["cudaFree", "cudaFreeHost", "cudaEventDestroy", "cudaStreamDestroy", "cudaGraphExecDestroy"]
    assert [name for name, _ in stand_in.calls] == expected


def test_the_real_functions_take_plain_integers() -> None:
    # Without a driver each of them refuses, but not because of its arguments.
    kind = real.cudaMemcpyKind.cudaMemcpyDeviceToHost
    results = [
        real.cudaFree(0),
        real.cudaMemsetAsync(0, 0, 0, 0),
        real.cudaMemcpyAsync(0, 0, 0, kind, 0),
        real.cudaStreamSynchronize(0),
    ]
    assert all(isinstance(status, real.cudaError_t) for status, *_ in results)


def test_sizes_for_people() -> None:
    assert [show_bytes(size) for size in (1, 5 << 20, 1536 << 20)] == ["1 MiB", "5 MiB", "1.5 GiB"]
