"""How many slots are verified may follow from history and from what slots were drawn from, never from what was drawn.

Once on the modules, with many samples; and through the loop of speculation "auto" on real graphs, with policies that are told what it is told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.sampling.chain import BLOCK_SIZE, Chain, WidthRule
from tests.sampling.conftest import Models
from tests.sampling.continuations import TEXT
from tests.sampling.goodness import fit
from tests.sampling.reference import Continuations
from xpress_runtime.auto import AutoLoop
from xpress_runtime.backends.ort_cpu import OrtCpuBackend
from xpress_runtime.backlog import Backlog
from xpress_runtime.bundle import Bundle
from xpress_runtime.generation import GenerationConfig
from xpress_runtime.loops import make_drafter
from xpress_runtime.plan import Plan
from xpress_runtime.sampling import SamplingForm
from xpress_runtime.speculation import SpeculationPolicy, StageCosts
from xpress_runtime.stats import GenerationStats

NUM_SAMPLES = 200_000


def sure_of_every_slot_so_far(*least: float) -> WidthRule:
    """On to the next slot while the largest probabilities of all slots up to it have at least this product: as "auto" does."""

    def rule(confidence: Tensor, ids: Tensor) -> Tensor:  # noqa: ARG001
        return 1 + (confidence.cumprod(dim=1) > torch.tensor(least)).long().cumprod(dim=1).sum(dim=1)

    return rule


def sure_of_the_next_slot(confidence: Tensor, ids: Tensor) -> Tensor:  # noqa: ARG001
    """Whether slot 1 is verified follows from slot 2, whose distribution follows from the token in slot 1."""
    return torch.where(confidence[:, 1] > 0.4, BLOCK_SIZE, 1)


def likes_the_token(confidence: Tensor, ids: Tensor) -> Tensor:  # noqa: ARG001
    """Slot 1 is verified where its token is an even one."""
    return torch.where(ids[:, 1] % 2 == 0, 2, 1)


@pytest.mark.parametrize(("temperature", "shortlist", "least"), [(0.7, 0, (0.3, 0.2, 0.1)), (1.5, 3, (0.45, 0.25, 0.14))])
def test_a_width_that_follows_from_the_slots_up_to_it_is_exact(temperature: float, shortlist: int, least: tuple[float, ...]) -> None:
    chain = Chain(temperature, shortlist)
    counts, widths = chain.sampled(sure_of_every_slot_so_far(*least), NUM_SAMPLES)
    result = fit(counts, chain.probabilities())
    assert result.holds, result
    # Every width is chosen often.
    assert (widths[1:] > 0.05 * NUM_SAMPLES).all(), widths


@pytest.mark.parametrize("rule", [sure_of_the_next_slot, likes_the_token])
def test_a_width_that_follows_from_what_was_drawn_is_caught(rule: WidthRule) -> None:
    chain = Chain(0.7)
    counts, _ = chain.sampled(rule, NUM_SAMPLES)
    assert not fit(counts, chain.probabilities()).holds


# The loop.


class SequentialPolicy:
    """Every third step is plain; the others go on while the slots so far are sure. Counts the widths of what it decided."""

    def __init__(self) -> None:
        self.num_rounds = 0
        self.widths: Counter[int] = Counter()

    def new_request(self) -> None: ...

    def begin(self) -> bool:
        self.num_rounds += 1
        self.widths[0] += self.num_rounds % 3 == 0
        return self.num_rounds % 3 != 0

    def width(self, confidence: Sequence[float]) -> int:
        sure = np.cumprod(confidence) > [0.25, 0.1, 0.04]
        width = 1 + int(np.logical_and.accumulate(sure).sum())
        self.widths[width] += 1
        return width

    def record_plain(self, seconds: float) -> None: ...

    def record_round(self, *_: object) -> None: ...


class PeekingPolicy(SequentialPolicy):
    """Verifies the first draft where it is an even token."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self._plan = plan

    def width(self, confidence: Sequence[float]) -> int:  # noqa: ARG002
        return 2 - int(self._plan.buffers.verify_ids.read()[0, 1]) % 2


class SteadyPolicy(SpeculationPolicy):
    """The real one on a machine where everything takes the same time every time, so that its choices can be repeated."""

    def __init__(self) -> None:
        super().__init__(BLOCK_SIZE, range(1, BLOCK_SIZE + 1), True, StageCosts.calibrated(0.3, {1: 1.0, 4: 1.6}, block_size=BLOCK_SIZE))

    def record_plain(self, seconds: float) -> None:  # noqa: ARG002
        super().record_plain(1.0)

    def record_round(self, width: int, accepted: int, confidence: Sequence[float] | None, draft_seconds: float, verify_seconds: float) -> None:  # noqa: ARG002
        super().record_round(width, accepted, confidence, 0.3, 0.8 + 0.2 * width)


def later_pairs(loop: AutoLoop, config: GenerationConfig, num_samples: int) -> NDArray[np.int64]:
    """How often each two tokens [V, V] were the second and the third after :data:`TEXT`: those that rounds emit."""
    counts = np.zeros((8, 8), np.int64)
    for seed in range(num_samples):
        stats = GenerationStats(len(TEXT), loop.num_proposals, None)
        tokens = [loop.start(0, TEXT, stats, replace(config, seed=seed))]
        while len(tokens) < 3:
            committed = loop.round(stats)
            tokens += committed.tokens[0, : committed.num_emitted[0]].tolist()
        counts[tokens[1], tokens[2]] += 1
    return counts


AUTO = {
    "block": GenerationConfig(temperature=1.0, num_passes=1, top_p=0.9),
    "autoregressive": GenerationConfig(temperature=0.7, drafter="autoregressive", repetition_penalty=1.3),
}


@pytest.fixture(scope="module")
def auto_plan(exported: Bundle) -> Plan:
    return Plan(exported, OrtCpuBackend(threads=1))


def auto_loop(plan: Plan, config: GenerationConfig, policy: object) -> AutoLoop:
    backlog = plan.part(Backlog) if config.drafter == "block" else None
    drafter = make_drafter(plan, config, sampled=True, backlog=backlog)
    return AutoLoop(plan, drafter, SamplingForm.of([config]), backlog, policy)


@pytest.mark.parametrize("drafter", AUTO)
def test_auto(models: Models, auto_plan: Plan, drafter: str) -> None:
    import time
    config = AUTO[drafter]
    truth = Continuations(models.target, TEXT).probabilities(config, 3).sum(0)
    for policy in (SequentialPolicy(), SteadyPolicy(), PeekingPolicy(auto_plan)):
        t=time.process_time()
        loop = auto_loop(auto_plan, config, policy)
        f=fit(later_pairs(loop, config, 5000), truth)
        print(type(policy).__name__, f, time.process_time()-t, getattr(policy,"widths",None) or policy.counts)
