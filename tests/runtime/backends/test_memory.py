"""The memory that is planned is the memory that is allocated: of a plan, and of each part that a request may add."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.runtime.backends.conftest import GRAPH_SET
from xpress_runtime.backends.ort_cpu import ArrayBuffer, OrtCpuBackend
from xpress_runtime.backlog import Backlog
from xpress_runtime.bundle import Bundle
from xpress_runtime.drafters import AutoregressiveDrafter, BlockDrafter, LookupDrafter
from xpress_runtime.memory import MemoryNeed, memory_need
from xpress_runtime.plan import Plan
from xpress_runtime.serving.taps import RowTaps
from xpress_runtime.verification import SamplingMemory

# Ids, positions and counts of a row: not planned.
SMALL_BYTES = 4096


class Counting(OrtCpuBackend):
    num_bytes = 0

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> ArrayBuffer:
        buffer = super().allocate(shape, dtype)
        self.num_bytes += buffer.read().nbytes
        return buffer


def counted(bundle: Bundle, num_rows: int, use: Callable[[Plan], object] = lambda _: None) -> tuple[int, int]:
    """Bytes of a plan, and those that ``use`` adds."""
    backend = Counting(1, GRAPH_SET)
    plan = Plan(bundle, backend, num_rows)
    planned = backend.num_bytes
    use(plan)
    return planned, backend.num_bytes - planned


def needed(bundle: Bundle, num_rows: int) -> MemoryNeed:
    return memory_need(bundle.manifest, bundle.manifest.graph_set(GRAPH_SET), batch=num_rows, weights=0)


@pytest.mark.parametrize("num_rows", [1, 2])
def test_a_plan_takes_what_is_planned(trained: Bundle, num_rows: int) -> None:
    planned, _ = counted(trained, num_rows)
    assert 0 <= planned - needed(trained, num_rows).total <= SMALL_BYTES


PARTS: dict[str, Callable[[Plan], object]] = {
    "sampling": lambda plan: plan.part(SamplingMemory),
    "denoising": lambda plan: BlockDrafter(plan, 3, 0, 3).draft(),
    "lookup": LookupDrafter,
    "backlog": lambda plan: plan.part(Backlog if plan.num_rows == 1 else RowTaps),
    "draft_model": AutoregressiveDrafter,
}


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("part", PARTS)
def test_what_a_request_adds_is_what_is_announced(trained: Bundle, part: str, num_rows: int) -> None:
    _, added = counted(trained, num_rows, PARTS[part])
    announced = getattr(needed(trained, num_rows).on_demand, part)
    assert announced > SMALL_BYTES / 4
    assert 0 <= added - announced <= SMALL_BYTES / 4


def test_what_is_not_built_needs_nothing(trained: Bundle) -> None:
    without = replace(trained.manifest, sampling=False, draft_model=None)
    need = memory_need(without, without.graph_set(GRAPH_SET)).on_demand
    assert (need.sampling, need.draft_model) == (0, 0)
    assert need.total == need.denoising + need.lookup + need.backlog


def test_the_total_leaves_out_what_is_added(trained: Bundle) -> None:
    need = needed(trained, 1)
    assert need.total == need.target_caches + need.drafter_caches + need.working
    # The published size of Qwen3: more tokens, and the same formula.
    wide = replace(trained.manifest, target=replace(trained.manifest.target, vocab_size=151_936))
    of_wide = memory_need(wide, wide.graph_set(GRAPH_SET))
    assert of_wide.on_demand.sampling == 4 * 151_936 * (3 + 3 + 2 * 4)
