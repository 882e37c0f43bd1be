"""Numbers of a comparison: errors between an array and its reference, and the tolerances that they are held against."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xpress_runtime.sets import Precision

# fp32: two libraries add in different orders; a thirty-layer decoder stays below 1e-5, and a wrong mask, position or scale is off by far
# more than 1e-4.
_FP32_TOLERANCE = 1e-4
# Half precision: what one rounding may err by, 2^-11 with the 11 bits of fp16 and 2^-8 with the 8 of bf16, …
_ROUNDING = {Precision.FP16: 2.0**-11, Precision.BF16: 2.0**-8}
# … times the roundings that may add up. An embedding is rounded once. Measured at most: 3 in graphs of one layer, in those of many (up to
# thirty) 10 in fp16, and 33 in bf16, whose errors are large enough to grow from layer to layer.
_ROUNDINGS_OF_ONE_LAYER = 8
_ROUNDINGS_OF_MANY = {Precision.FP16: 20, Precision.BF16: 40}


def tolerance(precision: Precision, graph: str = "target") -> float:
    """Largest error of a graph's outputs, relative to the largest magnitude of the reference (at least 1)."""
    if precision is Precision.FP32:
        return _FP32_TOLERANCE
    if graph in ("target", "drafter"):
        return _ROUNDING[precision] * _ROUNDINGS_OF_MANY[precision]
    return _ROUNDING[precision] * (1 if graph == "embed" else _ROUNDINGS_OF_ONE_LAYER)


@dataclass(frozen=True)
class ArrayComparison:
    """``max_abs_error``; the same relative to the reference's largest magnitude; whether shapes, integers and finiteness agree."""

    max_abs_error: float
    scaled_error: float
    exact: bool

    def within(self, tolerance: float) -> bool:
        return self.exact or self.scaled_error <= tolerance

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


# The largest float, as JSON has no infinity.
UNEQUAL = ArrayComparison(sys.float_info.max, sys.float_info.max, exact=False)


def compare_arrays(found: NDArray[Any], reference: NDArray[Any]) -> ArrayComparison:
    """Compare an output with its reference; integers must be equal, and a shape or a non-finite value is the largest error."""
    if found.shape != reference.shape:
        return UNEQUAL
    if found.size == 0 or np.array_equal(found, reference):
        return ArrayComparison(0.0, 0.0, True)
    if not np.issubdtype(reference.dtype, np.floating) or not (np.isfinite(found).all() and np.isfinite(reference).all()):
        return UNEQUAL
    error = float(np.abs(found.astype(np.float64) - reference).max())
    return ArrayComparison(error, error / max(1.0, float(np.abs(reference).max())), False)


@dataclass(frozen=True)
class ArgmaxComparison:
    """Rows, and those whose argmax agrees. Two arrays within the tolerance can differ in a near tie only."""

    rows: int
    agreeing: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compare_argmax(found: NDArray[Any], reference: NDArray[Any]) -> ArgmaxComparison:
    """Compare the argmax over the last axis."""
    agreeing = found.argmax(-1) == reference.argmax(-1)
    return ArgmaxComparison(agreeing.size, int(agreeing.sum()))


def top_margin(logits: NDArray[Any]) -> float:
    """Difference between the two best of a row [V]."""
    best = np.partition(logits, -2)[-2:]
    return float(best[1] - best[0])


def first_difference(found: Sequence[int], expected: Sequence[int]) -> int | None:
    """Index of the first differing token; where one sequence is a prefix of the other, the end of the shorter."""
    for index, (left, right) in enumerate(zip(found, expected, strict=False)):
        if left != right:
            return index
    return None if len(found) == len(expected) else min(len(found), len(expected))
