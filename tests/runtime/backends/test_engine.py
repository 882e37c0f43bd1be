"""The TensorRT surface over a stand-in for the packages: what is set before an engine runs, and that every refusal is a clear line."""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from xpress_runtime.backends.engine import TensorRtLibrary
from xpress_runtime.errors import EnvironmentProblem, MissingExtraError


class Bits(IntEnum):
    VERSION_MISMATCH = 1
    UNSUPPORTED_CC = 2
    OLD_CUDA_DRIVER = 4


class Validity(IntEnum):
    VALID = 0
    INVALID = 2


class Logger:
    ERROR, INTERNAL_ERROR, WARNING, INFO = "error", "internal", "warning", "info"


class Cache:
    def __init__(self) -> None:
        self.content = b""

    def deserialize(self, content: bytes) -> bool:
        if content == b"damaged":
            return False
        self.content = content
        return True

    def serialize(self) -> bytes:
        return self.content + b"+"


class Context:
    """Notes what is called; ``refuses`` names the call that answers False."""

    def __init__(self, refuses: str, needs: int) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._refuses = refuses
        self._needs = needs

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            self.calls.append((name, *arguments))
            return self._needs if name == "update_device_memory_size_for_shapes" else name != self._refuses

        return call


class Engine:
    """Two inputs and two outputs, one of them a cache."""

    num_io_tensors = 4
    num_optimization_profiles = 2
    types: ClassVar[dict[str, str]] = {"ids": "INT64", "key_cache.0": "HALF", "key_cache_out.0": "HALF", "taps": "BF16"}

    def __init__(self, refuses: str, needs: int) -> None:
        self.config = SimpleNamespace(
            set_execution_context_allocation_strategy=lambda strategy: setattr(self, "strategy", strategy),
            create_runtime_cache=Cache,
            set_runtime_cache=lambda cache: setattr(self, "cache", cache),
        )
        self._refuses = refuses
        self._needs = needs

    def create_runtime_config(self) -> Any:
        return self.config

    def create_execution_context(self, how: Any) -> Any:
        self.how = how
        self.made = Context(self._refuses, self._needs)
        return None if self._refuses == "create_execution_context" else self.made

    def get_tensor_name(self, index: int) -> str:
        return list(self.types)[index]

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name=self.types[name])

    def get_tensor_mode(self, name: str) -> str:
        return "in" if name in ("ids", "key_cache.0") else "out"

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (-1, -1) if name == "ids" else (-1, 2, 8, 4)

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return "key_cache.0" if name == "key_cache_out.0" else None

    def get_device_memory_size_for_profile_v2(self, index: int) -> int:
        return (100, 300)[index]


def package(*, rtx: bool = True, diagnostics: int = 0, loads: bool = True, refuses: str = "", needs: int = 200) -> Any:
    """A stand-in for tensorrt_rtx, or for tensorrt, which lacks what only the other has."""

    class Runtime:
        def __init__(self, log: Any) -> None:
            self._log = log

        if rtx:
            engine_header_size = 4

            def get_engine_validity(self, header: bytes) -> Any:
                assert len(header) == 4
                if diagnostics < 0:
                    self._log.log(Logger.INTERNAL_ERROR, "no driver to be asked")
                return (Validity.INVALID if diagnostics else Validity.VALID), max(diagnostics, 0)

        def deserialize_cuda_engine(self, content: Any) -> Any:
            assert content[:6] == b"engine"
            if not loads:
                self._log.log(Logger.ERROR, "magic tag is wrong\nin some file")
                self._log.log(Logger.ERROR, "and so it failed")
                return None
            return Engine(refuses, needs)

    names: dict[str, Any] = {
        "__version__": "1.2.3",
        "ILogger": Logger,
        "Runtime": Runtime,
        "TensorIOMode": SimpleNamespace(INPUT="in"),
        "ExecutionContextAllocationStrategy": SimpleNamespace(USER_MANAGED="user-managed"),
    }
    if rtx:
        names |= {
            "IRuntimeCache": Cache,
            "EngineValidity": Validity,
            "EngineInvalidityDiagnostics": Bits,
            "DynamicShapesKernelSpecializationStrategy": SimpleNamespace(EAGER="eager"),
            "CudaGraphStrategy": SimpleNamespace(DISABLED="disabled"),
        }
    return SimpleNamespace(**names)


