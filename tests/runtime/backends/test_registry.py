"""Which backend is chosen, and what is said where none or another one runs."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cli.invoke import invoke
from tests.conftest import Built
from xpress_runtime.backends import registry
from xpress_runtime.backends.registry import BACKEND_NAMES, open_backend, probe_backends
from xpress_runtime.bundle import Bundle
from xpress_runtime.errors import EnvironmentProblem, OptionError

NO_DRIVER = "no NVIDIA driver is installed here"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Makes a machine on which some backends lack something; returns the list of those that are created."""

    def make(lacking: dict[str, str], capability: str = "8.9") -> list[str]:
        def require(name: str) -> None:
            if name in lacking:
                raise EnvironmentProblem(lacking[name])

        created: list[str] = []
        device = SimpleNamespace(device=lambda: SimpleNamespace(compute_capability=capability))
        monkeypatch.setattr(registry, "_require", require)
        monkeypatch.setattr(registry, "CudaRuntime", lambda: device)
        monkeypatch.setattr(registry, "_create", lambda name, *_: created.append(name))
        return created

    return make


def test_every_backend_has_a_state() -> None:
    statuses = probe_backends()
    assert [status.name for status in statuses] == list(BACKEND_NAMES)
    assert all(status.runs != bool(status.reason) for status in statuses)
    assert all("\n" not in status.reason for status in statuses)


def test_a_backend_that_cannot_run_names_what_is_missing_and_what_would_work(machine: Callable[..., list[str]]) -> None:
    machine(dict.fromkeys(BACKEND_NAMES[:-1], NO_DRIVER))
    with pytest.raises(EnvironmentProblem) as caught:
        open_backend("tensorrt")
    assert str(caught.value) == f"backend tensorrt does not run here: {NO_DRIVER}; backend ort-cpu would work"


def test_what_would_work_must_find_its_graphs(machine: Callable[..., list[str]], scripted: Bundle) -> None:
    machine(dict.fromkeys(BACKEND_NAMES[:-1], NO_DRIVER))
    with pytest.raises(EnvironmentProblem, match="no other backend would work either"):
        open_backend("tensorrt", bundle=scripted)


def test_auto_takes_the_first_that_runs_and_says_what_it_passed_over(
    machine: Callable[..., list[str]], scripted: Bundle, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "xpress_runtime.backends")
    created = machine({"tensorrt": NO_DRIVER})
    open_backend("auto", bundle=scripted)
    assert created == ["tensorrt-rtx"]
    assert [record.message for record in caplog.records] == [
        f"backend tensorrt is passed over: {NO_DRIVER}",
        "backend tensorrt-rtx is used",
    ]


def test_auto_passes_over_engines_that_are_missing_or_for_other_gpus(machine: Callable[..., list[str]], trained: Bundle) -> None:
    created = machine({}, capability="9.0")
    open_backend("auto", bundle=trained)
    assert created == ["ort-cuda"]


def test_auto_says_why_none_runs(machine: Callable[..., list[str]], scripted: Bundle) -> None:
    machine(dict.fromkeys(BACKEND_NAMES[:-1], NO_DRIVER))
    with pytest.raises(EnvironmentProblem, match=r"no backend runs here: tensorrt: no NVIDIA.*ort-cpu: the bundle holds no graph set fp32"):
        open_backend("auto", bundle=scripted)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(OptionError, match="'cuda' does not exist; choose one of: auto, tensorrt, tensorrt-rtx, ort-cuda"):
        open_backend("cuda")


def test_a_runtime_cache_is_not_ignored(tmp_path: Any) -> None:
    with pytest.raises(OptionError, match="of no use to backend ort-cpu"):
        open_backend("ort-cpu", runtime_cache=tmp_path)


@pytest.mark.parametrize(
    ("name", "absent", "expected"),
    [
        ("tensorrt", "tensorrt", r"tensorrt is not installed; install it with: pip install 'xpress-export\[gpu\]'"),
        ("tensorrt-rtx", "tensorrt_rtx", r"tensorrt-rtx is not installed.*\[rtx\]"),
        ("tensorrt-rtx", "cuda.bindings", r"cuda-bindings is not installed.*\[rtx\]"),
        ("tensorrt-rtx", "cuda", r"cuda-bindings is not installed.*\[rtx\]"),
        ("ort-cuda", "onnxruntime", r"onnxruntime-gpu is not installed.*\[gpu\]"),
        ("ort-trt-rtx", "onnxruntime_ep_nv_tensorrt_rtx", "pip install onnxruntime-ep-nv-tensorrt-rtx"),
        ("ort-cpu", "onnxruntime", r"onnxruntime is not installed.*\[cpu\]"),
    ],
)
def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, name: str, absent: str, expected: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda asked: None if asked == absent else SimpleNamespace(origin="a/b.py"))
    with pytest.raises(EnvironmentProblem, match=expected):
        registry._require(name)


def test_the_cpu_package_of_onnxruntime_has_no_cuda_provider() -> None:
    pytest.importorskip("onnxruntime")
    if "CUDAExecutionProvider" in __import__("onnxruntime").get_available_providers():
        pytest.skip("onnxruntime-gpu is installed")
    with pytest.raises(EnvironmentProblem, match="no CUDA provider; replace it by onnxruntime-gpu"):
        registry._require("ort-cuda")


@pytest.mark.skipif(importlib.util.find_spec("tensorrt") is not None, reason="tensorrt is installed")
def test_the_command_line_says_it_in_one_line(tiny: Built) -> None:
    refused = invoke("generate", tiny.bundle.folder, "--tokens", "1,2", "--backend", "tensorrt")
    missing = "tensorrt is not installed; install it with: pip install 'xpress-export[gpu]' in an environment without onnxruntime"
    refused.assert_refused(3, f"backend tensorrt does not run here: {missing}; backend ort-cpu would work\n")
    refused = invoke("generate", tiny.bundle.folder, "--tokens", "1,2", "--backend", "ort-cpu", "--runtime-cache", "kernels")
    refused.assert_refused(2, "a runtime cache is of no use to backend ort-cpu")
    # Asked for with auto, it is there for the machines that have a use for it.
    result = invoke("generate", tiny.bundle.folder, "--tokens", "1,2", "--max-new-tokens", "1", "--runtime-cache", "kernels").assert_done()
    assert "a runtime cache is of no use to backend ort-cpu" in result.err
