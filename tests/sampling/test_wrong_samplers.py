"""Samplers with one fault each: the check that the right ones pass rejects them, with a tenth of the samples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.sampling.conftest import World
from tests.sampling.continuations import sample_pairs
from tests.sampling.goodness import Fit, fit
from tests.sampling.reference import Continuations
from xpress_runtime.generation import GenerationConfig
from xpress_runtime.plan import Plan

NUM_SAMPLES = 20_000
REFINED = GenerationConfig(temperature=0.5, num_passes=1, shortlist=0)
PENALISED = GenerationConfig(temperature=1.0, num_passes=1, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3)


class WrongScores(nn.Module):
    """A refiner's sampled form that says it drew from other scores: of its own, base logits and inverse temperature."""

    def __init__(self, form: nn.Module, change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.form = form
        self.change = change

    def forward(self, hidden: Tensor, base_logits: Tensor, *numbers: Tensor) -> tuple[Tensor, Tensor]:
        ids, scores = self.form(hidden, base_logits, *numbers)
        _anchor, _predecessor, _position, _noise_key, inverse_temperature, _sampled = numbers
        return ids, self.change(scores, base_logits, inverse_temperature[:, None, None])


class OnlyTheAnchor(nn.Module):
    """Penalties that do not know of the drafts before a position."""

    def __init__(self, penalise: nn.Module) -> None:
        super().__init__()
        self.penalise = penalise

    def forward(self, logits: Tensor, verify_ids: Tensor, *numbers: Tensor) -> Tensor:
        no_drafts = torch.where(torch.arange(verify_ids.shape[1]) == 0, verify_ids, -1)
        penalised: Tensor = self.penalise(logits, no_drafts, *numbers)
        return penalised


class NeverCounts(nn.Module):
    """Penalties that do not know of the rounds before."""

    def __init__(self, count: nn.Module) -> None:  # noqa: ARG002
        super().__init__()

    def forward(self, counts: Tensor, verify_ids: Tensor, num_emitted: Tensor) -> Tensor:  # noqa: ARG002
        return counts


def check(plan: Plan, config: GenerationConfig, truth: Continuations) -> Fit:
    return fit(sample_pairs(plan, config, NUM_SAMPLES).counts, truth.probabilities(config))


@pytest.mark.parametrize("config", [REFINED, PENALISED])
def test_the_right_sampler_passes(refined_plan: Plan, truth: Continuations, config: GenerationConfig) -> None:
    assert check(refined_plan, config, truth).holds


WRONG_SCORES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "not over the temperature": lambda scores, _base, inverse: scores / inverse,
    "of the slot before": lambda scores, _base, _inverse: scores.roll(1, dims=1),
    "of the pass before": lambda _scores, base, inverse: base * inverse,
}


@pytest.mark.parametrize("change", WRONG_SCORES)
def test_a_wrong_q_is_caught(refined: World, truth: Continuations, change: str) -> None:
    wrong = refined.backend.replacing("refiner-k1-sampled", lambda form: WrongScores(form, WRONG_SCORES[change]))
    assert not check(refined.plan(wrong), REFINED, truth).holds


@pytest.mark.parametrize(("graph", "fault"), [("penalise", OnlyTheAnchor), ("count", NeverCounts)])
def test_a_wrong_prefix_of_penalties_is_caught(
    refined: World, truth: Continuations, graph: str, fault: Callable[[nn.Module], nn.Module]
) -> None:
    assert not check(refined.plan(refined.backend.replacing(graph, fault)), PENALISED, truth).holds
