"""Pooled ratios, their bootstrap, and what it says when there is little to draw from."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from xpress_export.bench.intervals import Bootstrap, Estimate, spread


def test_a_pooled_ratio_is_the_sum_over_the_sum_not_the_mean_of_ratios() -> None:
    made = Bootstrap(2, seed=0).ratio(np.array([10.0, 1.0]), np.array([2.0, 1.0]))
    assert made is not None
    assert made.value == pytest.approx(11 / 3)


def test_two_ratios_and_their_quotient_and_difference() -> None:
    bootstrap = Bootstrap(2, seed=0)
    first, second = (np.array([30.0, 10.0]), np.array([10.0, 10.0])), (np.array([8.0, 8.0]), np.array([4.0, 12.0]))
    quotient, difference = bootstrap.ratio_of_ratios(first, second), bootstrap.difference_of_ratios(first, second)
    assert quotient is not None
    assert difference is not None
    assert quotient.value == pytest.approx(2.0 / 1.0)
    assert difference.value == pytest.approx(2.0 - 1.0)


def test_interval_equals_that_of_every_possible_draw() -> None:
    values = np.array([1.0, 2.0, 4.0])
    every = sorted(np.mean(drawn) for drawn in itertools.product(values, repeat=3))
    # 27 draws, equally likely: only the lowest has 1/27 > 2.5 % below it, and only the highest above.
    made = Bootstrap(3, seed=1).ratio(values, np.ones(3))
    assert made is not None
    assert (made.low, made.high) == (every[0], every[-1])
    assert made.value == pytest.approx(7 / 3)


def test_interval_of_a_mean_agrees_with_its_standard_error() -> None:
    values = np.random.default_rng(3).normal(10, 2, 400)
    made = Bootstrap(400, seed=0).ratio(values, np.ones(400))
    assert made is not None
    assert made.low is not None
    assert made.high is not None
    error = values.std() / 20
    # Percentiles of 4000 draws are off by a few hundredths of a standard error.
    assert made.low == pytest.approx(values.mean() - 1.96 * error, abs=0.15 * error)
    assert made.high == pytest.approx(values.mean() + 1.96 * error, abs=0.15 * error)


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    random = np.random.default_rng(11)
    hits = 0
    for seed in range(200):
        times, tokens = random.gamma(4, 5, 30), random.integers(20, 60, 30).astype(np.float64)
        made = Bootstrap(30, seed, num_resamples=400).ratio(times * tokens, tokens)
        assert made is not None
        hits += not made.excludes(20.0)
    assert 0.88 <= hits / 200 <= 0.99


def test_what_modes_have_in_common_cancels() -> None:
    """One mode takes exactly 0.8 of the other's time on every prompt, however hard the prompt is."""
    hard = np.random.default_rng(5).gamma(1, 100, 12)
    ones = np.ones(12)
    made = Bootstrap(12, seed=0).ratio_of_ratios((hard, ones), (0.8 * hard, ones))
    assert made is not None
    assert made.low == pytest.approx(1.25)
    assert made.high == pytest.approx(1.25)
    # Drawing prompts for each mode on its own would not see it.
    alone = Bootstrap(12, seed=0).ratio(hard, ones)
    assert alone is not None
    assert alone.low is not None
    assert alone.low < 0.8 * alone.value


def test_same_seed_same_interval() -> None:
    values = np.arange(1.0, 9.0)
    first, again, other = (Bootstrap(8, seed).ratio(values, values[::-1].copy()) for seed in (4, 4, 5))
    assert first == again
    assert first != other


def test_one_prompt_has_no_interval() -> None:
    made = Bootstrap(1, seed=0).ratio(np.array([3.0]), np.array([2.0]))
    assert made == Estimate(1.5)
    assert not made.excludes(0)


def test_nothing_to_divide_by_is_no_figure() -> None:
    assert Bootstrap(3, seed=0).ratio(np.zeros(3), np.zeros(3)) is None
    assert Bootstrap(0, seed=0).geometric_mean(np.full(1, np.nan)) is None


def test_draws_without_a_figure_do_not_count() -> None:
    made = Bootstrap(3, seed=0).ratio(np.array([4.0, 0.0, 0.0]), np.array([2.0, 0.0, 0.0]))
    assert made == Estimate(2.0, 2.0, 2.0)


def test_geometric_mean_passes_over_prompts_without_a_ratio() -> None:
    made = Bootstrap(3, seed=0).geometric_mean(np.array([2.0, np.nan, 8.0]))
    assert made is not None
    assert made.value == pytest.approx(4.0)


def test_excludes() -> None:
    assert Estimate(1.2, 1.1, 1.3).excludes(1)
    assert not Estimate(1.2, 0.9, 1.3).excludes(1)
    assert Estimate(0.5, 0.4, 0.6).excludes(1)


def test_spread_is_of_the_finite_values() -> None:
    made = spread(np.array([1.0, np.nan, 2.0, 6.0]))
    assert made is not None
    assert (made.mean, made.median, made.low, made.high) == (3.0, 2.0, 1.0, 6.0)
    assert spread(np.array([np.nan])) is None
