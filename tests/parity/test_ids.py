"""Token ids may differ at near ties only, and what a near tie changes is not compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from xpress_export.parity.ids import IdComparison, comparable_slots, compare_ids, margins

NAN, INFINITE = float("nan"), float("inf")
REFERENCE = np.array([[0, 5.0, 4.9, -1]], np.float32)


def logits(*values: float) -> NDArray[Any]:
    return np.array([values], np.float32)


@pytest.mark.parametrize(
    ("token", "found", "outcome"),
    [
        (1, logits(0, 5, 4.9, -1), "agreeing"),
        # Margin 0.1, error 0.06: either may be the best.
        (2, logits(0, 4.94, 4.96, -1), "near_ties"),
        # The logits agree better than that, so they are not why the token differs.
        (2, logits(0, 5, 4.91, -1), "different"),
        (2, logits(0, 5, 4.9, -1), "different"),
        (0, logits(0, 4.94, 4.96, -1), "different"),
        # Whether such an error is allowed is for the logits' tolerance to say.
        (3, logits(0, 5, 4.9, 5.5), "near_ties"),
        # What is no number explains nothing, and what is no token is none.
        (3, logits(0, 5, 4.9, NAN), "different"),
        (3, logits(0, 5, 4.9, INFINITE), "different"),
        (4, logits(0, 5, 4.9, -1), "different"),
        (-1, logits(0, 5, 4.9, -1), "different"),
    ],
)
def test_one_token(token: int, found: NDArray[Any], outcome: str) -> None:
    compared = compare_ids(np.array([token]), found, REFERENCE)
    counts = compared.to_json()
    assert counts["rows"] == 1
    assert {name: counts[name] for name in ("agreeing", "near_ties", "different")} == {
        name: int(name == outcome) for name in ("agreeing", "near_ties", "different")
    }


def test_tie_rates() -> None:
    reference = np.stack([logits(5, 4.9, 0), logits(5, 4, 0), logits(5, 4.99, 0)], 1)
    found = np.stack([logits(5, 5, 0), logits(5, 4, 0), logits(5, 4.99, 0)], 1)
    compared = compare_ids(np.array([[0, 0, 0]]), found, reference)
    assert compared == IdComparison(rows=3, agreeing=3, equal_best=1, close_best=1)


def test_only_what_is_comparable_is_compared() -> None:
    reference, found = np.tile(REFERENCE, (1, 3, 1)), np.tile(REFERENCE, (1, 3, 1))
    found[0, 2] = 100
    compared = compare_ids(np.array([[1, 1, 3]]), found, reference, np.array([[True, True, False]]))
    assert compared == IdComparison(rows=3, agreeing=2, not_comparable=1)
    assert (compared + compared).rows == 6


def test_other_shapes_are_different() -> None:
    assert compare_ids(np.array([[1]]), REFERENCE, REFERENCE).different == 1


def test_margins() -> None:
    np.testing.assert_allclose(margins(np.array([[3.0, 10, -4, 8.5], [2, 2, 1, 0]])), [1.5, 0])
    assert margins(np.array([[3.0]])).tolist() == [INFINITE]


def passes(*of_slots: list[float]) -> list[NDArray[Any]]:
    """Logits of two candidates with these margins, one list of slots for each pass."""
    return [np.array([[[margin, 0.0] for margin in slots]]) for slots in of_slots]


@pytest.mark.parametrize(
    ("before", "comparable"),
    [
        (passes([9, 9, 9]), [True, True, True]),
        # A near tie changes the slots behind it, and its own only through the slots before it.
        (passes([9, 1, 9, 9]), [True, True, False, False]),
        (passes([1, 9, 9]), [True, False, False]),
        (passes([9, 9, 1]), [True, True, True]),
        # A slot that was not sure in one pass is sure in the next where everything before it is.
        (passes([9, 1, 9], [9, 9, 9]), [True, True, True]),
        (passes([9, 1, 9, 9], [9, 9, 9, 9]), [True, True, True, False]),
        (passes([1, 9, 9, 9], [9, 9, 9, 9], [9, 9, 9, 9]), [True, True, True, False]),
        (passes([9, 9, 9], [1, 9, 9]), [True, False, False]),
        # Exactly twice the error is not enough.
        (passes([2, 9]), [True, False]),
    ],
)
def test_slots_behind_a_near_tie(before: list[NDArray[Any]], comparable: list[bool]) -> None:
    assert comparable_slots(before, [1.0] * len(before)).tolist() == [comparable]


def test_every_implementation_within_the_error_agrees_on_comparable_slots() -> None:
    """Jacobi passes whose logits are a function of the tokens to the left, run with random errors: sure slots never change."""
    generator = np.random.default_rng(0)
    table = generator.normal(size=(6, 5, 5))

    def run(num_passes: int, error: float) -> list[NDArray[Any]]:
        tokens, made = np.zeros(6, np.int64), []
        for _ in range(num_passes):
            left = np.concatenate([[0], np.cumsum(tokens)[:-1]]) % 5
            scores = table[np.arange(6), left] + generator.uniform(-error, error, (6, 5))
            made.append(scores[None])
            tokens = scores.argmax(-1)
        return made

    exact = run(4, 0.0)
    comparable = comparable_slots(exact[:3], [0.2] * 3)[0]
    assert 0 < comparable.sum() < 6
    for _ in range(200):
        last = run(4, 0.2)[-1]
        assert np.abs(last - exact[-1])[0, comparable].max() <= 0.2
