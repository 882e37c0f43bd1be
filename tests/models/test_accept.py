"""Acceptance against a loop over tokens, and the state that it leaves for the next round."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from xpress_export.models.accept import Accept, AcceptedBlock

BLOCK_SIZE = 5
MASK = 99
LAST_START = 50

ACCEPT = Accept(BLOCK_SIZE, MASK, LAST_START)


@dataclass
class Row:
    """One sequence before a round."""

    verify_ids: list[int]
    target_tokens: list[int]
    position: int = 20
    predecessor: int = 7
    active: int = 1


def accept(rows: list[Row]) -> AcceptedBlock:
    def column(name: str) -> Tensor:
        return torch.tensor([getattr(row, name) for row in rows])

    block: AcceptedBlock = ACCEPT(*(column(name) for name in ("verify_ids", "target_tokens", "position", "predecessor", "active")))
    return block


def assert_round(block: AcceptedBlock, index: int, row: Row) -> None:
    """The method's verification and commit, token by token."""
    accepted, emitted = 0, []
    anchor, predecessor, position, active = row.verify_ids[0], row.predecessor, row.position, row.active
    if active:
        while accepted + 1 < len(row.verify_ids) and row.verify_ids[accepted + 1] == row.target_tokens[accepted]:
            accepted += 1
            emitted.append(row.verify_ids[accepted])
        predecessor = emitted[-1] if emitted else anchor
        anchor = row.target_tokens[accepted]
        emitted.append(anchor)
        position += len(emitted)
        active = int(position <= LAST_START)
    assert int(block.accepted[index]) == accepted
    assert int(block.num_emitted[index]) == len(emitted)
    assert block.tokens[index].tolist()[: len(emitted)] == emitted
    assert int(block.anchor[index]) == anchor
    assert block.block_ids[index].tolist() == [anchor] + [MASK] * (BLOCK_SIZE - 1)
    assert int(block.predecessor[index]) == predecessor
    assert int(block.position[index]) == position
    assert int(block.context_position[index]) == row.position
    assert int(block.active[index]) == active


def partly_accepted(accepted: int, **state: int) -> Row:
    """A full block of which ``accepted`` drafts are right, and of the rest only the first is wrong."""
    target = [11, 12, 13, 14, 15]
    verify = [10, *target[:-1]]
    if accepted < BLOCK_SIZE - 1:
        verify[accepted + 1] = 98
    return Row(verify, target, **state)


@pytest.mark.parametrize("accepted", range(BLOCK_SIZE))
def test_every_accepted_count(accepted: int) -> None:
    """Right drafts behind the first wrong one do not count."""
    row = partly_accepted(accepted)
    block = accept([row])
    assert block.accepted.tolist() == [accepted]
    assert block.position.tolist() == [20 + accepted + 1]
    assert_round(block, 0, row)


def test_rows_are_independent() -> None:
    rows = [partly_accepted(accepted, position=10 * accepted + 1, predecessor=accepted) for accepted in (3, 0, BLOCK_SIZE - 1, 1)]
    block = accept(rows)
    for index, row in enumerate(rows):
        assert_round(block, index, row)
    alone = [accept([row]) for row in rows]
    for name in AcceptedBlock._fields:
        assert torch.equal(getattr(block, name), torch.cat([getattr(one, name) for one in alone]))


def test_inactive_row_is_frozen() -> None:
    row = partly_accepted(3, position=33, predecessor=5, active=0)
    block = accept([partly_accepted(2), row])
    assert_round(block, 1, row)
    assert (int(block.position[1]), int(block.anchor[1]), int(block.predecessor[1])) == (33, 10, 5)
    assert (int(block.accepted[1]), int(block.num_emitted[1]), int(block.active[1])) == (0, 0, 0)
    # Another round on the state that it left changes nothing any more, whatever is verified then.
    verify = [int(block.anchor[1]), 1, 2, 3, 4]
    again = accept([Row(verify, [1, 2, 3, 4, 5], int(block.position[1]), int(block.predecessor[1]), int(block.active[1]))])
    for name in ("accepted", "num_emitted", "block_ids", "anchor", "predecessor", "position", "context_position", "active"):
        assert torch.equal(getattr(again, name)[0], getattr(block, name)[1]), name


@pytest.mark.parametrize("accepted", range(BLOCK_SIZE))
@pytest.mark.parametrize("position", [LAST_START - BLOCK_SIZE, LAST_START - 1, LAST_START])
def test_freezes_at_the_end_of_the_caches(position: int, accepted: int) -> None:
    """The tokens of the round that reaches the end still count; no further round starts behind ``last_start``."""
    row = partly_accepted(accepted, position=position)
    block = accept([row])
    assert block.num_emitted.tolist() == [accepted + 1]
    assert block.active.tolist() == [int(position + accepted + 1 <= LAST_START)]
    assert_round(block, 0, row)


def test_plain_decoding() -> None:
    rows = [Row([4], [8], 0, 7), Row([5], [5], LAST_START, 7), Row([6], [9], 3, 7, 0)]
    block = accept(rows)
    assert block.tokens.shape == (3, 1)
    assert block.num_emitted.tolist() == [1, 1, 0]
    assert block.anchor.tolist() == [8, 5, 6]
    assert block.predecessor.tolist() == [4, 5, 7]
    assert block.active.tolist() == [1, 0, 0]
    for index, row in enumerate(rows):
        assert_round(block, index, row)


@st.composite
def batches(draw: st.DrawFn) -> list[Row]:
    """Few different tokens, so that long prefixes are accepted; positions around the end."""
    width = draw(st.integers(1, BLOCK_SIZE))
    tokens = st.lists(st.integers(0, 1), min_size=width, max_size=width)
    rows = st.builds(Row, tokens, tokens, st.integers(LAST_START - 8, LAST_START + 2), st.integers(0, 3), st.integers(0, 1))
    return draw(st.lists(rows, min_size=1, max_size=4))


@settings(max_examples=200, deadline=None)
@given(batches())
def test_equals_a_loop(rows: list[Row]) -> None:
    block = accept(rows)
    for index, row in enumerate(rows):
        assert_round(block, index, row)
