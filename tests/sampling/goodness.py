"""Whether counts are those of a distribution: chi-square and total variation, each with the bound that a right sampler passes.

Both bounds hold for a right sampler with a probability of more than 1 - 1e-5, and all seeds are fixed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Cells that are expected less often are counted together.
_LEAST_EXPECTED = 5.0
# A standard normal variable is larger once in 100,000 times.
_CRITICAL = 4.265
_RISK = 1e-5


@dataclass(frozen=True)
class Fit:
    """``num_impossible``: samples of probability 0. ``deviation``: of chi-square, in standard deviations (Wilson-Hilferty)."""

    num_impossible: int
    deviation: float
    total_variation: float
    variation_bound: float

    @property
    def holds(self) -> bool:
        return self.num_impossible == 0 and self.deviation < _CRITICAL and self.total_variation < self.variation_bound


def fit(counts: NDArray[Any], probabilities: NDArray[np.float64]) -> Fit:
    """Counts and probabilities of equal shape. Total variation is half the sum of |share - probability|.

    Its expectation is at most half the sum of the shares' standard deviations, and it exceeds its expectation by t with probability at most
    exp(-2 n t²) (McDiarmid: one of n samples moves it by 1 / n).
    """
    counts, probabilities = counts.ravel(), probabilities.ravel()
    assert counts.shape == probabilities.shape
    num_samples = int(counts.sum())
    possible = probabilities > 0
    expected = num_samples * probabilities[possible]
    share = counts / num_samples
    spread = np.sqrt(probabilities * (1 - probabilities) / num_samples)
    return Fit(
        num_impossible=int(counts[~possible].sum()),
        deviation=_deviation(counts[possible].astype(np.float64), expected),
        total_variation=float(np.abs(share - probabilities).sum() / 2),
        variation_bound=float(spread.sum() / 2 + np.sqrt(np.log(1 / _RISK) / (2 * num_samples))),
    )


def _deviation(counts: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    """Pearson's statistic over its degrees of freedom is nearly the cube of a normal variable."""
    order = np.argsort(expected)
    counts, expected = counts[order], expected[order]
    # Rare cells go into one, with as many more as it takes.
    num_rare = int((expected < _LEAST_EXPECTED).sum())
    while 0 < num_rare < len(expected) and expected[:num_rare].sum() < _LEAST_EXPECTED:
        num_rare += 1
    if num_rare > 1:
        counts = np.append(counts[num_rare:], counts[:num_rare].sum())
        expected = np.append(expected[num_rare:], expected[:num_rare].sum())
    degrees = len(counts) - 1
    assert degrees > 0, "one cell says nothing"
    statistic = float(((counts - expected) ** 2 / expected).sum())
    spread = 2 / (9 * degrees)
    return float(((statistic / degrees) ** (1 / 3) - (1 - spread)) / np.sqrt(spread))
