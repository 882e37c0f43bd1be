"""What counts as equal, as an error and as a tie."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch

from xpress_export.models.precision import DTYPES
from xpress_export.parity.compare import ArgmaxComparison, compare_argmax, compare_arrays, tolerance, top_margin
from xpress_export.parity.target import compare_target
from xpress_runtime.sets import Precision

LARGEST = sys.float_info.max
INFINITE = float("inf")
NAN = float("nan")


def floats(*values: float) -> Any:
    return np.array(values, np.float32)


def test_equal_arrays_are_exact() -> None:
    result = compare_arrays(floats(1, -2), floats(1, -2))
    assert (result.max_abs_error, result.scaled_error, result.exact) == (0, 0, True)
    assert result.within(0)


def test_empty_arrays_are_exact() -> None:
    assert compare_arrays(np.zeros((2, 0)), np.zeros((2, 0))).exact


def test_error_is_scaled_by_the_largest_reference() -> None:
    result = compare_arrays(floats(100, 200.5), floats(100, -200))
    assert result.max_abs_error == pytest.approx(400.5)
    assert result.scaled_error == pytest.approx(400.5 / 200)
    assert not result.exact


def test_small_references_do_not_enlarge_the_error() -> None:
    assert compare_arrays(floats(1e-3), floats(2e-3)).scaled_error == pytest.approx(1e-3)


def test_tolerance_is_the_largest_error_allowed() -> None:
    result = compare_arrays(floats(1.5), floats(1))
    assert result.within(0.5)
    assert not result.within(0.49)


@pytest.mark.parametrize("shape", [(3,), (1, 2), (2, 1), ()])
def test_another_shape_is_the_largest_error(shape: tuple[int, ...]) -> None:
    """Also where numpy would broadcast."""
    result = compare_arrays(np.ones(shape, np.float32), floats(1, 1))
    assert result.scaled_error == LARGEST
    assert not result.within(1e9)


@pytest.mark.parametrize(
    ("found", "reference"),
    [
        (floats(NAN, 1), floats(2, 1)),
        (floats(2, 1), floats(NAN, 1)),
        (floats(NAN, 1), floats(NAN, 1)),
        (floats(INFINITE, 1), floats(2, 1)),
        (floats(2, 1), floats(-INFINITE, 1)),
        (floats(INFINITE, 1), floats(-INFINITE, 1)),
    ],
)
def test_what_is_not_finite_is_the_largest_error(found: Any, reference: Any) -> None:
    result = compare_arrays(found, reference)
    # Infinite and not nan: a nan would lose against any smaller error when the worst of many calls is sought.
    assert (result.max_abs_error, result.scaled_error) == (LARGEST, LARGEST)
    assert not result.within(1e9)


def test_integers_are_equal_or_not() -> None:
    assert compare_arrays(np.array([1, 2]), np.array([1, 2])).exact
    assert compare_arrays(np.array([1, 2]), np.array([1, 3])).scaled_error == LARGEST


def test_top_margin() -> None:
    assert top_margin(floats(3, 10, -4, 8.5)) == pytest.approx(1.5)
    assert top_margin(floats(2, 2, 1)) == 0


REFERENCE = floats(0, 5.0, 4.9, -1)


@pytest.mark.parametrize(
    ("found", "agreeing"),
    [(floats(0, 9, -3, 7), 1), (floats(0, 4.94, 4.96, -1), 0), (floats(NAN, 5.0, 4.9, -1), 0)],
)
def test_argmax(found: Any, agreeing: int) -> None:
    assert compare_argmax(found[None], REFERENCE[None]) == ArgmaxComparison(1, agreeing)


def test_argmax_counts_rows_of_every_axis() -> None:
    reference = np.tile(REFERENCE, (2, 3, 1))
    found = reference.copy()
    found[1, 2] = floats(0, 4.94, 4.96, -1)
    found[0, 0] = floats(NAN, 5, 4.9, 0)
    assert compare_argmax(found, reference) == ArgmaxComparison(rows=6, agreeing=4)


def test_target_with_a_tie_passes() -> None:
    reference = np.stack([REFERENCE, floats(3, 2.99999, 0, 0)])
    found = np.stack([REFERENCE, floats(2.99999, 3, 0, 0)])
    result = compare_target(found, reference)
    assert result.argmax == ArgmaxComparison(2, 1)
    assert result.passed(1e-4)


@pytest.mark.parametrize("value", [4.95, 5.5, 1e6, INFINITE, NAN])
def test_target_with_another_argmax_fails(value: float) -> None:
    """A large error explains any argmax, and is therefore an error of its own."""
    found = REFERENCE.copy()
    found[3] = value
    assert not compare_target(found[None], REFERENCE[None]).passed(1e-4)


def test_tolerances_are_whole_roundings() -> None:
    """Half precision: as many roundings as may add up, of the bits that the precision has."""
    assert tolerance(Precision.FP32) == 1e-4
    for precision, bits in ((Precision.FP16, 11), (Precision.BF16, 8)):
        rounding = 2.0**-bits
        assert torch.finfo(DTYPES[precision]).eps / 2 == rounding
        assert tolerance(precision, "embed") == rounding
        assert tolerance(precision, "refiner-k2") == tolerance(precision, "head") == 8 * rounding
        assert 20 * rounding <= tolerance(precision, "drafter") == tolerance(precision, "target") < 0.2