@pytest.fixture
def engine_file(tmp_path: Path) -> Path:
    (tmp_path / "head.engine").write_bytes(b"engine of some size")
    return tmp_path / "head.engine"


def library(monkeypatch: pytest.MonkeyPatch, kind: str = "tensorrt-rtx", **behaviour: Any) -> TensorRtLibrary:
    monkeypatch.setattr("importlib.import_module", lambda _: package(rtx=kind == "tensorrt-rtx", **behaviour))
    return TensorRtLibrary(kind)


def context_of(engine: Any) -> Any:
    return engine.context(1, {"ids": (1, 3)}, {"ids": 256, "taps": 512}, (1024, 300), 7)


@pytest.mark.parametrize("kind", ["tensorrt-rtx", "tensorrt"])
def test_tensors_and_scratch_memory(monkeypatch: pytest.MonkeyPatch, engine_file: Path, kind: str) -> None:
    found = library(monkeypatch, kind)
    assert (found.version, found.compiles_at_run_time) == ("1.2.3", kind == "tensorrt-rtx")
    engine = found.load(engine_file, None)
    assert engine.scratch_bytes == 300
    assert engine.tensors["ids"].dims == (-1, -1) and engine.tensors["ids"].is_input
    assert engine.tensors["key_cache_out.0"].aliases == "key_cache.0" and engine.tensors["taps"].aliases is None
    assert engine.tensors["key_cache.0"].dtype == np.float16 and engine.tensors["taps"].dtype == np.uint16


@pytest.mark.parametrize("kind", ["tensorrt-rtx", "tensorrt"])
def test_a_context_is_set_up_once_and_then_only_queued(monkeypatch: pytest.MonkeyPatch, engine_file: Path, kind: str) -> None:
    engine = library(monkeypatch, kind).load(engine_file, None)
    context = context_of(engine)
    made = engine._engine.made
    assert made.calls == [
        ("set_optimization_profile_async", 1, 7),
        ("set_input_shape", "ids", (1, 3)),
        ("set_tensor_address", "ids", 256),
        ("set_tensor_address", "taps", 512),
        ("update_device_memory_size_for_shapes",),
        ("set_device_memory", 1024, 300),
    ]
    made.calls.clear()
    context.enqueue(7)
    assert context.capturable(7)
    assert made.calls == [("execute_async_v3", 7), ("is_stream_capturable", 7)]


def test_kernels_are_compiled_before_the_first_run_and_graphs_are_ours(monkeypatch: pytest.MonkeyPatch, engine_file: Path) -> None:
    engine = library(monkeypatch).load(engine_file, b"kernels")
    config, inner = engine._config, engine._engine
    assert config.dynamic_shapes_kernel_specialization_strategy == "eager" and config.cuda_graph_strategy == "disabled"
    assert inner.strategy == "user-managed" and inner.cache.content == b"kernels"
    context_of(engine)
    assert inner.how is config
    assert engine.runtime_cache() == b"kernels+"
    engine.close()
    assert engine.runtime_cache() is None


def test_tensorrt_has_no_runtime_cache(monkeypatch: pytest.MonkeyPatch, engine_file: Path) -> None:
    engine = library(monkeypatch, "tensorrt").load(engine_file, None)
    context_of(engine)
    assert engine._engine.how == "user-managed" and engine.runtime_cache() is None


