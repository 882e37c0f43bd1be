"""What is said of bundle, machine and device: enough to judge figures, and nothing private."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.bench.synthetic import manifest
from tests.runtime.backends.simulated_cuda import SimulatedCuda
from xpress_export.bench.environment import describe_environment, describe_subject, load_note
from xpress_export.bench.measure import device_bytes
from xpress_runtime.backends.device import DeviceBackend
from xpress_runtime.manifest import Origin, TargetRecord


def session(backend: Any, source: str = "folder/tiny") -> Any:
    made = manifest()
    target = made.target
    moved = TargetRecord(
        Origin(source, None, None, "0" * 64),
        target.model_type,
        target.hidden_size,
        target.vocab_size,
        target.max_positions,
        target.stop_token_ids,
        target.caches,
    )
    folder = SimpleNamespace(resolve=lambda: SimpleNamespace(name="demo-bundle"))
    return SimpleNamespace(bundle=SimpleNamespace(manifest=manifest(target=moved), folder=folder), backend=backend)


CPU = SimpleNamespace(name="ort-cpu", graph_set="fp32-length")


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("/srv/models/secret/Qwen3-8B", "Qwen3-8B"),
        ("~/models/Qwen3-8B", "Qwen3-8B"),
        ("../Qwen3-8B", "Qwen3-8B"),
    ],
)
def test_of_a_path_only_the_last_part_is_told(source: str, shown: str) -> None:
    assert describe_subject(session(CPU, source))["target"]["source"] == shown


def test_subject_names_all_that_was_built() -> None:
    subject = describe_subject(session(CPU))
    assert subject["bundle"] == "demo-bundle"
    assert (subject["num_passes"], subject["shortlists"], subject["block_size"]) == ([2, 4, 1, 0], [0, 256], 8)
    assert subject["draft_model"]["layers"] == (0, 1)


def test_machine_without_a_device() -> None:
    environment = describe_environment(session(CPU), threads=2, load_before=0.0)
    assert environment["machine"]["num_cores"] >= 1
    assert environment["machine"]["device"] is None
    assert {"xpress-export", "python", "numpy"} <= set(environment["versions"])
    assert device_bytes(CPU) is None  # type: ignore[arg-type]


def test_device_is_named_and_its_memory_counted() -> None:
    backend: Any = DeviceBackend(SimulatedCuda())
    backend.name, backend.graph_set = "tensorrt", "fp16-mask"
    before = device_bytes(backend)
    assert before is not None
    backend.device.allocate(1 << 20)
    assert device_bytes(backend) == before + (1 << 20)
    assert "compute capability" in describe_environment(session(backend), threads=None, load_before=None)["machine"]["device"]
    backend.device.close()


@pytest.mark.parametrize(("load", "warns"), [(None, False), (0.1, False), (0.5, True), (7.0, True)])
def test_other_work_is_noted(load: float | None, warns: bool) -> None:
    note = load_note({"machine": {"load_before": load, "num_cores": 2}})
    assert (note is not None) == warns
