"""Pooled ratios with bootstrap intervals, clustered on prompts.

Tokens of one prompt resemble each other, so whole prompts are drawn, with all that was measured on them in every mode: what two modes have
in common (an easy prompt, a busy minute) cancels in their ratio. Arrays are float64 [num_prompts]. Knows nothing about modes or tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

NUM_RESAMPLES = 4000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % interval; without bounds where there were too few prompts for one."""

    value: float
    low: float | None = None
    high: float | None = None

    def excludes(self, value: float) -> bool:
        """Whether the whole interval lies on one side of ``value``."""
        return self.low is not None and self.high is not None and not self.low <= value <= self.high


@dataclass(frozen=True)
class Spread:
    """A figure from prompt to prompt."""

    mean: float
    median: float
    low: float
    high: float


class Bootstrap:
    """Draws of ``num_prompts`` prompts with replacement, the same for every figure, so that differences are paired too."""

    def __init__(self, num_prompts: int, seed: int, num_resamples: int = NUM_RESAMPLES) -> None:
        generator = np.random.default_rng(seed)
        shares = np.full(num_prompts, 1 / max(num_prompts, 1))
        # [num_resamples, num_prompts]: how often each prompt was drawn.
        self._draws = generator.multinomial(num_prompts, shares, num_resamples).astype(np.float64) if num_prompts > 1 else None

    def estimate(self, statistic: Callable[[Floats], Any]) -> Estimate | None:
        """``statistic`` maps how often each prompt counts, [..., num_prompts], to figures [...], NaN where there is none.

        None where all prompts together have no figure. The interval is that of percentiles over the draws that have one.
        """
        num_prompts = 1 if self._draws is None else self._draws.shape[1]
        with np.errstate(divide="ignore", invalid="ignore"):
            value = float(statistic(np.ones(num_prompts)))
            if not np.isfinite(value):
                return None
            if self._draws is None:
                return Estimate(value)
            drawn = np.asarray(statistic(self._draws), np.float64)
        tail = 50 * (1 - CONFIDENCE)
        low, high = np.percentile(drawn[np.isfinite(drawn)], [tail, 100 - tail])
        return Estimate(value, float(low), float(high))

    def ratio(self, numerator: Floats, denominator: Floats) -> Estimate | None:
        """Pooled: the sum of one over the sum of the other."""
        return self.estimate(lambda weights: (weights @ numerator) / (weights @ denominator))

    def ratio_of_ratios(self, first: tuple[Floats, Floats], second: tuple[Floats, Floats]) -> Estimate | None:
        """One pooled ratio over another."""
        return self.estimate(lambda weights: (weights @ first[0] / (weights @ first[1])) / (weights @ second[0] / (weights @ second[1])))

    def difference_of_ratios(self, first: tuple[Floats, Floats], second: tuple[Floats, Floats]) -> Estimate | None:
        """One pooled ratio minus another."""
        return self.estimate(lambda weights: weights @ first[0] / (weights @ first[1]) - weights @ second[0] / (weights @ second[1]))

    def geometric_mean(self, values: Floats) -> Estimate | None:
        """Of the values over 0 that are finite; a prompt without one has no weight."""
        usable = np.isfinite(values) & (values > 0)
        logs = np.where(usable, np.log(np.where(usable, values, 1.0)), 0.0)
        return self.estimate(lambda weights: np.exp((weights @ logs) / (weights @ usable.astype(np.float64))))


def spread(values: Floats) -> Spread | None:
    """Of the finite values; None where there are none."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return None
    return Spread(float(finite.mean()), float(np.median(finite)), float(finite.min()), float(finite.max()))
