"""The decoding loops over a plan: speculative rounds (draft → refine → verify → commit), and plain decoding over the same graphs.

Works on token ids of any number of rows; knows nothing about text, stopping or requests. Greedy: a round emits exactly the tokens that the
target alone would produce. A backend that works behind the host's back gets the next round before the last one is read, so a row that is
stopped may be in one round more; the plan drops what that round emits for it.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from functools import partial

import numpy as np

from xpress_runtime.plan import Committed, Plan, Round
from xpress_runtime.stats import GenerationStats, Stage

logger = logging.getLogger("xpress_runtime.loop")


class Loop(ABC):
    """Starts rows and runs rounds. ``width`` is the number of slots that a round verifies; ``stages`` are those that a round marks."""

    stages: tuple[Stage, ...]
    with_drafter: bool

    def __init__(self, plan: Plan, num_passes: int | None, width: int) -> None:
        self.plan = plan
        self.num_passes = num_passes
        self.num_proposals = width - 1
        self._width = width
        self._queued: deque[Round] = deque()

    def start(self, row: int, prompt: Sequence[int], stats: GenerationStats) -> int:
        """Prefill a row; returns its first token, which is the anchor of its first round."""
        started = time.perf_counter()
        first = self.plan.prefill(row, np.asarray(prompt, np.int64), with_drafter=self.with_drafter)
        self.plan.start(row, first, prompt[-1], len(prompt))
        stats.prefill_seconds = stats.stage_seconds[Stage.PREFILL] = time.perf_counter() - started
        return first

    def round(self, stats: GenerationStats) -> Committed:
        """The next round of every active row."""
        verbose = logger.isEnabledFor(logging.DEBUG)
        while len(self._queued) < (1 if verbose else self.plan.backend.rounds_in_flight):
            self._queued.append(self._queue())
        committed = self.plan.collect(self._queued.popleft())
        for stage, seconds in zip(self.stages, committed.stage_seconds, strict=True):
            stats.stage_seconds[stage] += seconds
        if verbose:
            self._log_drafts()
        return committed

    def _queue(self) -> Round:
        current = self.plan.begin_round(self._width)
        # Equal keys bind equal buffers, so a backend may replay what it recorded; a report belongs to one plan and one round in flight.
        self.plan.backend.run_round((type(self).__name__, self.num_passes, current.result.report), partial(self._stages, current))
        current.result.report.send()
        return current

    @abstractmethod
    def _stages(self, current: Round) -> None:
        """Queue one round and mark the end of each stage."""

    @abstractmethod
    def _log_drafts(self) -> None:
        """Log what the last round drafted."""


class SpeculativeLoop(Loop):
    """Rounds of a drafted block, ``num_passes`` Jacobi passes and one verification."""

    stages = (Stage.DRAFT, Stage.REFINE, Stage.VERIFY)
    with_drafter = True

    def __init__(self, plan: Plan, num_passes: int) -> None:
        super().__init__(plan, num_passes, plan.block_size)
        self._num_passes = num_passes
        plan.load(f"refiner-k{num_passes}")

    def _stages(self, current: Round) -> None:
        plan, report = self.plan, current.result.report
        report.begin()
        plan.draft()
        report.mark()
        plan.refine(self._num_passes)
        report.mark()
        plan.verify(current)
        plan.commit()
        report.mark()

    def _log_drafts(self) -> None:
        before, after = self.plan.drafts()
        logger.debug("drafts before refinement %s, after %d passes %s", before.tolist(), self._num_passes, after.tolist())


class PlainLoop(Loop):
    """One token of the target per step: the baseline that every speed-up is measured against."""

    stages = (Stage.VERIFY,)
    with_drafter = False

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan, None, 1)

    def _stages(self, current: Round) -> None:
        report = current.result.report
        report.begin()
        self.plan.decode_one(current)
        self.plan.commit()
        report.mark()

    def _log_drafts(self) -> None:
        """Nothing is drafted."""
