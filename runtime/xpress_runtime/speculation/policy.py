"""Speculation ``auto``: whether a round drafts, and how many slots it verifies. Pure decisions; knows no backend, token or clock.

Exact at any temperature: whether a round drafts depends on history, its width on history and on confidences by the rule of renewal.py,
which looks at no slot behind the one that it decides on and at no drawn token. So the output keeps the target's distribution.

Drafting pays where the rate of drafted rounds, under present estimates (acceptance.py, costs.py) and over the blocks seen last, is above
plain decoding's. The present rate counts and not a long-run one: a text has a fixed number of tokens, and each is to be made as fast as
its part of the text allows. What is not done is not learned, so within a budget the policy acts against its estimates (exploration.py).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from xpress_runtime.speculation.acceptance import AcceptanceModel
from xpress_runtime.speculation.costs import StageCosts
from xpress_runtime.speculation.exploration import ExtensionBudget, TryBudget
from xpress_runtime.speculation.renewal import best_rule, reach_of

# Drafting goes on while it looks this close to plain decoding: it informs, and plain decoding does not.
INDIFFERENCE = 0.03
# The least that a try is taken to lose, in plain steps.
_MIN_LOSS = 0.03
# Feeding the drafter what was decoded plainly must be earned back within so many rounds.
_RESUME_ROUNDS = 8


@dataclass
class PolicyCounts:
    """Choices so far. ``widths``: drafted rounds by width; ``switches``: between plain and drafted, either way."""

    plain: int = 0
    tries: int = 0
    extensions: int = 0
    switches: int = 0
    widths: Counter[int] = field(default_factory=Counter)

    @property
    def drafted(self) -> int:
        return self.widths.total()


@dataclass
class _Begun:
    """A drafted round that is not recorded yet. ``paid``: from the budget of tries; ``paying_width``: its width without extension."""

    resumed: bool = False
    is_try: bool = False
    extends: bool = False
    paid: float = 0.0
    paying_width: int | None = None


class SpeculationPolicy:
    """Decides for one sequence; lives as long as its costs and its drafter's settings do.

    Rounds may be begun before earlier ones are recorded, and are recorded in the order in which they were begun.
    """

    def __init__(self, block_size: int, widths: Sequence[int], sees_block: bool, costs: StageCosts) -> None:
        """``widths``: numbers of slots that a drafted round may verify; ``sees_block``: :meth:`width` gets confidences.

        Raises ValueError where no width is allowed, or one that the costs do not cover.
        """
        if not widths or min(widths) < 1 or max(widths) > block_size or block_size != costs.block_size:
            raise ValueError(f"widths are {list(widths)} with costs of {costs.block_size} slots, expected 1 to {block_size}")
        self.counts = PolicyCounts()
        self._widths = np.array(sorted(set(widths)), np.int64)
        self._sees_block = sees_block
        self._costs = costs
        self._acceptance = AcceptanceModel(block_size - 1)
        self._tries, self._extensions = TryBudget(), ExtensionBudget()
        self._begun: deque[_Begun] = deque()
        self._was_plain: bool | None = None
        self._evaluate(resumed=False)

    def new_request(self) -> None:
        """Another text begins; rounds that were begun and never recorded are forgotten."""
        for begun in self._begun:
            self._tries.pay(-begun.paid)
        self._begun.clear()
        self._acceptance.new_request()
        self._changed = True

    def begin(self) -> bool:
        """Start a round: True to draft, then ask for the width; False for a plain step. Depends on history alone."""
        resumed = bool(self._was_plain)
        # Plain steps tell nothing about drafting: until a try can be paid for, the last evaluation holds.
        if self._changed or not resumed or self._tries.covers(self._expected_loss):
            self._evaluate(resumed=resumed)
        can_draft = bool(self._widths[-1] > 1)
        is_try = can_draft and not self._pays and self._tries.allows(self._expected_loss, self._price)
        drafts = can_draft and (self._pays or is_try)
        self.counts.switches += self._was_plain is drafts
        self._was_plain = not drafts
        if not drafts:
            self.counts.plain += 1
            return False
        begun = _Begun(resumed, is_try, is_try or self._extensions.covers(self._widest_step))
        if is_try:
            self.counts.tries += 1
            begun.paid = self._price
            self._tries.pay(begun.paid)
        self._begun.append(begun)
        return True

    def width(self, confidence: Sequence[float] | None) -> int:
        """How many slots the drafted round that was just begun verifies: an allowed width.

        ``confidence`` [block_size - 1]: largest probability of each slot's refined distribution, None where it is not seen.
        """
        begun = self._begun[-1]
        evidence = self._acceptance.evidence(confidence if self._sees_block else None)
        index = int(self._rule.stop(reach_of(self._acceptance.predict(evidence[None])))[0])
        if begun.extends and index < len(self._widths) - 1:
            begun.paying_width = int(self._widths[index])
            index += 1
            if not begun.is_try:
                self.counts.extensions += 1
                self._extensions.pay(float(self._verify[index] - self._verify[index - 1]))
        width = int(self._widths[index])
        self.counts.widths[width] += 1
        return width

    def record_plain(self, seconds: float) -> None:
        """A plain step took ``seconds``, the host's constant share left out."""
        self._costs.observe_verify(1, seconds)
        self._tries.plain_step(1.0 / self._plain_rate, self._price)

    def record_round(
        self, width: int, accepted: int, confidence: Sequence[float] | None, draft_seconds: float, verify_seconds: float
    ) -> None:
        """The oldest round not yet recorded verified ``width`` slots and accepted ``accepted`` proposals."""
        begun = self._begun.popleft() if self._begun else _Begun()
        self._costs.observe_draft(draft_seconds, resumed=begun.resumed)
        self._costs.observe_verify(width, verify_seconds)
        seen = confidence if self._sees_block else None
        self._acceptance.observe(self._acceptance.evidence(seen), width, accepted, seen=seen is not None)
        self._changed = True

        # The budgets go by estimates: they follow what lasts, and one stalled measurement does not use up a hundred tries.
        seconds = self._costs.draft(resumed=begun.resumed) + float(self._costs.verify()[width - 1]) + self._costs.host
        gain = (1 + accepted) / self._plain_rate - seconds
        if begun.is_try:
            self._tries.settle(begun.paid, gain, self._price)
            return
        self._tries.drafted(gain, self._price)
        owed = 0 if begun.paying_width is None else max(accepted + 1 - begun.paying_width, 0)
        self._extensions.drafted(seconds, owed / self._rule.rate, self._widest_step)

    def explain(self) -> str:
        """One line for logs: what was chosen, and the estimates behind it."""
        counts = self.counts
        mean_width = sum(width * count for width, count in counts.widths.items()) / max(counts.drafted, 1)
        evidence, weights = self._acceptance.recent()
        acceptance = " ".join(f"{value:.2f}" for value in weights @ self._acceptance.predict(evidence))
        verify = self._costs.verify()
        return (
            f"{counts.plain} plain steps, {counts.drafted} drafted rounds of {mean_width:.1f} slots ({counts.tries} tries, "
            f"{counts.extensions} extensions), {counts.switches} switches; acceptance by slot {acceptance}; ms per token "
            f"{1e3 / self._plain_rate:.2f} plain, {1e3 / self._rule.drafted_rate:.2f} drafted; "
            f"ms to draft {1e3 * self._costs.draft(resumed=False):.2f}, "
            f"to verify 1 to {len(verify)} slots {1e3 * verify[0]:.2f} to {1e3 * verify[-1]:.2f}"
        )

    def _evaluate(self, *, resumed: bool) -> None:
        """Rates, the width rule and the prices of acting against it, under the present estimates."""
        every_width, host = self._costs.verify(), self._costs.host
        draft = self._costs.draft(resumed=False)
        catching_up = max(self._costs.draft(resumed=True) - draft, 0.0) if resumed else 0.0
        self._verify = every_width[self._widths - 1]
        plain_seconds = float(every_width[0]) + host
        self._plain_rate = 1.0 / plain_seconds

        evidence, weights = self._acceptance.recent()
        reach = reach_of(self._acceptance.predict(evidence))
        around = draft + catching_up / _RESUME_ROUNDS + host
        self._rule = best_rule(reach, weights, self._widths, self._verify, around, self._plain_rate)
        advantage = self._rule.drafted_rate / self._plain_rate - 1.0
        self._pays = advantage > -INDIFFERENCE

        # A try verifies at least one proposal, and loses at most what it takes beyond a plain step.
        narrowest = self._verify[min(int(np.searchsorted(self._widths, 2)), len(self._widths) - 1)]
        self._price = draft + catching_up + float(narrowest) - float(every_width[0])
        self._expected_loss = max(-advantage * self._rule.drafted_seconds, 0.0) + _MIN_LOSS * plain_seconds
        self._widest_step = float(np.diff(self._verify, prepend=self._verify[0]).max())
        self._changed = False
