"""How many slots are verified may follow from history and from what slots were drawn from, never from what was drawn.

Here on the modules, with many samples; :mod:`tests.sampling.test_auto` runs the loop that decides.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.sampling.chain import Chain, WidthRule
from tests.sampling.goodness import fit

NUM_SAMPLES = 200_000


def sure_of_every_slot_so_far(*least: float) -> WidthRule:
    """On to the next slot while the largest probabilities of all slots up to it have at least this product: as "auto" does."""

    def rule(confidence: Tensor, ids: Tensor) -> Tensor:  # noqa: ARG001
        return 1 + (confidence.cumprod(dim=1) > torch.tensor(least)).long().cumprod(dim=1).sum(dim=1)

    return rule


def sure_of_the_next_slot(confidence: Tensor, ids: Tensor) -> Tensor:  # noqa: ARG001
    """Whether slot 1 is verified follows from slot 2, whose distribution follows from the token in slot 1."""
    return torch.where(confidence[:, 1] > 0.4, 2, 1)


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
    counts, _ = chain.sampled(rule, NUM_SAMPLES // 10)
    assert not fit(counts, chain.probabilities()).holds
