"""The loop of speculation "auto" on real graphs: plain steps, drafted rounds of every width, and tokens of the target's distribution.

The right policies decide from history and confidences. One that looks at a drawn token is caught by the same check, with as many samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.sampling.conftest import Models
from tests.sampling.continuations import TEXT
from tests.sampling.goodness import Fit, fit
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

NUM_SAMPLES, NUM_SLOW_SAMPLES = 3_000, 40_000
BLOCK_SIZE = 4

DRAFTERS = {
    "block": GenerationConfig(temperature=1.0, num_passes=1, top_p=0.9),
    "autoregressive": GenerationConfig(temperature=0.7, drafter="autoregressive", repetition_penalty=1.3),
    "lookup": GenerationConfig(temperature=1.0, drafter="lookup", top_k=5),
}


class SequentialPolicy:
    """Every third step is plain; the others go on while the slots so far are sure enough. Counts widths, 0 for plain steps."""

    def __init__(self, least: Sequence[float] = (0.4, 0.2, 0.1)) -> None:
        self._least = least
        self._num_rounds = 0
        self.widths: Counter[int] = Counter()

    def new_request(self) -> None: ...

    def begin(self) -> bool:
        self._num_rounds += 1
        self.widths[0] += self._num_rounds % 3 == 0
        return self._num_rounds % 3 != 0

    def width(self, confidence: Sequence[float]) -> int:
        width = 1 + int(np.logical_and.accumulate(np.cumprod(confidence) > self._least).sum())
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
    """The real one, told of stages that always take the same time, so that its choices can be repeated."""

    def __init__(self) -> None:
        costs = StageCosts.calibrated(0.05, {1: 1.0, BLOCK_SIZE: 1.6}, block_size=BLOCK_SIZE)
        super().__init__(BLOCK_SIZE, range(1, BLOCK_SIZE + 1), True, costs)

    def record_plain(self, seconds: float) -> None:  # noqa: ARG002
        super().record_plain(1.0)

    def record_round(self, width: int, accepted: int, confidence: Sequence[float] | None, *seconds: float) -> None:  # noqa: ARG002
        super().record_round(width, accepted, confidence, 0.05, 0.8 + 0.2 * width)


@pytest.fixture(scope="module")
def plan(exported: Bundle) -> Plan:
    return Plan(exported, OrtCpuBackend(threads=1))


def check(plan: Plan, models: Models, config: GenerationConfig, policy: Any, num_samples: int) -> Fit:
    """Of the two tokens after the first."""
    backlog = plan.part(Backlog) if config.drafter == "block" else None
    drafter = make_drafter(plan, config, sampled=True, backlog=backlog)
    loop = AutoLoop(plan, drafter, SamplingForm.of([config]), backlog, policy)
    counts, exact = sampled_triples(loop, config, num_samples), Continuations(models.target, TEXT).probabilities(config, 3)
    # The first token follows the prompt; rounds emit the other two.
    assert fit(counts.sum(axis=(1, 2)), exact.sum(axis=(1, 2))).holds
    return fit(counts.sum(axis=0), exact.sum(axis=0))


def sampled_triples(loop: AutoLoop, config: GenerationConfig, num_samples: int) -> NDArray[np.int64]:
    """How often each three tokens [V, V, V] followed :data:`TEXT`."""
    vocab_size = loop.plan.bundle.manifest.target.vocab_size
    counts = np.zeros((vocab_size,) * 3, np.int64)
    for seed in range(num_samples):
        stats = GenerationStats(len(TEXT), loop.num_proposals, None)
        tokens = [loop.start(0, TEXT, stats, replace(config, seed=seed))]
        while len(tokens) < 3:
            committed = loop.round(stats)
            tokens += committed.tokens[0, : committed.num_emitted[0]].tolist()
        counts[tuple(tokens[:3])] += 1
    return counts


@pytest.mark.parametrize("drafter", ["block", "autoregressive"])
def test_widths_from_confidences_are_exact(models: Models, plan: Plan, drafter: str) -> None:
    policy = SequentialPolicy()
    assert check(plan, models, DRAFTERS[drafter], policy, NUM_SAMPLES).holds
    # Plain steps, drafts that were not verified, and every width.
    assert min(policy.widths[width] for width in range(BLOCK_SIZE + 1)) > 0.02 * NUM_SAMPLES, policy.widths


def test_the_real_policy_is_exact(models: Models, plan: Plan) -> None:
    policy = SteadyPolicy()
    assert check(plan, models, DRAFTERS["block"], policy, NUM_SAMPLES).holds
    assert len(policy.counts.widths) > 1 and policy.counts.plain, policy.counts


def test_a_width_that_follows_from_a_drawn_token_is_caught(models: Models, plan: Plan) -> None:
    assert not check(plan, models, DRAFTERS["block"], PeekingPolicy(plan), NUM_SAMPLES).holds


@pytest.mark.slow
@pytest.mark.parametrize("make_policy", [SequentialPolicy, SteadyPolicy])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_drafter_is_exact(models: Models, plan: Plan, drafter: str, make_policy: type[SequentialPolicy | SteadyPolicy]) -> None:
    assert check(plan, models, DRAFTERS[drafter], make_policy(), NUM_SLOW_SAMPLES).holds