def test_a_damaged_runtime_cache_is_a_warning(monkeypatch: pytest.MonkeyPatch, engine_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = library(monkeypatch).load(engine_file, b"damaged")
    assert "the runtime cache for head.engine is damaged or of another machine; it is made again" in caplog.text
    assert engine.runtime_cache() == b"+"


@pytest.mark.parametrize(
    ("behaviour", "expected"),
    [
        ({"diagnostics": 1}, "built by another version of TensorRT-RTX"),
        ({"diagnostics": 6}, "does not cover this GPU's compute capability; the NVIDIA driver is too old for it"),
        ({"diagnostics": -1}, r"cannot use .*head.engine: no driver to be asked; build"),
        ({"loads": False}, r"TensorRT-RTX 1.2.3 cannot load .*head.engine: magic tag is wrong$"),
    ],
)
def test_engines_that_do_not_load(monkeypatch: pytest.MonkeyPatch, engine_file: Path, behaviour: dict[str, Any], expected: str) -> None:
    with pytest.raises(EnvironmentProblem, match=expected):
        library(monkeypatch, **behaviour).load(engine_file, None)


@pytest.mark.parametrize(
    ("behaviour", "expected"),
    [
        ({"refuses": "create_execution_context"}, "cannot make a context"),
        ({"refuses": "set_optimization_profile_async"}, "refused profile 1"),
        ({"refuses": "set_input_shape"}, r"refused shape \[1, 3\] for ids"),
        ({"refuses": "set_tensor_address"}, "refused the memory of ids"),
        ({"needs": 301}, "needs 301 bytes of scratch memory, more than the 300"),
        ({"refuses": "execute_async_v3"}, "the engine head.engine failed to run"),
    ],
)
def test_every_refusal_is_an_error(monkeypatch: pytest.MonkeyPatch, engine_file: Path, behaviour: dict[str, Any], expected: str) -> None:
    engine = library(monkeypatch, **behaviour).load(engine_file, None)
    with pytest.raises(EnvironmentProblem, match=expected):
        context_of(engine).enqueue(7)


def test_a_type_that_is_not_known(monkeypatch: pytest.MonkeyPatch, engine_file: Path) -> None:
    monkeypatch.setitem(Engine.types, "taps", "FP8")
    with pytest.raises(EnvironmentProblem, match="tensor taps has type FP8"):
        library(monkeypatch).load(engine_file, None)


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(MissingExtraError, match=r"tensorrt-rtx is not installed.*\[rtx\]"):
        TensorRtLibrary("tensorrt-rtx")


def test_the_real_package_has_everything_that_is_used() -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    used = {
        trt.Runtime: ["deserialize_cuda_engine", "engine_header_size", "get_engine_validity"],
        trt.ICudaEngine: [
            *("create_execution_context", "create_runtime_config", "get_aliased_input_tensor", "get_device_memory_size_for_profile_v2"),
            *("get_tensor_dtype", "get_tensor_mode", "get_tensor_name", "get_tensor_shape", "num_io_tensors", "num_optimization_profiles"),
        ],
        trt.IExecutionContext: [
            *("execute_async_v3", "is_stream_capturable", "set_device_memory", "set_input_shape", "set_optimization_profile_async"),
            *("set_tensor_address", "update_device_memory_size_for_shapes"),
        ],
        trt.IRuntimeConfig: [
            *("create_runtime_cache", "cuda_graph_strategy", "dynamic_shapes_kernel_specialization_strategy", "set_runtime_cache"),
            "set_execution_context_allocation_strategy",
        ],
        trt.IRuntimeCache: ["deserialize", "serialize"],
        trt.ExecutionContextAllocationStrategy: ["USER_MANAGED"],
        trt.DynamicShapesKernelSpecializationStrategy: ["EAGER"],
        trt.CudaGraphStrategy: ["DISABLED"],
        trt.EngineValidity: ["INVALID"],
        trt.ILogger: ["ERROR", "INTERNAL_ERROR", "WARNING"],
        trt.TensorIOMode: ["INPUT"],
    }
    assert not [(owner, name) for owner, names in used.items() for name in names if not hasattr(owner, name)]


def test_the_real_package_refuses_what_is_no_engine(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    (tmp_path / "none.engine").write_bytes(b"no engine at all, but longer than its header would be " * 4)
    found = TensorRtLibrary("tensorrt-rtx")
    with pytest.raises(EnvironmentProblem, match=r"cannot use .*none.engine: it is not an engine of TensorRT-RTX, or a damaged one"):
        found.load(tmp_path / "none.engine", None)
