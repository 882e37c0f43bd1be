"""What the stages of a round cost, in seconds: calibrated once, then followed as contexts grow and machines get busy.

Verification of w slots is the calibrated curve plus a level, a slope and a residual of each width, which are learned (belief.py). A single
outlier moves nothing far; a lasting shift is followed, because the allowed step doubles while measurements stay on one side of it. Knows
nothing of acceptance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from xpress_runtime.speculation.belief import DriftingBelief, Vector

# A clock too coarse to see a stage reads 0; rates need a time above it.
MIN_SECONDS = 1e-6
# Of a measurement: relative to a plain step, to its expectation where outliers are told apart.
_NOISE = 0.05
_MAX_DEVIATIONS = 3.0
# How far costs wander in a session, relative to a plain step: all widths together, the widest against the narrowest, each by itself.
_LEVEL, _SLOPE, _RESIDUAL = 0.15, 0.1, 0.02
_RELAX = 0.01
# A calibration is a median of several runs: it leaves this share of the variance.
_CALIBRATED = 0.05
_AVERAGE = 0.1


class _StepLimit:
    """Clips errors to a limit that doubles with every further clipped one on the same side."""

    def __init__(self) -> None:
        self._streak = 0

    def clip(self, error: float, limit: float) -> float:
        side = int(math.copysign(1, error))
        allowed = limit * 2.0 ** min(max(self._streak * side, 0), 60)
        if abs(error) <= allowed:
            self._streak = 0
            return error
        self._streak = self._streak + side if self._streak * side > 0 else side
        return side * allowed


class Average:
    """Exponential moving average of clipped seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = max(seconds, MIN_SECONDS)
        self._limit = _StepLimit()

    def observe(self, seconds: float) -> None:
        error = self._limit.clip(seconds - self.seconds, _MAX_DEVIATIONS * _NOISE * self.seconds)
        self.seconds = max(self.seconds + _AVERAGE * error, MIN_SECONDS)


class StageCosts:
    """Seconds of drafting, of verifying 1 … ``block_size`` slots, and of the host in any step. Make it with :meth:`calibrated`."""

    def __init__(self, draft: float, resume: float, verify: Vector, host: float) -> None:
        self.block_size = len(verify)
        self.host = host
        self._draft, self._resume = Average(draft), Average(resume)
        self._calibrated_plain = float(verify[0])
        slope = np.linspace(0.0, _SLOPE, self.block_size)
        wander = _LEVEL**2 + np.outer(slope, slope) + _RESIDUAL**2 * np.eye(self.block_size)
        self._verify = DriftingBelief(verify, self._calibrated_plain**2 * wander, share=_CALIBRATED)
        self._verify_limit = _StepLimit()

    @classmethod
    def calibrated(
        cls, draft: float, verify: Mapping[int, float], *, block_size: int, resume: float | None = None, host: float = 0.0
    ) -> StageCosts:
        """From medians of a few runs, in seconds.

        ``draft``: draft and refine, and whatever else a drafted round has over a plain step. ``resume``: the same right after plain steps,
        with the backlog that the drafter has to be fed (None: no more). ``verify``: by number of slots, 1 to ``block_size``; between two
        measured ones the curve is interpolated, beyond them flat. ``host``: what every step adds. A time that is not a number counts as
        not measured, 0 as too short for the clock. Raises ValueError where no verify time is left.
        """
        measured = {width: seconds for width, seconds in sorted(verify.items()) if is_time(seconds)}
        if not measured or not 1 <= min(measured) <= max(measured) <= block_size:
            raise ValueError(f"verify times are {dict(verify)}, expected finite ones of 1 to {block_size} slots")
        curve = np.interp(np.arange(1, block_size + 1), list(measured), [max(seconds, MIN_SECONDS) for seconds in measured.values()])
        draft = draft if is_time(draft) else 0.0
        resume = resume if resume is not None and is_time(resume) else draft
        return cls(draft, resume, np.maximum.accumulate(curve), host if is_time(host) else 0.0)

    def draft(self, *, resumed: bool) -> float:
        """Seconds to draft and refine; ``resumed``: right after a plain step."""
        return self._resume.seconds if resumed else self._draft.seconds

    def verify(self) -> Vector:
        """Seconds to verify 1 … block_size slots [block_size]: positive, never falling."""
        curve: Vector = np.maximum.accumulate(np.maximum(self._verify.mean, MIN_SECONDS))
        return curve

    def observe_draft(self, seconds: float, *, resumed: bool) -> None:
        if is_time(seconds):
            (self._resume if resumed else self._draft).observe(seconds)

    def observe_verify(self, width: int, seconds: float) -> None:
        """A verification of ``width`` slots, or with 1 a plain step, took that long."""
        if not is_time(seconds):
            return
        expected = max(float(self._verify.mean[width - 1]), MIN_SECONDS)
        error = self._verify_limit.clip(seconds - expected, _MAX_DEVIATIONS * _NOISE * expected)
        features = np.zeros(self.block_size)
        features[width - 1] = 1.0
        information = (_NOISE * self._calibrated_plain) ** -2
        self._verify.relax(_RELAX)
        self._verify.observe(features, error * information, information)


def is_time(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds >= 0
