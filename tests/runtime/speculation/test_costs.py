"""Stage costs: what calibration gives, and what later measurements change."""

from __future__ import annotations

import numpy as np
import pytest

from xpress_runtime.speculation import StageCosts
from xpress_runtime.speculation.costs import MIN_SECONDS


def _costs(**changes: float) -> StageCosts:
    return StageCosts.calibrated(5e-3, {1: 20e-3, 8: 28.4e-3}, block_size=8, **changes)


def test_unmeasured_widths_lie_between_measured_ones() -> None:
    assert _costs().verify() == pytest.approx(20e-3 + 1.2e-3 * np.arange(8))


def test_widths_beyond_the_measured_ones_cost_as_much_as_the_last() -> None:
    assert StageCosts.calibrated(0.0, {2: 3e-3, 3: 4e-3}, block_size=5).verify() == pytest.approx([3e-3, 3e-3, 4e-3, 4e-3, 4e-3])


def test_a_wider_verification_never_counts_as_cheaper() -> None:
    assert StageCosts.calibrated(0.0, {1: 3e-3, 2: 2e-3}, block_size=2).verify() == pytest.approx([3e-3, 3e-3])


def test_drafting_after_plain_steps_has_its_own_cost() -> None:
    costs = _costs(resume=7e-3)
    assert (costs.draft(resumed=False), costs.draft(resumed=True)) == (5e-3, 7e-3)
    assert _costs().draft(resumed=True) == 5e-3


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -1.0])
def test_a_time_that_is_none_changes_nothing(broken: float) -> None:
    costs = StageCosts.calibrated(broken, {1: 20e-3, 4: broken, 8: 28.4e-3}, block_size=8, resume=broken, host=broken)
    before = costs.verify()
    costs.observe_verify(8, broken)
    costs.observe_draft(broken, resumed=False)
    assert before == pytest.approx(_costs().verify())
    assert (costs.verify() == before).all()
    assert costs.draft(resumed=False) == MIN_SECONDS
    assert costs.host == 0.0


@pytest.mark.parametrize("verify", [{}, {1: float("nan")}, {0: 1e-3}, {9: 1e-3}])
def test_costs_without_a_usable_verify_time_are_refused(verify: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="expected finite ones of 1 to 8 slots"):
        StageCosts.calibrated(5e-3, verify, block_size=8)


def test_noise_and_outliers_move_costs_by_a_few_percent_only() -> None:
    costs, rng = _costs(), np.random.default_rng(0)
    for _ in range(500):
        width = int(rng.integers(1, 9))
        costs.observe_verify(width, (20e-3 + 1.2e-3 * (width - 1)) * rng.normal(1, 0.05) * (10 if rng.random() < 0.02 else 1))
        costs.observe_draft(5e-3 * rng.normal(1, 0.05) * (10 if rng.random() < 0.02 else 1), resumed=False)
    assert costs.verify() == pytest.approx(_costs().verify(), rel=0.05)
    assert costs.draft(resumed=False) == pytest.approx(5e-3, rel=0.05)


def test_one_outlier_moves_costs_by_less_than_a_tenth() -> None:
    costs = _costs()
    costs.observe_verify(4, 1.0)
    costs.observe_draft(1.0, resumed=False)
    assert costs.verify() == pytest.approx(_costs().verify(), rel=0.1)
    assert costs.draft(resumed=False) == pytest.approx(5e-3, rel=0.1)


def test_measurements_at_one_width_move_the_others_along() -> None:
    costs = _costs()
    for _ in range(200):
        costs.observe_verify(8, 28.4e-3 + 10e-3)
    assert costs.verify()[7] == pytest.approx(38.4e-3, rel=0.02)
    assert 25e-3 < costs.verify()[0] < 31e-3


def test_a_slope_that_was_calibrated_wrongly_is_learned() -> None:
    costs = _costs()
    for _ in range(200):
        costs.observe_verify(1, 20e-3)
        costs.observe_verify(8, 22e-3)
    assert costs.verify()[[0, 7]] == pytest.approx([20e-3, 22e-3], rel=0.02)


def test_costs_are_learned_where_the_clock_showed_nothing_at_calibration() -> None:
    costs = StageCosts.calibrated(0.0, {1: 0.0, 8: 0.0}, block_size=8)
    for _ in range(60):
        costs.observe_verify(1, 20e-3)
        costs.observe_draft(5e-3, resumed=False)
    assert costs.verify()[0] == pytest.approx(20e-3, rel=0.1)
    assert costs.draft(resumed=False) == pytest.approx(5e-3, rel=0.1)


@pytest.mark.parametrize("factor", [0.3, 3.0, 100.0])
def test_a_lasting_shift_is_followed_within_fifty_measurements(factor: float) -> None:
    costs = _costs()
    for _ in range(50):
        costs.observe_verify(4, 23.6e-3 * factor)
        costs.observe_draft(5e-3 * factor, resumed=False)
    assert costs.verify()[3] == pytest.approx(23.6e-3 * factor, rel=0.1)
    assert costs.draft(resumed=False) == pytest.approx(5e-3 * factor, rel=0.1)
