"""The decoding loops over a plan: speculative rounds (draft → refine → verify → commit), and plain decoding over the same graphs.

Works on token ids of any number of rows; knows nothing about text, stopping or requests. Greedy: a round emits exactly the tokens that the
target alone would produce.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np

from xpress_runtime.plan import Committed, Plan
from xpress_runtime.stats import GenerationStats, Stage

logger = logging.getLogger("xpress_runtime.loop")


class SpeculativeLoop:
    """Rounds of a drafted block, ``num_passes`` Jacobi passes and one verification."""

    def __init__(self, plan: Plan, num_passes: int) -> None:
        self.plan = plan
        self.num_passes = num_passes
        self.num_proposals = plan.block_size - 1
        plan.load(f"refiner-k{num_passes}")

    def start(self, row: int, prompt: Sequence[int], stats: GenerationStats) -> int:
        """Prefill a row; returns its first token, which is the anchor of its first round."""
        return _start(self.plan, row, prompt, stats, with_drafter=True)

    def round(self, stats: GenerationStats) -> Committed:
        """One round of every active row."""
        with stats.stage(Stage.DRAFT):
            self.plan.draft()
        with stats.stage(Stage.REFINE):
            self.plan.refine(self.num_passes)
        with stats.stage(Stage.VERIFY):
            self.plan.verify()
        if logger.isEnabledFor(logging.DEBUG):
            before, after = self.plan.drafts()
            logger.debug("drafts before refinement %s, after %d passes %s", before.tolist(), self.num_passes, after.tolist())
        return self.plan.commit(self.plan.block_size)


class PlainLoop:
    """One token of the target per step: the baseline that every speed-up is measured against."""

    num_proposals = 0
    num_passes = None

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def start(self, row: int, prompt: Sequence[int], stats: GenerationStats) -> int:
        """Prefill a row; returns its first token."""
        return _start(self.plan, row, prompt, stats, with_drafter=False)

    def round(self, stats: GenerationStats) -> Committed:
        """One step of every active row."""
        with stats.stage(Stage.VERIFY):
            self.plan.decode_one()
        return self.plan.commit(1)


def _start(plan: Plan, row: int, prompt: Sequence[int], stats: GenerationStats, *, with_drafter: bool) -> int:
    started = time.perf_counter()
    with stats.stage(Stage.PREFILL):
        first = plan.prefill(row, np.asarray(prompt, np.int64), with_drafter=with_drafter)
    plan.start(row, first, prompt[-1], len(prompt))
    stats.prefill_seconds = time.perf_counter() - started
    return first
