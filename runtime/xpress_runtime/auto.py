"""The loop of speculation "auto": before each round it is decided whether to draft, and after drafting how many slots to verify.

One row, and one round at a time: the next one depends on what the last one gave. What a round of each kind costs is measured when the loop
first runs. The decisions themselves are :mod:`xpress_runtime.speculation`'s.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from xpress_runtime.backlog import Backlog
from xpress_runtime.drafters import BlockDrafter, Drafter
from xpress_runtime.generation import GenerationConfig
from xpress_runtime.loop import Loop, SpeculativeLoop
from xpress_runtime.plan import Committed, Plan, Round
from xpress_runtime.sampling import SamplingForm
from xpress_runtime.speculation import SpeculationPolicy, StageCosts
from xpress_runtime.stats import GenerationStats
from xpress_runtime.verification import Verification

logger = logging.getLogger("xpress_runtime.auto")

_REPEATS = 4


class AutoLoop(Loop):
    """Drafted rounds of any width, and plain steps. ``policy`` None: one of its own, from costs that are measured now."""

    stages = SpeculativeLoop.stages

    def __init__(
        self, plan: Plan, drafter: Drafter, form: SamplingForm, backlog: Backlog | None, policy: SpeculationPolicy | None = None
    ) -> None:
        """``backlog``: the block drafter's; other drafters read the text."""
        super().__init__(plan, drafter, Verification(plan, form, drafter.drawn_from(), drafter.key, backlog), plan.block_size)
        assert plan.num_rows == 1, "speculation auto decides for one sequence"
        self._drafts = drafter
        self._backlog = backlog
        if backlog is not None:
            backlog.clear()
        # Reading a device in the middle of a round would make it wait; there the width follows from history.
        self._sees_block = plan.backend.rounds_in_flight == 1
        self._text: list[int] = []
        self._num_missed = 0
        self.policy = policy or self._measured_policy()

    def start(self, row: int, prompt: Sequence[int], stats: GenerationStats, config: GenerationConfig | None = None) -> int:
        first = super().start(row, prompt, stats, config)
        self._text = [*prompt, first]
        self._num_missed = 0
        self.policy.new_request()
        return first

    def round(self, stats: GenerationStats) -> Committed:
        drafts = self.policy.begin()
        if drafts:
            committed, confidence = self._drafted_round()
        else:
            committed, confidence = self._plain_round(), None
        self._count_stages(committed, stats)
        draft, refine, verify = committed.stage_seconds
        accepted, emitted = int(committed.accepted[0]), int(committed.num_emitted[0])
        if drafts:
            self.policy.record_round(committed.width, accepted, confidence, draft + refine, verify)
        else:
            self.policy.record_plain(verify)
        self._text += committed.tokens[0, :emitted].tolist()
        self._num_missed = 0 if drafts else self._num_missed + emitted
        if self._backlog is not None:
            self._backlog.add(emitted)
        logger.debug("%s of %d slots: %d accepted", "drafted round" if drafts else "plain step", committed.width, accepted)
        return committed

    @property
    def explanation(self) -> str | None:
        return self.policy.explain()

    def _plain_round(self) -> Committed:
        current = self.plan.begin_round(1)
        report = current.result.report
        report.begin()
        if self._backlog is not None and self._backlog.num_rows + self.plan.block_size > self._backlog.capacity:
            assert isinstance(self._drafts, BlockDrafter)
            self._drafts.read_backlog()
        report.mark()
        # Nothing to refine.
        report.mark()
        return self._verified(current)

    def _drafted_round(self) -> tuple[Committed, list[float] | None]:
        current = self.plan.begin_round(self.plan.block_size)
        report = current.result.report
        confidence = None
        report.begin()
        if self._num_missed:
            self._drafts.catch_up(0, self._text, self._num_missed)
        self._drafts.draft()
        report.mark()
        self._drafts.refine()
        if self._sees_block:
            confidence = self._drafts.confidence().read()[0].tolist()
        report.mark()
        if self._backlog is not None:
            self._backlog.clear()
        return self._verified(replace(current, width=self.policy.width(confidence))), confidence

    def _verified(self, current: Round) -> Committed:
        if self._backlog is not None:
            self._backlog.begin_round()
        self.verification.run(current)
        self.verification.commit()
        self._drafts.observe(current)
        current.result.report.mark()
        current.result.report.send()
        return self.plan.collect(current)

    def _stages(self, current: Round) -> None:
        raise NotImplementedError("a round of this loop is decided while it runs")

    def _log_drafts(self) -> None:
        """Each round logs its own."""

    def _measured_policy(self) -> SpeculationPolicy:
        """Costs from running each stage a few times on a row that is not active: nothing is emitted, no text is changed."""
        plan, block_size = self.plan, self.plan.block_size
        # A short text's caches, where they have no fixed length, and the row at their front.
        plan.begin_prompt_chunk(0, 0, 1)
        plan.stop(0)
        widths = list(range(1, block_size + 1)) if plan.backend.flexible_shapes else [1, block_size]
        draft = self._median(self._draft_once)
        probed = sorted({1, 2, (block_size + 1) // 2, block_size} & set(widths))
        verify = {width: self._median(partial(self._verify_once, width)) for width in probed}
        logger.info("measured: draft %.2f ms, verify %s", 1e3 * draft, {width: f"{1e3 * cost:.2f} ms" for width, cost in verify.items()})
        return SpeculationPolicy(block_size, widths, self._sees_block, StageCosts.calibrated(draft, verify, block_size=block_size))

    def _median(self, run: Callable[[], None]) -> float:
        seconds = []
        run()
        for _ in range(_REPEATS):
            self.plan.backend.synchronise()
            started = time.perf_counter()
            run()
            self.plan.backend.synchronise()
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds)

    def _draft_once(self) -> None:
        self._drafts.draft()
        self._drafts.refine()
        if self._sees_block:
            self._drafts.confidence()

    def _verify_once(self, width: int) -> None:
        self.verification.run(self.plan.begin_round(width))
