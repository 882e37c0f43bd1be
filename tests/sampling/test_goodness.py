"""The check itself: how seldom it rejects what is right, and how small a fault it sees."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sampling.goodness import fit

NUM_SAMPLES = 200_000


def probabilities() -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """[8, 8], from frequent pairs to some that are expected less than once."""
    weights = np.exp(np.random.default_rng(0).normal(scale=3.0, size=(8, 8)))
    return weights / weights.sum()


def test_deviations_of_right_counts_are_standard_normal() -> None:
    rng, exact = np.random.default_rng(1), probabilities()
    assert (exact * NUM_SAMPLES < 5).sum() > 3
    results = [fit(rng.multinomial(NUM_SAMPLES, exact.ravel()), exact) for _ in range(2000)]
    deviations = np.array([result.deviation for result in results])
    assert all(result.holds for result in results)
    assert abs(deviations.mean()) < 0.1 and abs(deviations.std() - 1) < 0.1
    assert abs((deviations > 2).mean() - 0.023) < 0.012


@pytest.mark.parametrize("by", [0.05, -0.05])
def test_a_row_that_is_five_percent_off_is_seen(by: float) -> None:
    exact = np.full((8, 8), 1 / 64)
    wrong = exact.copy()
    wrong[2] *= 1 + by
    wrong[3] *= 1 - by
    assert not fit(np.random.default_rng(2).multinomial(NUM_SAMPLES, wrong.ravel()), exact).holds


def test_a_shift_between_all_cells_is_seen() -> None:
    exact = probabilities()
    wrong = 0.98 * exact + 0.02 / exact.size
    assert not fit(np.random.default_rng(3).multinomial(NUM_SAMPLES, wrong.ravel()), exact).holds


def test_one_impossible_sample_is_seen() -> None:
    exact = np.array([0.5, 0.5, 0.0])
    assert fit(np.array([501, 499, 0]), exact).holds
    assert not fit(np.array([501, 498, 1]), exact).holds


def test_rare_cells_count_together() -> None:
    """Each is expected twice; that they came ten times as often shows in their sum."""
    exact = np.array([0.49, 0.49, *[0.002] * 10])
    assert fit(np.array([490, 490, *[2] * 10]), exact).holds
    assert not fit(np.array([400, 400, *[20] * 10]), exact).holds
