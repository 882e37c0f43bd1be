"""Numbers of a comparison: errors between an array and its reference, and the tolerances that they are held against."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xpress_export.parity.fp32_parts import is_fp32
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
_MANY_LAYERS = ("target", "drafter", "draft-decoder")
# Graphs that round what they are given and compute no more with it.
_ROUND_ONCE = ("embed", "draft-embed", "denoise", "store-taps")
# Below it a logit is that of a token that was removed, or that a drafter does not know: not a size to measure errors by.
_REMOVED = -1e20


def tolerance(precision: Precision, graph: str = "target") -> float:
    """Largest error of a graph's outputs, relative to the largest magnitude of the reference (at least 1)."""
    if precision is Precision.FP32 or is_fp32(graph):
        return _FP32_TOLERANCE
    if graph in _MANY_LAYERS:
        return _ROUNDING[precision] * _ROUNDINGS_OF_MANY[precision]
    return _ROUNDING[precision] * (1 if graph in _ROUND_ONCE else _ROUNDINGS_OF_ONE_LAYER)


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
    """Compare an output with its reference. Integers must be equal, and so must be which tokens have removed logits; another shape and a
    value that is not finite are the largest error.
    """
    if found.shape != reference.shape:
        return UNEQUAL
    if found.size == 0 or np.array_equal(found, reference):
        return ArrayComparison(0.0, 0.0, True)
    if not np.issubdtype(reference.dtype, np.floating) or not (np.isfinite(found).all() and np.isfinite(reference).all()):
        return UNEQUAL
    is_kept = ~removed(reference)
    if not np.array_equal(removed(found), ~is_kept):
        return UNEQUAL
    found, reference = found[is_kept], reference[is_kept]
    if not reference.size:
        return ArrayComparison(0.0, 0.0, True)
    error = float(np.abs(found.astype(np.float64) - reference).max())
    return ArrayComparison(error, error / max(1.0, float(np.abs(reference).max())), False)


def removed(logits: NDArray[Any]) -> NDArray[np.bool_]:
    """Which logits are those of tokens that cannot be chosen."""
    are_removed: NDArray[np.bool_] = np.less(logits, np.float32(_REMOVED))
    return are_removed


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
