"""A Gaussian belief about a vector that wanders: what is not observed grows uncertain again, up to where it started.

Knows nothing of what the vector means: acceptance and stage costs are both kept this way.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


class DriftingBelief:
    """``mean`` [n] and ``covariance`` [n, n]; ``stationary`` [n, n] is the covariance of knowing nothing recent."""

    def __init__(self, mean: Vector, stationary: Vector, *, share: float = 1.0) -> None:
        """``share``: how much of the stationary covariance there is at the start."""
        self.mean = mean.copy()
        self.covariance = share * stationary
        self._stationary = stationary

    def relax(self, share: float) -> None:
        """Move the covariance towards the stationary one by ``share``, 0 to 1; the mean stays until data moves it."""
        self.covariance += share * (self._stationary - self.covariance)

    def observe(self, features: Vector, score: float, information: float) -> None:
        """One Newton step to the posterior of an observation of ``features · x``.

        ``score`` and ``information`` are the first derivative of its log likelihood and the negated second one: (y - p) and p(1 - p) for a
        Bernoulli outcome behind a logistic link, error / variance and 1 / variance for a measurement.
        """
        spread = self.covariance @ features
        scale = 1.0 / (1.0 + information * float(features @ spread))
        self.mean += (score * scale) * spread
        self.covariance -= (information * scale) * np.outer(spread, spread)
