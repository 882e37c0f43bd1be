"""The decoding loops over a plan: speculative rounds (draft → refine → verify → commit), and plain decoding over the same graphs.

Works on token ids of any number of rows; knows nothing about text, stopping or requests. A greedy row gets exactly the tokens that the
target alone would produce, a sampled one tokens of exactly the target's distribution. A backend that works behind the host's back gets the
next round before the last one is read, so a row that is stopped may be in one round more; the plan drops what that round emits for it.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Sequence
from functools import partial

import numpy as np

from xpress_runtime.drafters import Drafter
from xpress_runtime.generation import GenerationConfig
from xpress_runtime.plan import Committed, Plan, Round
from xpress_runtime.prefill import prefill
from xpress_runtime.sampling import SamplingForm
from xpress_runtime.stats import GenerationStats, Stage
from xpress_runtime.verification import Verification

logger = logging.getLogger("xpress_runtime.loop")

GREEDY = SamplingForm()


class Loop(ABC):
    """Starts rows and runs rounds. ``width`` is the number of slots that a round verifies; ``stages`` are those that a round marks."""

    stages: tuple[Stage, ...]

    def __init__(self, plan: Plan, drafter: Drafter | None, verification: Verification, width: int) -> None:
        self.plan = plan
        self.drafter = drafter
        self.verification = verification
        self.num_proposals = width - 1
        self._width = width
        self._queued: deque[Round] = deque()

    def start(self, row: int, prompt: Sequence[int], stats: GenerationStats, config: GenerationConfig | None = None) -> int:
        """Read a row's prompt; returns its first token, which is the anchor of its first round.

        ``config``: its sampling settings, with a seed; the loop's form must cover them. Greedy without.
        """
        started = time.perf_counter()
        self.verification.start(row, config or GenerationConfig(seed=0), prompt)
        prefill(self.plan, row, np.asarray(prompt, np.int64), self.drafter)
        first = self.verification.first_token()
        self.plan.start(row, first, prompt[-1], len(prompt))
        if self.drafter is not None:
            self.drafter.start(row, prompt, first)
        stats.prefill_seconds = stats.stage_seconds[Stage.PREFILL] = time.perf_counter() - started
        return first

    def round(self, stats: GenerationStats) -> Committed:
        """The next round of every active row."""
        verbose = logger.isEnabledFor(logging.DEBUG)
        while len(self._queued) < (1 if verbose else self.plan.backend.rounds_in_flight):
            self._queued.append(self._queue())
        committed = self.plan.collect(self._queued.popleft())
        self._count_stages(committed, stats)
        if verbose:
            self._log_drafts()
        return committed

    def _count_stages(self, committed: Committed, stats: GenerationStats) -> None:
        for stage, seconds in zip(self.stages, committed.stage_seconds, strict=True):
            stats.stage_seconds[stage] += seconds

    @property
    def explanation(self) -> str | None:
        """Why it speculated as it did, where it had a choice."""
        return None

    def _queue(self) -> Round:
        current = self.plan.begin_round(self._width)
        # Equal keys bind equal buffers, so a backend may replay what it recorded; a report belongs to one plan and one round in flight.
        self.plan.backend.run_round((self._key, current.result.report), partial(self._stages, current))
        current.result.report.send()
        return current

    @property
    def _key(self) -> Hashable:
        drafter = None if self.drafter is None else self.drafter.key
        return (type(self).__name__, drafter, self.verification.form)

    @abstractmethod
    def _stages(self, current: Round) -> None:
        """Queue one round and mark the end of each stage."""

    @abstractmethod
    def _log_drafts(self) -> None:
        """Log what the last round drafted."""


class SpeculativeLoop(Loop):
    """Rounds of a drafted block and one verification of all of it."""

    stages = (Stage.DRAFT, Stage.REFINE, Stage.VERIFY)

    def __init__(self, plan: Plan, drafter: Drafter, form: SamplingForm = GREEDY) -> None:
        super().__init__(plan, drafter, Verification(plan, form, drafter.drawn_from(), drafter.key), plan.block_size)
        self._drafts = drafter

    def _stages(self, current: Round) -> None:
        report = current.result.report
        report.begin()
        self._drafts.draft()
        report.mark()
        self._drafts.refine()
        report.mark()
        self.verification.run(current)
        self.verification.commit()
        self._drafts.observe(current)
        report.mark()

    def _log_drafts(self) -> None:
        before, after = self.plan.drafts()
        logger.debug("drafts before refinement %s, after %s passes %s", before.tolist(), self._drafts.num_passes, after.tolist())


class PlainLoop(Loop):
    """One token of the target per step: the baseline that every speed-up is measured against."""

    stages = (Stage.VERIFY,)

    def __init__(self, plan: Plan, form: SamplingForm = GREEDY) -> None:
        super().__init__(plan, None, Verification(plan, form), 1)

    def _stages(self, current: Round) -> None:
        report = current.result.report
        report.begin()
        self.verification.run(current)
        self.verification.commit()
        report.mark()

    def _log_drafts(self) -> None:
        """Nothing is drafted."""
