"""Speculation ``auto``: whether a round drafts, and how many slots it verifies. Pure decisions; knows no backend, token or clock.

Tokens per second as renewal reward. λ is the largest rate that any rule reaches under the present estimates; a second is worth λ tokens. A
plain step earns 1 token in v(1) + h seconds, a drafted round of width w (anchor and w - 1 proposals) E[1 + accepted] in d + v(w) + h.
Tokens of a text are to be made as fast as possible *now*, so λ is the present rate, not a long-run average: the largest of plain
decoding's and the fixed point λ = E[tokens] / E[seconds] of the rule below, evaluated on recent rounds (Dinkelbach's iteration).

Width. Let w be an allowed width that is reached and S the product of the estimated acceptances of slots 1 … w. Going on to the allowed
width u > w earns S · F(w, u) tokens: slot w itself (F starts at 1) and what usually follows once it is accepted, from history. It costs
λ (v(u) - v(w)). So the round goes on to the next allowed width while

    S > θ(w) = min over u of λ (v(u) - v(w)) / F(w, u)

θ is made of history alone, and S of the confidences of slots 1 … w, so whether slot w is verified depends on nothing behind slot w and on no
drawn token: the output distribution is untouched (method.md). Where every width is allowed and v is linear, this is "verify slot k while
its expected token is worth its time", which is optimal: S only falls.

Trying. What is not done is not learned, so an account is credited a fixed share of all time spent (``EXPLORATION``), and pays for what the
estimates advise against: a drafted round when plain decoding looks better, or one width more than pays. A try that earns tokens pays
itself back, so good news is followed up at once; a useless drafter is retried no more often than the share allows. That interval follows
from the costs: it is the bound on what ``auto`` loses, and takes the place of a back-off.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from xpress_runtime.speculation.acceptance import AcceptanceModel
from xpress_runtime.speculation.belief import Vector
from xpress_runtime.speculation.costs import StageCosts, is_time

EXPLORATION = 0.015
# The account never holds more than this many tries, so that a long good time does not pay for a long bad one.
_MAX_TRIES = 3.0
# Feeding the drafter what was decoded plainly must be earned back within so many rounds.
_RESUME_ROUNDS = 8
_ITERATIONS = 4
MINLOSS=0.03
DELTA=0.03
EXT=.004


@dataclass
class PolicyCounts:
    """Choices so far. ``tries``: drafted though plain decoding looked better; ``extensions``: one width more than paid."""

    plain: int = 0
    tries: int = 0
    extensions: int = 0
    switches: int = 0
    widths: Counter[int] = field(default_factory=Counter)

    @property
    def drafted(self) -> int:
        return self.widths.total()


@dataclass
class _Choice:
    """A round that was begun and is not recorded yet; ``paid`` is what the account gave for it."""

    resumed: bool
    is_try: bool
    explores: bool
    paid: float = 0.0
    paying_width: int | None = None


class SpeculationPolicy:
    """Decides for one sequence. Lives for a session, as costs do; call :meth:`new_request` where another text begins.

    Rounds may be begun before earlier ones are recorded; they are recorded in the order in which they were begun.
    """

    def __init__(self, block_size: int, widths: Sequence[int], sees_block: bool, costs: StageCosts) -> None:
        """``widths``: numbers of slots that a drafted round may verify, 1 to ``block_size``. ``sees_block``: :meth:`width` gets confidences.

        Raises ValueError where no width is allowed, or one that the costs do not cover.
        """
        self._widths = np.array(sorted(set(widths)), np.int64)
        if not widths or self._widths[0] < 1 or self._widths[-1] > block_size or block_size != costs.block_size:
            raise ValueError(f"widths are {list(widths)} with costs of {costs.block_size} slots, expected 1 to {block_size}")
        self._costs = costs
        self._sees_block = sees_block
        self._acceptance = AcceptanceModel(block_size - 1)
        self._can_draft = bool(self._widths[-1] > 1)
        self._pending: deque[_Choice] = deque()
        self._last_plain = False
        self._account = 0.0
        self._evaluate(resumed=False)
        self.counts = PolicyCounts()

    def new_request(self) -> None:
        """Another text begins; rounds that were begun and never recorded are forgotten."""
        self._account += sum(choice.paid for choice in self._pending)
        self._pending.clear()
        self._acceptance.new_request()

    def begin(self) -> bool:
        """Start a round: True to draft, then ask for the width; False for a plain step. Depends on history alone."""
        resumed = self._last_plain
        self._evaluate(resumed=resumed)
        pays = self._can_draft and self._drafted_rate > self._plain_rate * (1 - DELTA)
        is_try = self._can_draft and not pays and self._account >= self._loss
        if not (pays or is_try):
            self.counts.plain += 1
        if self.counts.plain + self.counts.drafted > 1 and resumed == (pays or is_try):
            self.counts.switches += 1
        self._last_plain = not (pays or is_try)
        if self._last_plain:
            return False
        choice = _Choice(resumed, is_try, is_try or self._account >= self._extension_price)
        if is_try:
            choice.paid = self._price
            self._account -= choice.paid
            self.counts.tries += 1
        self._pending.append(choice)
        return True

    def width(self, confidence: Sequence[float] | None) -> int:
        """How many slots the round that was just begun verifies: an allowed width.

        ``confidence`` [block_size - 1]: largest probability of each slot's refined distribution, None where it is not seen.
        """
        choice = self._pending[-1]
        evidence = self._acceptance.evidence(confidence if self._sees_block else None)
        index = int(self._stops(self._reach(evidence[None]))[0])
        choice.paying_width = int(self._widths[index])
        if choice.explores and index < len(self._widths) - 1:
            index += 1
            if not choice.is_try:
                choice.paid = float(self._verify[index] - self._verify[index - 1])
                self._account -= choice.paid
                self.counts.extensions += 1
        width = int(self._widths[index])
        self.counts.widths[width] += 1
        return width

    def record_plain(self, seconds: float) -> None:
        """A plain step took ``seconds``, the host's constant share left out."""
        self._costs.observe_verify(1, seconds)
        self._credit(EXPLORATION * seconds)

    def record_round(
        self, width: int, accepted: int, confidence: Sequence[float] | None, draft_seconds: float, verify_seconds: float
    ) -> None:
        """The oldest round not yet recorded verified ``width`` slots and accepted ``accepted`` proposals."""
        choice = self._pending.popleft() if self._pending else _Choice(resumed=False, is_try=False, explores=False)
        self._costs.observe_draft(draft_seconds, resumed=choice.resumed)
        self._costs.observe_verify(width, verify_seconds)
        seen = self._sees_block and confidence is not None
        self._acceptance.observe(self._acceptance.evidence(confidence if seen else None), width, accepted, seen=seen)
        seconds = draft_seconds + verify_seconds
        self._credit(EXT * seconds)
        if choice.is_try:
            gain = (1 + accepted) / self._plain_rate - seconds - self._costs.host
            self._credit(choice.paid + gain)
        elif choice.paid and choice.paying_width is not None:
            self._credit(max(accepted - (choice.paying_width - 1), 0) / self._rate)

    def explain(self) -> str:
        """One line for logs: what was chosen, and the estimates behind it."""
        counts = self.counts
        drafted = counts.drafted
        mean_width = sum(width * count for width, count in counts.widths.items()) / max(drafted, 1)
        acceptance = " ".join(f"{value:.2f}" for value in self._typical_acceptance())
        return (
            f"{counts.plain} plain steps, {drafted} drafted rounds of {mean_width:.1f} slots ({counts.tries} tries, {counts.extensions} "
            f"extensions), {counts.switches} switches; acceptance by slot {acceptance}; plain {1e3 / self._plain_rate:.2f} ms, drafted "
            f"{1e3 / self._drafted_rate:.2f} ms per token; draft {1e3 * self._costs.draft(resumed=False):.2f} ms, verify "
            f"{1e3 * self._verify[0]:.2f} to {1e3 * self._verify[-1]:.2f} ms"
        )

    def _evaluate(self, *, resumed: bool) -> None:
        """Rates, thresholds and prices under the present estimates: history alone."""
        costs, widths = self._costs, self._widths
        every_width = costs.verify()
        self._verify = every_width[widths - 1]
        draft = costs.draft(resumed=False)
        catching_up = max(costs.draft(resumed=True) - draft, 0.0) if resumed else 0.0
        recent, weights = self._acceptance.recent()
        reach = self._reach(recent)
        # tokens[w - 1]: expected ones of a round of width w; before[w - 1]: how likely slot w - 1 is reached and accepted.
        before = weights @ reach
        tokens = np.cumsum(before)
        gains = tokens[widths - 1][None, :] - tokens[widths - 1][:, None]
        extra = self._verify[None, :] - self._verify[:, None]
        # 1 / F(w, u), which is at most 1: the difference of two sums drowns where acceptance is tiny.
        ratio = np.minimum(before[widths[:-1], None] / np.maximum(gains[:-1], 1e-12), 1.0)
        cheapest = np.where(np.triu(np.ones_like(ratio, dtype=bool), 1), extra[:-1] * ratio, np.inf).min(axis=1)
        self._plain_rate = 1.0 / (every_width[0] + costs.host)
        self._rate = self._plain_rate
        per_round = np.cumsum(reach, axis=1)[:, widths - 1]
        rows = np.arange(len(reach))
        for _ in range(_ITERATIONS):
            self._thresholds = self._rate * cheapest
            stops = self._stops(reach)
            seconds = draft + catching_up / _RESUME_ROUNDS + costs.host + float(weights @ self._verify[stops])
            self._drafted_rate = float(weights @ per_round[rows, stops]) / seconds
            if self._drafted_rate <= self._rate * (1 + 1e-6):
                break
            self._rate = self._drafted_rate
        self._plain_unit=1/self._plain_rate
        steps = np.diff(self._verify)
        self._extension_price = float(steps.max()) if len(steps) else 0.0
        narrowest = self._verify[min(int(np.searchsorted(widths, 2)), len(widths) - 1)]
        self._loss = MINLOSS*self._plain_unit+max(0.,(1 - self._drafted_rate / self._plain_rate) * seconds)
        self._price = draft + catching_up + float(narrowest - every_width[0])

    def _reach(self, evidence: Vector) -> Vector:
        """[n, block_size]: the probability that slots 1 … k are all accepted, for k from 0 (which is 1)."""
        acceptance = self._acceptance.predict(evidence)
        return np.concatenate([np.ones((len(acceptance), 1)), np.cumprod(acceptance, axis=1)], axis=1)

    def _stops(self, reach: Vector) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """[n]: index of the width at which each row stops: the first that slot w does not pay to pass, as seen from slots up to w."""
        goes_on = reach[:, self._widths[:-1]] > self._thresholds
        return np.logical_and.accumulate(goes_on, axis=1).sum(axis=1)

    def _typical_acceptance(self) -> Vector:
        recent, weights = self._acceptance.recent()
        return weights @ self._acceptance.predict(recent)

    def _credit(self, seconds: float) -> None:
        if is_time(abs(seconds)):
            self._account = min(self._account + seconds, _MAX_TRIES * max(self._price, self._extension_price))
