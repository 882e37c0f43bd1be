"""Two tokens from the speculative sampler, 200,000 times, against the exact probabilities of what the target alone writes.

Every value of every setting is in some of the fast cases, most of which run real graphs; the slow ones cross them. Bounds are in
:mod:`tests.sampling.goodness`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, product
from typing import Any

import pytest

from tests.sampling.conftest import Models, world
from tests.sampling.continuations import TEXT, begin, noise_keys, sample_pairs
from tests.sampling.goodness import fit
from tests.sampling.reference import Continuations
from xpress_runtime.generation import GenerationConfig
from xpress_runtime.loops import Loops
from xpress_runtime.plan import Plan
from xpress_runtime.stats import GenerationStats
from xpress_runtime.verification import SamplingMemory

NUM_SAMPLES = 200_000

PROCESSORS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "top-k": {"top_k": 4},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.3},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "all": {"repetition_penalty": 0.8, "presence_penalty": -0.5, "frequency_penalty": 0.2, "top_k": 6, "top_p": 0.9, "min_p": 0.15},
}


def settings(temperature: float, processors: str = "nothing", **drafter: Any) -> GenerationConfig:
    return GenerationConfig(temperature=temperature, **PROCESSORS[processors], **drafter)


EXPORTED: dict[str, GenerationConfig] = {
    "no pass, three steps": settings(1.0, num_passes=0, draft_steps=3),
    "one pass, shortlist, two steps, penalties": settings(1.0, "penalties", num_passes=1, shortlist=3, draft_steps=2),
    "autoregressive": settings(1.5, drafter="autoregressive"),
    "lookup, min-p": settings(1.0, "min-p", drafter="lookup"),
    "plain, all processors": settings(1.5, "all", speculation="off"),
}
REFINED = settings(1.5, "top-k", num_passes=3, shortlist=3)
MARKOV = settings(0.5, "top-p", num_passes=3, shortlist=0, draft_steps=2)


@pytest.mark.parametrize("case", EXPORTED)
def test_pairs_from_the_graphs(case: str, exported_plan: Plan, truth: Continuations) -> None:
    config = EXPORTED[case]
    assert_drafts_count(config, assert_exact(exported_plan, config, truth))


def test_pairs_with_a_refiner_that_settles_every_slot(refined_plan: Plan, truth: Continuations) -> None:
    assert_drafts_count(REFINED, assert_exact(refined_plan, REFINED, truth))


def test_pairs_with_a_markov_head(markov_plan: Plan, truth: Continuations) -> None:
    assert_drafts_count(MARKOV, assert_exact(markov_plan, MARKOV, truth))


def assert_exact(plan: Plan, config: GenerationConfig, truth: Continuations) -> float:
    """How often the first draft was accepted."""
    pairs = sample_pairs(plan, config, NUM_SAMPLES)
    result = fit(pairs.counts, truth.probabilities(config))
    assert result.holds, result
    return pairs.acceptance


def assert_drafts_count(config: GenerationConfig, acceptance: float) -> None:
    """Where hardly a draft is accepted, or hardly one rejected, a right distribution says little."""
    assert config.speculation == "off" or 0.05 < acceptance < 0.95, acceptance


@pytest.mark.parametrize("temperature", [0.5, 1.5])
def test_a_drafter_that_is_the_target_has_every_draft_accepted(models: Models, temperature: float) -> None:
    """So what its drafts were drawn from, at which temperature, and in which order, is what acceptance hears."""
    plan = world(models, "refined", (0,), draft_model_name="target").plan()
    config = settings(temperature, drafter="autoregressive")
    loop = Loops().loop(plan, config)
    begin(plan, loop, config, TEXT[:-1], TEXT[-1])
    plan.part(SamplingMemory).rows.noise_key.write(noise_keys(plan.num_rows))
    for _ in range(3):
        committed = loop.round(GenerationStats(0, loop.num_proposals, None))
        assert (committed.accepted == loop.num_proposals).all()


# Slow: every drafter at every temperature, with the processors in turn.

TEMPERATURES = (0.5, 1.0, 1.5)
PASSES = ((0, None), (1, 0), (3, 0), (1, 3), (3, 3))
BLOCK = [{"num_passes": passes, "shortlist": shortlist, "draft_steps": steps} for passes, shortlist in PASSES for steps in (1, 2, 3)]
OTHERS: list[dict[str, Any]] = [{"drafter": "autoregressive"}, {"drafter": "lookup"}, {"speculation": "off"}]


def crossed(drafters: Sequence[dict[str, Any]]) -> list[Any]:
    turns = cycle(PROCESSORS)
    cases = [(drafter, temperature, next(turns)) for drafter, temperature in product(drafters, TEMPERATURES)]
    return [
        pytest.param(settings(temperature, processors, **drafter), id=f"{drafter}, T {temperature}, {processors}")
        for drafter, temperature, processors in cases
    ]


@pytest.mark.slow
@pytest.mark.parametrize("config", crossed([*BLOCK, *OTHERS]))
def test_every_drafter(config: GenerationConfig, refined_plan: Plan, truth: Continuations) -> None:
    assert_exact(refined_plan, config, truth)


@pytest.mark.slow
@pytest.mark.parametrize("config", crossed([variant for variant in BLOCK if variant["num_passes"] == 3]))
def test_every_markov_drafter(config: GenerationConfig, markov_plan: Plan, truth: Continuations) -> None:
    assert_exact(markov_plan, config, truth)
