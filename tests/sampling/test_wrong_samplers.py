"""Samplers with one fault each: the check that the right ones pass rejects them, with a tenth of the samples."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from tests.sampling.conftest import World
from tests.sampling.continuations import sample_pairs
from tests.sampling.goodness import Fit, fit
from xpress_export.models.denoise import Denoise
from xpress_runtime.generation import GenerationConfig

NUM_SAMPLES = 20_000


class WrongScores(nn.Module):
    """A refiner graph that says it drew from something else."""

    def __init__(self, form: nn.Module, change: Any) -> None:
        super().__init__()
        self.form = form
        self.change = change

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        ids, scores, *candidates = self.form(*inputs)
        return (ids, self.change(scores, inputs), *candidates)


def without_temperature(scores: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
    inverse_temperature = inputs[6]
    return scores / inverse_temperature[:, None, None]


def of_the_slot_before(scores: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:  # noqa: ARG001
    return scores.roll(1, dims=1)


def of_the_pass_before(scores: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
    """One pass: what the seed was drawn from."""
    base_logits, inverse_temperature = inputs[1], inputs[6]
    return base_logits * inverse_temperature[:, None, None] + 0 * scores


class ForgetfulCount(nn.Module):
    """Penalties that count the anchor of a round, and none of its accepted drafts."""

    def __init__(self, count: nn.Module) -> None:
        super().__init__()
        self.count = count

    def forward(self, counts: Tensor, verify_ids: Tensor, num_emitted: Tensor) -> Tensor:
        counted: Tensor = self.count(counts, verify_ids, num_emitted.clamp(max=1))
        return counted


def check(world: World, config: GenerationConfig, graph: str, change: Any) -> Fit:
    plan = world.plan(world.backend.replacing(graph, change))
    return fit(sample_pairs(plan, config, NUM_SAMPLES).counts, world.truth.probabilities(config))


@pytest.mark.parametrize("change", [without_temperature, of_the_slot_before, of_the_pass_before])
def test_wrong_q_is_caught(refined: World, change: Any) -> None:
    config = GenerationConfig(temperature=0.5, num_passes=1, shortlist=0)
    result=check(refined, config, "refiner-k1-sampled", lambda form: WrongScores(form, change))
    print(result)
    assert not result.holds
    assert check(refined, config, "refiner-k1-sampled", lambda form: form).holds
