"""Prompt lookup against a search through Python lists, round after round."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from xpress_export.models.lookup import MAX_MATCH, FoundBlock, Lookup

BLOCK_SIZE, NUM_POSITIONS = 4, 40
NUM_PROPOSALS = BLOCK_SIZE - 1
GARBAGE = 3

LOOKUP = Lookup()


def search(text: list[int]) -> tuple[int, list[int]]:
    """Length of the match for a text that ends with the anchor, and what follows it there; the text goes on with what was proposed."""
    last = len(text) - 1
    longest, match = 0, -1
    for place in range(last):
        length = 0
        while length < MAX_MATCH and place >= length and text[place - length] == text[last - length]:
            length += 1
        if length >= longest:
            longest, match = length, place
    grown = list(text)
    for _ in range(NUM_PROPOSALS if longest else 0):
        grown.append(grown[match + 1 + len(grown) - len(text)])
    return longest, grown[len(text) :]


def look_up(history: Tensor, rounds: list[list[int]], positions: list[tuple[int, int]]) -> FoundBlock:
    context, position = (torch.tensor(column) for column in zip(*positions, strict=True))
    block: FoundBlock = LOOKUP(history, torch.tensor(rounds), context, position)
    return block


def history_of(*texts: list[int]) -> Tensor:
    """Texts, and behind them tokens that would match."""
    return torch.tensor([text + [text[-1]] * (NUM_POSITIONS - len(text)) for text in texts])


def first_round(*texts: list[int]) -> FoundBlock:
    return look_up(history_of(*texts), [[GARBAGE] * BLOCK_SIZE] * len(texts), [(len(text) - 1,) * 2 for text in texts])


def assert_found(block: FoundBlock, row: int, text: list[int]) -> None:
    longest, proposals = search(text)
    assert block.confidence[row].tolist() == [longest / (MAX_MATCH + 1)] * NUM_PROPOSALS
    assert int(block.verify_ids[row, 0]) == text[-1]
    if longest:
        assert block.verify_ids[row, 1:].tolist() == proposals
    assert torch.equal(block.candidates[row, :, 0], block.verify_ids[row, 1:])
    assert block.history[row, : len(text)].tolist() == text


@pytest.mark.parametrize(
    ("text", "length", "proposals"),
    [
        ([7, 1, 2, 3, 9, 8, 6, 1, 2, 3], 3, [9, 8, 6]),
        # The longer match counts, not the later one; among equals the later one.
        ([1, 2, 3, 9, 8, 6, 4, 3, 5, 1, 2, 3], 3, [9, 8, 6]),
        ([2, 3, 9, 8, 6, 2, 3, 4, 5, 6, 2, 3], 3, [4, 5, 6]),
        ([1, 9, 8, 1, 5, 6, 1], 1, [5, 6, 1]),
        # Where the match's text ends with the anchor it repeats.
        ([8, 1, 2, 1, 2], 2, [1, 2, 1]),
        ([4, 4], 1, [4, 4, 4]),
        ([5, 6, 7, 5, 6], 2, [7, 5, 6]),
        # A match ends where the text begins, whatever is compared with.
        ([5, 6, 0, 5], 1, [6, 0, 5]),
        ([1, 1], 1, [1, 1, 1]),
        ([1, 1, 1], 2, [1, 1, 1]),
    ],
)
def test_examples(text: list[int], length: int, proposals: list[int]) -> None:
    block = first_round(text)
    assert block.verify_ids.tolist() == [[text[-1], *proposals]]
    assert block.confidence.tolist() == [[length / 4] * NUM_PROPOSALS]
    assert_found(block, 0, text)


@pytest.mark.parametrize("text", [[7], [7, 8], [1, 2, 3, 4]])
def test_without_a_match_confidence_is_none(text: list[int]) -> None:
    block = first_round(text)
    assert block.confidence.tolist() == [[0.0] * NUM_PROPOSALS]
    assert int(block.verify_ids[0, 0]) == text[-1]


def test_proposals_are_certain() -> None:
    """One candidate a slot: q is one-hot, whatever the temperature."""
    block = first_round([1, 2, 1], [4, 4, 4])
    assert block.draft_scores.dtype == torch.float32
    assert torch.equal(block.draft_scores.softmax(dim=-1), torch.ones(2, NUM_PROPOSALS, 1))


def test_a_text_as_long_as_the_history() -> None:
    text = ([1, 2, 3, 4, 5] * NUM_POSITIONS)[:NUM_POSITIONS]
    assert_found(first_round(text), 0, text)


def test_nothing_new_leaves_the_history() -> None:
    """The first round, and every round of a frozen row: its tokens are garbage."""
    history = history_of([1, 2, 1], [5])
    assert torch.equal(first_round([1, 2, 1], [5]).history, history)


def test_an_update_twice_is_an_update_once() -> None:
    """So that history may be updated where it lies."""
    rounds, positions = [[9, 8, GARBAGE, GARBAGE]], [(2, 4)]
    once = look_up(history_of([1, 2, 1]), rounds, positions)
    twice = look_up(once.history, rounds, positions)
    for first, second in zip(once, twice, strict=True):
        assert torch.equal(first, second)


tokens = st.integers(0, 2)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(tokens, min_size=1, max_size=12),
            st.lists(st.lists(tokens, max_size=BLOCK_SIZE), min_size=1, max_size=5),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_rounds_equal_a_search(rows: list[tuple[list[int], list[list[int]]]]) -> None:
    """Few tokens, so that texts repeat; rows emit different numbers of tokens each round, some none."""
    texts = [list(prompt) for prompt, _ in rows]
    history = history_of(*texts)
    for number in range(max(len(emitted) for _, emitted in rows)):
        before = [len(text) - 1 for text in texts]
        emitted = [rounds[number] if number < len(rounds) else [] for _, rounds in rows]
        for text, new in zip(texts, emitted, strict=True):
            text.extend(new)
        padded = [new + [GARBAGE] * (BLOCK_SIZE - len(new)) for new in emitted]
        block = look_up(history, padded, [(start, len(text) - 1) for start, text in zip(before, texts, strict=True)])
        for row, text in enumerate(texts):
            assert_found(block, row, text)
        history = block.history
