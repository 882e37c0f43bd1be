"""The acceptance model on outcomes whose probabilities are known."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from xpress_runtime.speculation.acceptance import AcceptanceModel

Array = NDArray[np.float64]


def _teach(model: AcceptanceModel, acceptance: Array, confidences: Array | None, rng: np.random.Generator, width: int = 8) -> None:
    """Rounds of ``acceptance`` [n, 7], ``confidences`` [n, 7]."""
    for index, row in enumerate(acceptance):
        accepted = int(np.logical_and.accumulate(rng.random(7)[: width - 1] < row[: width - 1]).sum())
        confidence = None if confidences is None else confidences[index].tolist()
        model.observe(model.evidence(confidence), width, accepted, seen=confidence is not None)


def _blind(model: AcceptanceModel) -> Array:
    return model.predict(model.evidence(None))


def test_without_confidences_acceptance_is_learned_by_slot() -> None:
    true = np.array([0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4])
    model = AcceptanceModel(7)
    _teach(model, np.tile(true, (400, 1)), None, np.random.default_rng(0))
    assert _blind(model) == pytest.approx(true, abs=0.12)


def test_at_first_a_confidence_is_taken_at_face_value() -> None:
    confidence = [0.1, 0.3, 0.5, 0.6, 0.8, 0.9, 0.95]
    model = AcceptanceModel(7)
    assert model.predict(model.evidence(confidence)) == pytest.approx(confidence, abs=1e-6)


@pytest.mark.parametrize("informative", [True, False])
def test_what_a_confidence_is_worth_is_learned(informative: bool) -> None:
    rng = np.random.default_rng(1)
    confidences = rng.uniform(0.05, 0.95, (400, 7))
    model = AcceptanceModel(7)
    _teach(model, confidences if informative else np.full((400, 7), 0.7), confidences, rng)
    low, high = (model.predict(model.evidence([value] * 7))[0] for value in (0.2, 0.9))
    if informative:
        assert low < 0.35
        assert high > 0.75
    else:
        assert high - low < 0.25


def test_far_slots_that_are_not_verified_follow_what_near_ones_show() -> None:
    model = AcceptanceModel(7)
    before = _blind(model)
    _teach(model, np.full((60, 7), 0.98), None, np.random.default_rng(2), width=3)
    assert _blind(model)[6] > before[6] + 0.1


def test_slots_behind_a_rejection_are_no_outcomes() -> None:
    model, other = AcceptanceModel(7), AcceptanceModel(7)
    model.observe(model.evidence(None), 2, 0, seen=False)
    other.observe(other.evidence(None), 8, 0, seen=False)
    assert (_blind(model) == _blind(other)).all()


@pytest.mark.parametrize(("before", "after"), [(0.97, 0.02), (0.02, 0.97)])
def test_a_change_of_regime_is_learned_in_a_dozen_rounds(before: float, after: float) -> None:
    model, rng = AcceptanceModel(7), np.random.default_rng(3)
    _teach(model, np.full((300, 7), before), None, rng)
    assert _blind(model)[0] == pytest.approx(before, abs=0.1)
    _teach(model, np.full((12, 7), after), None, rng)
    assert _blind(model)[0] == pytest.approx(after, abs=0.2)


def test_a_new_request_starts_from_what_earlier_ones_were_like() -> None:
    model, rng = AcceptanceModel(7), np.random.default_rng(4)
    model.new_request()
    assert _blind(model) == pytest.approx(_blind(AcceptanceModel(7)))
    _teach(model, np.full((50, 7), 0.02), None, rng)
    model.new_request()
    assert _blind(model)[0] < 0.2
    _teach(model, np.full((50, 7), 0.95), None, rng)
    model.new_request()
    assert 0.2 < _blind(model)[0] < 0.9


@pytest.mark.parametrize("confidence", [[0.0] * 7, [1.0] * 7, [float("nan")] * 7, [-1.0, 2.0] + [float("inf")] * 5])
def test_any_confidence_gives_a_probability_and_can_be_learned_from(confidence: list[float]) -> None:
    model = AcceptanceModel(7)
    with np.errstate(all="raise"):
        for accepted in (0, 7) * 200:
            model.observe(model.evidence(confidence), 8, accepted, seen=True)
        predicted = model.predict(model.evidence(confidence))
    assert ((predicted > 0) & (predicted < 1)).all()


def test_confidences_of_recent_rounds_are_remembered_and_fade() -> None:
    model = AcceptanceModel(2)
    assert model.recent()[1].tolist() == [1.0]
    for confidence in (0.2, 0.9):
        model.observe(model.evidence([confidence] * 2), 1, 0, seen=True)
    evidence, weights = model.recent()
    assert evidence.tolist() == [model.evidence([0.9] * 2).tolist(), model.evidence([0.2] * 2).tolist()]
    assert weights[0] > weights[1]
    assert weights.sum() == pytest.approx(1.0)
