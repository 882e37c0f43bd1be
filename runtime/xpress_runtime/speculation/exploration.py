"""What may be spent on rounds that the estimates advise against, so that they are found wrong where they are.

A *try* drafts where plain decoding looks better; an *extension* verifies one allowed width more than pays. Both are paid for in seconds:
tries from a share of the time of plain steps and of what drafting has gained, extensions from a share of the time of drafted rounds. So
tries cost at most ``TRY_SHARE`` of plain decoding and ``GAIN_SHARE`` of the gain, plus one try, whatever the drafter does. Knows nothing
of where its figures come from.
"""

from __future__ import annotations

# Of the time of plain steps; of the seconds that drafted rounds saved; of the time of drafted rounds.
TRY_SHARE, GAIN_SHARE, EXTENSION_SHARE = 0.015, 0.1, 0.004
# Most that is saved up, in tries and extensions: what a long good time pays for shall end.
_MAX_TRIES, _MAX_EXTENSIONS = 20.0, 2.0
# Plain steps between tries: doubled by each that failed. Less where little is at stake.
_FIRST_PAUSE, _LAST_PAUSE = 2.0, 16.0


class TryBudget:
    """Seconds that tries may lose against plain decoding. ``price``: the most that one is expected to lose, over 0."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._pause = _FIRST_PAUSE
        self._num_plain = 0

    def covers(self, expected_loss: float) -> bool:
        return self._seconds >= expected_loss

    def allows(self, expected_loss: float, price: float) -> bool:
        """Whether to try now, ``expected_loss`` in seconds."""
        return self.covers(expected_loss) and self._num_plain >= self._pause * min(expected_loss / price, 1.0)

    def pay(self, seconds: float) -> None:
        """Before a try; :meth:`settle` returns it. Negative: a payment comes back, its round was not run."""
        self._seconds -= seconds

    def plain_step(self, seconds: float, price: float) -> None:
        self._num_plain += 1
        self._add(TRY_SHARE * seconds, price)

    def settle(self, paid: float, gain: float, price: float) -> None:
        """A try is over that had ``paid``; ``gain`` in seconds, against plain decoding."""
        self._num_plain = 0
        self._pause = _FIRST_PAUSE if gain > 0 else min(2 * self._pause, _LAST_PAUSE)
        self._add(paid + gain, price)

    def drafted(self, gain: float, price: float) -> None:
        """A round that was no try gained so much against plain decoding."""
        self._num_plain = 0
        self._pause = _FIRST_PAUSE
        self._add(GAIN_SHARE * gain, price)

    def _add(self, seconds: float, price: float) -> None:
        self._seconds = min(self._seconds + seconds, _MAX_TRIES * price)


class ExtensionBudget:
    """Seconds that extensions may cost. ``price``: the most that one takes."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def covers(self, price: float) -> bool:
        return self._seconds >= price

    def pay(self, seconds: float) -> None:
        self._seconds -= seconds

    def drafted(self, seconds: float, earned: float, price: float) -> None:
        """A round took ``seconds``; ``earned``: what the tokens are worth that it owes to an extension."""
        self._seconds = min(self._seconds + EXTENSION_SHARE * seconds + earned, _MAX_EXTENSIONS * price)
