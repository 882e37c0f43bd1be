"""What is refused before anything is allocated or loaded: memory, machine, version, rows; and what the refusal advises."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runtime.backends.conftest import GRAPH_SET
from tests.runtime.backends.simulated_cuda import SimulatedCuda
from tests.runtime.backends.simulated_engines import SimulatedLibrary
from tests.runtime.backends.test_simulated_gpu import cuda_of, simulated
from xpress_runtime.backends.admission import MemoryPlan
from xpress_runtime.backends.tensorrt import TensorRtBackend
from xpress_runtime.bundle import Bundle
from xpress_runtime.engines import ENGINES_FILE, engines_folder
from xpress_runtime.errors import BundleError, EnvironmentProblem
from xpress_runtime.memory import memory_need
from xpress_runtime.plan import Plan
from xpress_runtime.prefill import prefill

RESERVE = 64 << 20


def need(bundle: Bundle, capacity: int, batch: int) -> int:
    counted = memory_need(bundle.manifest, bundle.manifest.graph_set(GRAPH_SET), capacity=capacity, batch=batch)
    return counted.target_caches + counted.drafter_caches + counted.working


def test_a_refusal_names_the_parts_and_what_would_fit(scripted: Bundle) -> None:
    weights = 5 << 20
    plan = MemoryPlan(scripted.manifest, GRAPH_SET, weights, 3)
    enough = RESERVE + weights + need(scripted, 64, 3)
    plan.check(enough, 1 << 30)
    with pytest.raises(EnvironmentProblem, match=r"weights 5 MiB, caches 1 MiB, buffers 1 MiB\), and the GPU has") as caught:
        plan.check(enough - 1, 1 << 30)
    assert "a capacity of 63 would fit: build again with --capacity 63, or a batch of 2 would fit" in str(caught.value)
    room = RESERVE + weights + need(scripted, 20, 3)
    with pytest.raises(EnvironmentProblem, match="a capacity of 20 would fit"):
        plan.check(room, 1 << 30)
    with pytest.raises(EnvironmentProblem, match="nothing smaller would fit either"):
        plan.check(RESERVE, 1 << 30)


def test_loaded_weights_are_no_longer_asked_for_but_scratch_is(scripted: Bundle) -> None:
    plan = MemoryPlan(scripted.manifest, GRAPH_SET, 1 << 40, 1)
    room = RESERVE + need(scripted, 64, 1)
    plan.check(room, 1 << 30, loaded=True)
    with pytest.raises(EnvironmentProblem, match="scratch 1 MiB"):
        plan.check(room, 1 << 30, loaded=True, scratch=4096)


def test_too_little_for_what_requests_may_add_is_a_warning(trained: Bundle, caplog: pytest.LogCaptureFixture) -> None:
    manifest = replace(trained.manifest, target=replace(trained.manifest.target, vocab_size=151_936))
    need = memory_need(manifest, manifest.graph_set(GRAPH_SET), weights=0)
    plan = MemoryPlan(manifest, GRAPH_SET, 0, 1)
    plan.check(RESERVE + need.total + need.on_demand.total, 1 << 30)
    assert not caplog.records
    plan.check(RESERVE + need.total + need.on_demand.sampling - 1, 1 << 30, loaded=True)
    assert not caplog.records, "said when the plan is admitted, not with every engine"
    plan.check(RESERVE + need.total + need.on_demand.sampling - 1, 1 << 30)
    (warning,) = caplog.messages
    assert warning == "the GPU has 9 MiB left for what requests may add, too little for: sampling 9 MiB"


def test_too_little_memory_is_refused_before_an_engine_is_loaded(scripted: Bundle) -> None:
    backend = simulated(total_bytes=RESERVE)
    with pytest.raises(EnvironmentProblem, match="capacity 64 at batch 1 needs"):
        Plan(scripted, backend)
    assert not cuda_of(backend).calls("allocate") and not backend._library.engines  # type: ignore[attr-defined]


def test_scratch_memory_counts_before_a_buffer_is_allocated(scripted: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.runtime.backends.simulated_engines.SCRATCH_BYTES", 1 << 30)
    backend = simulated()
    with pytest.raises(EnvironmentProblem, match=r"scratch 1.0 GiB"):
        Plan(scripted, backend)
    assert not cuda_of(backend).calls("allocate")


def test_a_gpu_that_the_engines_do_not_cover(scripted: Bundle) -> None:
    expected = r"are for compute capability 8.6, 8.9, and this GPU \(Simulated GPU\) has 9.0; build .* --force --compute-capability 9.0$"
    with pytest.raises(EnvironmentProblem, match=expected):
        Plan(scripted, simulated(compute_capability="9.0"))


def test_engines_of_another_version(scripted: Bundle) -> None:
    cuda = SimulatedCuda()
    backend = TensorRtBackend("tensorrt-rtx", cuda, SimulatedLibrary(cuda, version="1.8.0.1"))
    with pytest.raises(EnvironmentProblem, match=r"were built by tensorrt-rtx 1.7.1.116, and TensorRT-RTX 1.8.0.1 is installed"):
        Plan(scripted, backend)


@pytest.mark.parametrize(("kind", "num_rows", "takes"), [("tensorrt-rtx", 2, "1"), ("tensorrt", 2, "3, 1"), ("tensorrt", 4, "3, 1")])
def test_a_number_of_rows_that_the_engines_do_not_take(scripted: Bundle, kind: str, num_rows: int, takes: str) -> None:
    with pytest.raises(BundleError, match=f"take {takes} rows at a time, and {num_rows} were asked for.*--batch {num_rows}"):
        Plan(scripted, simulated(kind=kind), num_rows)


def test_caches_that_do_not_begin_at_aligned_addresses(scripted: Bundle) -> None:
    manifest = replace(scripted.manifest, cache_rows=scripted.manifest.cache_rows + 1)
    with pytest.raises(BundleError, match="engines need a multiple of 256"):
        Plan(replace(scripted, manifest=manifest), simulated(kind="tensorrt"), 3)


def test_engines_that_are_not_there(scripted: Bundle, tmp_path: Path) -> None:
    shutil.copytree(scripted.folder, tmp_path / "bundle", ignore=shutil.ignore_patterns("tensorrt"))
    with pytest.raises(BundleError, match=r"holds no engines of kind tensorrt \(it holds: tensorrt-rtx\); build .*--kind tensorrt"):
        Plan(Bundle.open(tmp_path / "bundle", verify=False), simulated(kind="tensorrt"))


def test_an_engine_that_was_changed(scripted: Bundle, tmp_path: Path) -> None:
    shutil.copytree(scripted.folder, tmp_path / "bundle")
    bundle = Bundle.open(tmp_path / "bundle", verify=False)
    engine = engines_folder(bundle, "tensorrt-rtx") / "head.engine"
    engine.write_bytes(engine.read_bytes().replace(b"head", b"HEAD"))
    with pytest.raises(BundleError, match="sha256 differs"):
        Plan(bundle, simulated())


def test_shapes_without_a_profile_are_named(scripted: Bundle, tmp_path: Path) -> None:
    shutil.copytree(scripted.folder, tmp_path / "bundle")
    bundle = Bundle.open(tmp_path / "bundle", verify=False)
    path = engines_folder(bundle, "tensorrt-rtx") / ENGINES_FILE
    values: dict[str, Any] = json.loads(path.read_text())
    for bounds in values["engines"]["target"]["profiles"][0]["embeddings"].values():
        bounds[1] = 1
    path.write_text(json.dumps(values))
    with pytest.raises(BundleError, match="the engine of target has no profile for embeddings"):
        prefill(Plan(bundle, simulated()), 0, np.arange(1, 4), None)
