"""A denoising step, and whole blocks of them, against a loop over slots."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from xpress_export.models.denoise import Denoise

BLOCK_SIZE, HIDDEN_SIZE, VOCAB_SIZE = 6, 3, 7
NUM_PROPOSALS = BLOCK_SIZE - 1
MASK = 99

DENOISE = Denoise()


class Reference:
    """One row: slots by number, 0 the anchor. What an open slot holds is None."""

    def __init__(self, anchor: int) -> None:
        self.ids = [anchor] + [MASK] * NUM_PROPOSALS
        self.hidden: list[Tensor | None] = [None] * BLOCK_SIZE
        self.logits: list[Tensor | None] = [None] * BLOCK_SIZE

    def step(self, hidden: Tensor, logits: Tensor, num_filled: int) -> None:
        if self.hidden[0] is None:
            self.hidden[0] = hidden[0]
        open_slots = [slot for slot in range(1, BLOCK_SIZE) if self.logits[slot] is None]
        surest = sorted(open_slots, key=lambda slot: (-float(logits[slot - 1].softmax(-1).max()), slot))
        for slot in surest[: max(0, num_filled - (NUM_PROPOSALS - len(open_slots)))]:
            self.hidden[slot], self.logits[slot], self.ids[slot] = hidden[slot], logits[slot - 1], int(logits[slot - 1].argmax())


class Run:
    """The module's state of a batch, begun with garbage."""

    def __init__(self, anchors: list[int]) -> None:
        batch = len(anchors)
        self.hidden = torch.full((batch, BLOCK_SIZE, HIDDEN_SIZE), math.nan)
        self.logits = torch.full((batch, NUM_PROPOSALS, VOCAB_SIZE), math.nan)
        self.filled = torch.zeros(batch, NUM_PROPOSALS, dtype=torch.int64)
        self.ids = torch.tensor([[anchor] + [MASK] * NUM_PROPOSALS for anchor in anchors])

    def step(self, hidden: Tensor, logits: Tensor, num_filled: list[int]) -> None:
        self.hidden, self.logits, self.filled, self.ids = DENOISE(
            hidden, logits, self.hidden, self.logits, self.filled, self.ids, torch.tensor(num_filled)
        )

    def assert_equals(self, references: list[Reference]) -> None:
        for row, reference in enumerate(references):
            assert self.ids[row].tolist() == reference.ids
            assert self.filled[row].tolist() == [int(logits is not None) for logits in reference.logits[1:]]
            for slot in range(BLOCK_SIZE):
                if (hidden := reference.hidden[slot]) is not None:
                    assert torch.equal(self.hidden[row, slot], hidden)
                if (logits := reference.logits[slot]) is not None:
                    assert torch.equal(self.logits[row, slot - 1], logits)


def random_step(batch: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(batch, BLOCK_SIZE, HIDDEN_SIZE, generator=generator)
    return hidden, torch.randn(batch, NUM_PROPOSALS, VOCAB_SIZE, generator=generator) * 3


@pytest.mark.parametrize("num_steps", range(1, NUM_PROPOSALS + 3))
def test_blocks_equal_a_loop(num_steps: int) -> None:
    """With more steps than slots too: the later ones fill nothing and change nothing."""
    anchors = [5, 6, 7]
    run, references = Run(anchors), [Reference(anchor) for anchor in anchors]
    for number in range(1, num_steps + 1):
        hidden, logits = random_step(len(anchors), seed=100 * num_steps + number)
        num_filled = math.ceil(NUM_PROPOSALS * number / num_steps)
        run.step(hidden, logits, [num_filled] * len(anchors))
        for row, reference in enumerate(references):
            reference.step(hidden[row], logits[row], num_filled)
        run.assert_equals(references)
        assert (run.filled.sum(dim=1) == num_filled).all()
    assert (run.ids != MASK).all()
    # Every slot shows the token of the logits that it keeps.
    assert torch.equal(run.ids[:, 1:], run.logits.argmax(dim=-1))


def test_one_step_is_the_bare_drafter() -> None:
    hidden, logits = random_step(2, seed=1)
    run = Run([3, 4])
    run.step(hidden, logits, [NUM_PROPOSALS] * 2)
    assert torch.equal(run.hidden, hidden)
    assert torch.equal(run.logits, logits)
    assert torch.equal(run.ids[:, 1:], logits.argmax(dim=-1))


def test_anchor_keeps_the_hidden_state_of_the_first_step() -> None:
    run = Run([3])
    first, second = random_step(1, seed=2), random_step(1, seed=3)
    run.step(*first, [1])
    run.step(*second, [2])
    assert torch.equal(run.hidden[:, 0], first[0][:, 0])
    assert not torch.equal(first[0][:, 0], second[0][:, 0])


def test_equally_confident_slots_are_filled_in_order() -> None:
    logits = torch.zeros(1, NUM_PROPOSALS, VOCAB_SIZE)
    run = Run([3])
    for num_filled in range(1, NUM_PROPOSALS + 1):
        run.step(torch.zeros(1, BLOCK_SIZE, HIDDEN_SIZE), logits, [num_filled])
        assert run.filled.tolist() == [[1] * num_filled + [0] * (NUM_PROPOSALS - num_filled)]


def test_confidence_is_a_probability_and_no_logit() -> None:
    """Slot 1 has the larger logit, slot 2 the larger probability."""
    logits = torch.zeros(1, NUM_PROPOSALS, VOCAB_SIZE)
    logits[0, 0] = 10.0
    logits[0, 1, 4] = 5.0
    run = Run([3])
    run.step(torch.zeros(1, BLOCK_SIZE, HIDDEN_SIZE), logits, [1])
    assert run.filled.tolist() == [[0, 1, 0, 0, 0]]


# Few kinds of logits, so that slots are equally confident.
KINDS = torch.tensor([[0.0] * VOCAB_SIZE, [2.0] + [0.0] * (VOCAB_SIZE - 1), [0.0] * (VOCAB_SIZE - 1) + [2.0], [5.0, 0, 0, 0, 0, 0, 4.0]])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, len(KINDS) - 1), min_size=2 * NUM_PROPOSALS, max_size=2 * NUM_PROPOSALS),
            st.tuples(st.integers(1, NUM_PROPOSALS), st.integers(1, NUM_PROPOSALS)),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_any_schedule_equals_a_loop(steps: list[tuple[list[int], tuple[int, int]]]) -> None:
    """Rows of one batch at different numbers of slots; a number below what is filled fills nothing."""
    run, references = Run([1, 2]), [Reference(1), Reference(2)]
    for number, (kinds, num_filled) in enumerate(steps):
        logits = KINDS[torch.tensor(kinds)].reshape(2, NUM_PROPOSALS, VOCAB_SIZE)
        hidden = torch.full((2, BLOCK_SIZE, HIDDEN_SIZE), float(number))
        run.step(hidden, logits, list(num_filled))
        for row, reference in enumerate(references):
            reference.step(hidden[row], logits[row], num_filled[row])
        run.assert_equals(references)
