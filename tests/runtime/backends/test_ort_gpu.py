"""ONNX Runtime's GPU backends over a stand-in for its package that runs graphs on the simulated GPU's compute stream."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest

from tests.runtime.backends.simulated_cuda import SCHEDULES, SimulatedCuda
from tests.runtime.backends.simulated_engines import open_graph
from tests.runtime.backends.test_simulated_gpu import run_rows
from tests.scripted import continuation
from xpress_runtime.backends.ort_gpu import PROVIDERS, OrtGpuBackend
from xpress_runtime.bundle import Bundle
from xpress_runtime.drafters import BlockDrafter
from xpress_runtime.errors import BundleError, EnvironmentProblem, OptionError
from xpress_runtime.generation import GenerationConfig
from xpress_runtime.loop import SpeculativeLoop
from xpress_runtime.plan import Plan
from xpress_runtime.session import Session


class Binding:
    """Takes device addresses only, and binds them for the CPU underneath."""

    def __init__(self, binding: Any) -> None:
        self.binding = binding

    def bind_input(self, name: str, device: str, *where: Any) -> None:
        assert device == "cuda"
        self.binding.bind_input(name, "cpu", *where)

    def bind_output(self, name: str, device: str, *where: Any) -> None:
        assert device == "cuda"
        self.binding.bind_output(name, "cpu", *where)


class GpuSession:
    def __init__(self, package: StandIn, path: Path, options: Any, providers: Any) -> None:
        self._package = package
        self._session = open_graph(path)
        (self._provider, self._settings) = providers[0] if providers else (options.devices[0].ep_name, options.settings)
        self.get_inputs, self.get_outputs = self._session.get_inputs, self._session.get_outputs
        package.settings = self._settings

    def get_providers(self) -> list[str]:
        return [*([] if self._package.does_not_load else [self._provider]), "CPUExecutionProvider"]

    def get_provider_graph_assignment_info(self) -> list[Any]:
        def part(name: str, *operators: str) -> Any:
            return SimpleNamespace(ep_name=name, get_nodes=lambda: [SimpleNamespace(op_type=operator) for operator in operators])

        return [part(self._provider, "MatMul", "Attention"), part("CPUExecutionProvider", "Shape", "Squeeze", *self._package.on_cpu)]

    def io_binding(self) -> Binding:
        return Binding(self._session.io_binding())

    def run_with_iobinding(self, binding: Binding, options: Any) -> None:
        assert options.entries == {"disable_synchronize_execution_providers": "1"}
        stream = int(self._settings["user_compute_stream"])
        self._package.cuda.enqueue(stream, "graph", lambda: self._session.run_with_iobinding(binding.binding))


class StandIn:
    """What the backend uses of the package onnxruntime."""

    __version__ = onnxruntime.__version__

    def __init__(self, cuda: SimulatedCuda) -> None:
        self.cuda = cuda
        self.providers = [*PROVIDERS.values()]
        self.on_cpu: list[str] = []
        self.does_not_load = False
        self.fails = ""
        self.settings: dict[str, str] = {}

    def get_available_providers(self) -> list[str]:
        return self.providers

    def get_ep_devices(self) -> list[Any]:
        return [SimpleNamespace(ep_name=name) for name in self.providers]

    def SessionOptions(self) -> Any:  # noqa: N802
        options = SimpleNamespace(entries={}, devices=[], settings={})
        options.add_session_config_entry = options.entries.__setitem__

        def add(devices: list[Any], settings: dict[str, str]) -> None:
            options.devices, options.settings = devices, settings

        options.add_provider_for_devices = add
        return options

    def RunOptions(self) -> Any:  # noqa: N802
        options = SimpleNamespace(entries={})
        options.add_run_config_entry = options.entries.__setitem__
        return options

    def InferenceSession(self, path: Path, options: Any, providers: Any, enable_fallback: int) -> GpuSession:  # noqa: N802
        assert enable_fallback == 0
        assert options.entries["session.record_ep_graph_assignment_info"] == "1"
        if self.fails:
            raise RuntimeError(self.fails)
        return GpuSession(self, path, options, providers)


def backend_with(schedule: str = "random", name: str = "ort-cuda", **behaviour: Any) -> OrtGpuBackend:
    cuda = SimulatedCuda(schedule)
    package = StandIn(cuda)
    for attribute, value in behaviour.items():
        setattr(package, attribute, value)
    return OrtGpuBackend(name, cuda, package)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", PROVIDERS)
def test_the_same_loop_gives_the_same_tokens(scripted: Bundle, schedule: str, name: str) -> None:
    backend = backend_with(schedule, name)
    with Session(scripted, backend) as session:
        for num_passes in (0, 3):
            result = session.generate(continuation(4, 9), GenerationConfig(30, num_passes=num_passes))
            assert list(result.tokens) == continuation(continuation(4, 9)[-1], 30)
        assert list(session.generate([3], GenerationConfig(30, speculation="off")).tokens) == continuation(3, 30)
    cuda = backend.device.cuda
    assert isinstance(cuda, SimulatedCuda) and cuda.leaked() == {} and not cuda.calls("begin_capture")


def test_rows_of_a_batch(scripted: Bundle) -> None:
    plan = Plan(scripted, backend_with(), num_rows=3)
    prompts = [[2], continuation(8, 11), continuation(20, 5), continuation(14, 6)]
    first, restarted, third, stopped = run_rows(plan, SpeculativeLoop(plan, BlockDrafter(plan, 2)), prompts, 12)
    for prompt, tokens in zip(prompts, (first, stopped, third, restarted), strict=True):
        assert tokens == continuation(prompt[-1], len(tokens))


def test_fp32_stays_fp32_and_the_stream_is_ours(scripted: Bundle) -> None:
    backend = backend_with()
    Plan(scripted, backend)
    assert backend._ort.settings["use_tf32"] == "0"
    assert backend._ort.settings["user_compute_stream"] == str(backend.device.compute)


@pytest.mark.parametrize(
    ("behaviour", "expected"),
    [
        ({"providers": ["CPUExecutionProvider"]}, "has no CUDAExecutionProvider; install onnxruntime-gpu"),
        ({"does_not_load": True}, "would run graph embed with CPUExecutionProvider: CUDAExecutionProvider did not load"),
        ({"on_cpu": ["Attention", "TensorScatter"]}, "no CUDAExecutionProvider kernels for Attention, TensorScatter in graph embed"),
        ({"fails": "libcublasLt.so.13: cannot open\nand more"}, "with CUDAExecutionProvider: libcublasLt.so.13: cannot open$"),
    ],
)
def test_nothing_falls_back_silently(scripted: Bundle, behaviour: dict[str, Any], expected: str) -> None:
    backend = backend_with(**behaviour)
    with pytest.raises(EnvironmentProblem, match=expected):
        Session(scripted, backend)
    cuda = backend.device.cuda
    assert isinstance(cuda, SimulatedCuda) and cuda.leaked() == {}


def test_a_plugin_without_a_gpu_is_named(scripted: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    plugin = SimpleNamespace(get_ep_name=lambda: "name", get_library_path=lambda: "path")
    import_module: Callable[..., Any] = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda name: plugin if "rtx" in name else import_module(name))
    backend = backend_with(name="ort-trt-rtx", providers=[], register_execution_provider_library=lambda *_: None)
    with pytest.raises(EnvironmentProblem, match="shows no GPU that it runs on"):
        Plan(scripted, backend)


def test_a_bundle_without_graphs_for_gpus(tiny: Any) -> None:
    with pytest.raises(BundleError, match=r"holds no graphs for GPUs \(fp16-mask or bf16-mask; it holds: fp32-length\)"):
        Plan(tiny.bundle, backend_with())


def test_a_runtime_cache_is_for_the_provider_that_compiles(tmp_path: Path) -> None:
    cuda = SimulatedCuda()
    with pytest.raises(OptionError, match="of no use to backend ort-cuda"):
        OrtGpuBackend("ort-cuda", cuda, StandIn(cuda), tmp_path)
