"""Two tokens from the speculative sampler, 200,000 times, against the exact probabilities of what the target alone writes.

Every value of every setting is in some case of the fast ones, and every kind of drafter with several; the slow ones cross them. Bounds are in
:mod:`tests.sampling.goodness`.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.sampling.conftest import Models, World, world
from tests.sampling.continuations import TEXT, begin, noise_keys, sample_pairs
from tests.sampling.goodness import fit
from xpress_runtime.generation import GenerationConfig
from xpress_runtime.loops import Loops
from xpress_runtime.plan import Plan
from xpress_runtime.stats import GenerationStats
from xpress_runtime.verification import SamplingMemory

NUM_SAMPLES = 200_000

PENALTIES: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3}
PROCESSORS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "top-k": {"top_k": 4},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.3},
    "penalties": PENALTIES,
    "all": {**PENALTIES, "top_k": 6, "top_p": 0.9, "min_p": 0.15},
}

REFINED: dict[str, GenerationConfig] = {
    "no pass, three steps, min-p": GenerationConfig(temperature=1.0, num_passes=0, draft_steps=3, **PROCESSORS["min-p"]),
    "one pass, top-p": GenerationConfig(temperature=0.5, num_passes=1, shortlist=0, **PROCESSORS["top-p"]),
    "all passes, shortlist, top-k": GenerationConfig(temperature=1.5, num_passes=3, shortlist=3, **PROCESSORS["top-k"]),
    "all passes, all processors": GenerationConfig(temperature=0.5, num_passes=3, shortlist=0, **PROCESSORS["all"]),
    "one pass, shortlist, two steps, penalties": GenerationConfig(
        temperature=1.0, num_passes=1, shortlist=3, draft_steps=2, **PROCESSORS["penalties"]
    ),
    "autoregressive": GenerationConfig(temperature=1.5, drafter="autoregressive"),
    "lookup, all processors": GenerationConfig(temperature=1.0, drafter="lookup", **PROCESSORS["all"]),
    "plain, all processors": GenerationConfig(temperature=1.5, speculation="off", **PROCESSORS["all"]),
}
MARKOV = GenerationConfig(temperature=1.5, num_passes=3, shortlist=3, draft_steps=2, **PROCESSORS["penalties"])


@pytest.mark.parametrize("case", REFINED)
def test_pairs_have_the_targets_probabilities(case: str, refined: World, refined_plan: Plan) -> None:
    assert_exact(refined, refined_plan, REFINED[case])


def test_pairs_have_the_targets_probabilities_with_a_markov_head(markov: World, markov_plan: Plan) -> None:
    assert_exact(markov, markov_plan, MARKOV)


@pytest.mark.parametrize("temperature", [0.5, 1.5])
def test_a_drafter_that_is_the_target_has_every_draft_accepted(models: Models, temperature: float) -> None:
    """So what its drafts were drawn from, at which temperature, and in which order, is what acceptance hears."""
    plan = world(models, "refined", (0,), draft_model_name="target").plan()
    config = GenerationConfig(temperature=temperature, drafter="autoregressive")
    loop = Loops().loop(plan, config)
    begin(plan, loop, config, TEXT[:-1], TEXT[-1])
    plan.part(SamplingMemory).rows.noise_key.write(noise_keys(plan.num_rows))
    committed = loop.round(GenerationStats(0, loop.num_proposals, None))
    assert (committed.accepted == loop.num_proposals).all()


def assert_exact(world: World, plan: Plan, config: GenerationConfig) -> None:
    pairs = sample_pairs(plan, config, NUM_SAMPLES)
    result = fit(pairs.counts, world.truth.probabilities(config))
    import time; print(result, pairs.acceptance)
    assert result.holds, result
    # Else the sampler would hardly have used the drafts, or hardly anything else.
    if config.speculation == "on":
        assert 0.05 < pairs.acceptance < 0.95, pairs.acceptance


TEMPERATURES = (0.5, 1.0, 1.5)
BLOCK = [
    {"num_passes": passes, "shortlist": shortlist, "draft_steps": steps}
    for passes, shortlist in ((0, 0), (1, 0), (3, 0), (1, 3), (3, 3))
    for steps in (1, 2, 3)
]
MARKOV_BLOCK = [{"num_passes": 3, "shortlist": shortlist, "draft_steps": steps} for shortlist in (0, 3) for steps in (1, 2, 3)]
OTHERS: list[dict[str, Any]] = [{"drafter": "autoregressive"}, {"drafter": "lookup"}, {"speculation": "off"}]


@pytest.mark.slow
@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("drafter", [*BLOCK, *OTHERS], ids=str)
def test_every_drafter_with_every_setting(
    drafter: dict[str, Any], temperature: float, processors: str, refined: World, refined_plan: Plan
) -> None:
    assert_exact(refined, refined_plan, GenerationConfig(temperature=temperature, **drafter, **PROCESSORS[processors]))


@pytest.mark.slow
@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("drafter", MARKOV_BLOCK, ids=str)
def test_a_markov_head_with_every_setting(
    drafter: dict[str, Any], temperature: float, processors: str, markov: World, markov_plan: Plan
) -> None:
    assert_exact(markov, markov_plan, GenerationConfig(temperature=temperature, **drafter, **PROCESSORS[processors]))
