"""The width rule against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from xpress_runtime.speculation.renewal import WidthRule, best_rule, reach_of

PLAIN, DRAFT = 20e-3, 5e-3


def _rule(acceptance: NDArray[np.float64], widths: list[int], verify: list[float], draft: float = DRAFT) -> WidthRule:
    weights = np.full(len(acceptance), 1 / len(acceptance))
    return best_rule(reach_of(acceptance), weights, np.array(widths), np.array(verify), draft, 1 / PLAIN)


def _rate(acceptance: NDArray[np.float64], stops: NDArray[np.int64], widths: list[int], verify: list[float]) -> float:
    tokens = np.cumsum(reach_of(acceptance), axis=1)[np.arange(len(acceptance)), np.array(widths)[stops] - 1]
    return float(tokens.sum() / (DRAFT + np.array(verify)[stops]).sum())


def _linear(widths: list[int]) -> list[float]:
    return [PLAIN + 1.2e-3 * (width - 1) for width in widths]


@pytest.mark.parametrize("level", [0.1, 0.3, 0.5, 0.7, 0.9, 0.99])
@pytest.mark.parametrize("widths", [[1, 2, 3, 4, 5, 6, 7, 8], [1, 8], [1, 4, 8], [3, 5], [8]])
def test_for_equal_blocks_the_rule_reaches_the_best_width(level: float, widths: list[int]) -> None:
    acceptance = np.full((1, 7), level)
    rule = _rule(acceptance, widths, _linear(widths))
    rates = [_rate(acceptance, np.array([index]), widths, _linear(widths)) for index in range(len(widths))]
    if max(rates) > 1 / PLAIN:
        assert rule.drafted_rate == pytest.approx(max(rates))
        assert rule.rate == rule.drafted_rate
    else:
        assert rule.rate == 1 / PLAIN


def test_for_different_blocks_no_choice_of_widths_in_hindsight_of_prefixes_is_better() -> None:
    # Four blocks of two proposals that differ in the first: a choice per first confidence is all that a sequential rule can make.
    acceptance = np.array([[0.95, 0.6], [0.7, 0.6], [0.3, 0.6], [0.05, 0.6]])
    widths, verify = [1, 2, 3], [PLAIN, PLAIN + 4e-3, PLAIN + 8e-3]
    best = max(_rate(acceptance, np.array(stops), widths, verify) for stops in itertools.product(range(3), repeat=4))
    assert _rule(acceptance, widths, verify).drafted_rate == pytest.approx(best)


def test_with_two_shapes_each_block_is_judged_by_its_first_slot_and_what_usually_follows() -> None:
    rng = np.random.default_rng(0)
    acceptance = np.column_stack([rng.uniform(0.02, 0.98, 200), np.full((200, 6), 0.6)])
    widths, verify = [1, 8], _linear([1, 8])
    best = max(_rate(acceptance, (acceptance[:, 0] > least).astype(np.int64), widths, verify) for least in np.linspace(0, 1, 201))
    assert _rule(acceptance, widths, verify).drafted_rate == pytest.approx(best, rel=1e-3)


def test_a_dear_first_slot_is_bought_for_the_cheap_ones_behind_it() -> None:
    widths, verify = [1, 2, 3, 4, 5], [20e-3, 40e-3, 40.1e-3, 40.2e-3, 40.3e-3]
    acceptance = np.full((1, 4), 0.9)
    assert _rule(acceptance, widths, verify).stop(reach_of(acceptance)).tolist() == [4]
    # The same first slot with nothing behind it.
    assert _rule(acceptance[:, :1], widths[:2], verify[:2]).stop(reach_of(acceptance[:, :1])).tolist() == [0]


def test_slots_that_cost_nothing_are_always_verified() -> None:
    acceptance = np.full((1, 3), 1e-3)
    assert _rule(acceptance, [1, 2, 3, 4], [PLAIN] * 4).stop(reach_of(acceptance)).tolist() == [3]


def test_acceptance_so_small_that_sums_drown_it_stops_at_once() -> None:
    acceptance = np.full((1, 15), 1e-12)
    with np.errstate(all="raise", under="ignore"):
        assert _rule(acceptance, list(range(1, 17)), _linear(list(range(1, 17)))).stop(reach_of(acceptance)).tolist() == [0]
