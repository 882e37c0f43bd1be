"""The width rule: at which slot a drafted round stops, and what rate that reaches. Pure mathematics; knows no estimates and no history.

Tokens per second as renewal reward. A round of w slots (anchor and w - 1 proposals) takes draft + v(w) seconds and earns 1 + accepted
tokens. λ, the tokens that a second is worth, is the largest rate in reach: plain decoding's, or the fixed point λ = E[tokens] / E[seconds]
of the rule for λ over a sample of blocks (Dinkelbach's iteration, which rises to it in a few steps).

Let w be an allowed width that is reached, and S the product of the acceptances of slots 1 … w. Going on to the allowed width u > w earns
S · F(w, u) tokens: slot w itself, hence F ≥ 1, and what follows in the sample where slot w is accepted. It costs λ (v(u) - v(w)). So the
round goes on to the next allowed width while

    S > θ(w) = min over u of λ (v(u) - v(w)) / F(w, u)

θ does not look at the block, and S only at slots 1 … w: whether slot w is verified depends on no later slot. Where every width is allowed
and v is linear, this is "verify a slot while its expected token is worth its time", which is optimal, because S only falls.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xpress_runtime.speculation.belief import Vector

_MAX_ITERATIONS = 5
_TINY = 1e-12


@dataclass(frozen=True)
class WidthRule:
    """``widths`` [W] rising, ``thresholds`` [W - 1]; ``rate``: λ; ``drafted_rate`` and ``drafted_seconds``: of rounds under the rule."""

    widths: NDArray[np.int64]
    thresholds: Vector
    rate: float
    drafted_rate: float
    drafted_seconds: float

    def stop(self, reach: Vector) -> NDArray[np.int64]:
        """Index [n] of the width at which blocks of ``reach`` [n, block_size] stop."""
        return _stop(reach, self.widths, self.thresholds)


def reach_of(acceptance: Vector) -> Vector:
    """[n, block_size]: the probability that slots 1 … k are all accepted, k from 0, of ``acceptance`` [n, block_size - 1]."""
    return np.concatenate([np.ones((len(acceptance), 1)), np.cumprod(acceptance, axis=1)], axis=1)


def best_rule(
    reach: Vector, weights: Vector, widths: NDArray[np.int64], verify: Vector, draft_seconds: float, plain_rate: float
) -> WidthRule:
    """The rule for a sample of blocks: ``reach`` [n, block_size] with ``weights`` [n] that sum to 1.

    ``widths`` [W], rising, take ``verify`` [W] seconds, everything else in a round ``draft_seconds``; ``plain_rate``: tokens per second.
    """
    tokens = np.cumsum(reach, axis=1)[:, widths - 1]
    mean_reach, mean_tokens = weights @ reach, weights @ tokens
    # 1 / F, which is at most 1: as a difference of two sums F drowns where acceptance is tiny.
    gains = np.maximum(mean_tokens[None, :] - mean_tokens[:-1, None], _TINY)
    inverse = np.minimum(mean_reach[widths[:-1], None] / gains, 1.0)
    wider = np.arange(len(widths))[None, :] > np.arange(len(widths) - 1)[:, None]
    per_rate = np.where(wider, (verify[None, :] - verify[:-1, None]) * inverse, np.inf).min(axis=1)

    rate, rows = plain_rate, np.arange(len(reach))
    for _ in range(_MAX_ITERATIONS):
        thresholds = rate * per_rate
        stops = _stop(reach, widths, thresholds)
        seconds = draft_seconds + float(weights @ verify[stops])
        drafted_rate = float(weights @ tokens[rows, stops]) / seconds
        if drafted_rate <= rate * (1 + _TINY):
            break
        rate = drafted_rate
    return WidthRule(widths, thresholds, rate, drafted_rate, seconds)


def _stop(reach: Vector, widths: NDArray[np.int64], thresholds: Vector) -> NDArray[np.int64]:
    goes_on = reach[:, widths[:-1]] > thresholds
    stops: NDArray[np.int64] = np.logical_and.accumulate(goes_on, axis=1).sum(axis=1)
    return stops
