"""Whether rounds that many rows share should draft: a block costs more with every row, and pays only while its tokens come cheaper.

A drafted round of n rows pays where τ, the mean acceptance length, is larger than its time over that of a plain round of n rows. Both
times and τ are followed as they are measured; a drafted round is tried from time to time, so that a better text or an emptier machine is
noticed. Knows nothing of what is drafted.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from xpress_runtime.speculation.costs import Average

# Weight of what a row got in a new round.
_LENGTH_WEIGHT = 0.05
# A drafted round that does not pay is tried when it costs at most this share of the time spent since the last one.
_TRY_SHARE = 0.03
# What a drafter is trusted with before anything is known of it.
_FIRST_LENGTH = 2.0


class SharedPolicy:
    """Of rounds of up to ``num_rows`` rows. ``plain`` and ``drafted``: seconds of a round, by its number of rows; at least one of each."""

    def __init__(self, num_rows: int, plain: Mapping[int, float], drafted: Mapping[int, float]) -> None:
        self._plain = _curve(num_rows, plain)
        self._drafted = _curve(num_rows, drafted)
        self._length = _FIRST_LENGTH
        self._seconds_since = 0.0

    def drafts(self, num_rows: int) -> bool:
        """Whether the next round, of ``num_rows`` rows, should draft."""
        loss = self._drafted[num_rows - 1].seconds - self._length * self._plain[num_rows - 1].seconds
        return loss <= 0 or loss <= _TRY_SHARE * self._seconds_since

    def record_plain(self, num_rows: int, seconds: float) -> None:
        """A plain round took that long."""
        self._plain[num_rows - 1].observe(seconds)
        self._seconds_since += seconds

    def record_drafted(self, num_rows: int, seconds: float, lengths: list[int]) -> None:
        """A drafted round took that long; ``lengths``: the tokens that each of its rows got."""
        self._drafted[num_rows - 1].observe(seconds)
        self._seconds_since = 0.0
        for length in lengths:
            self._length += _LENGTH_WEIGHT * (length - self._length)

    def explain(self) -> str:
        """One line for logs."""
        return (
            f"mean acceptance length {self._length:.2f}; ms of a round with 1 to {len(self._plain)} rows: "
            f"{1e3 * self._plain[0].seconds:.1f} to {1e3 * self._plain[-1].seconds:.1f} plain, "
            f"{1e3 * self._drafted[0].seconds:.1f} to {1e3 * self._drafted[-1].seconds:.1f} drafted"
        )


def _curve(num_rows: int, measured: Mapping[int, float]) -> list[Average]:
    counts = sorted(measured)
    seconds = np.interp(np.arange(1, num_rows + 1), counts, [measured[count] for count in counts])
    return [Average(float(value)) for value in seconds]
