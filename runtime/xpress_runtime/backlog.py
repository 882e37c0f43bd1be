"""Taps that wait: what the target saw while a sequence was decoded plainly, kept until the block drafter reads it.

One row. Knows where taps lie and which text they belong to; knows nothing about when to draft.
"""

from __future__ import annotations

import numpy as np

from xpress_runtime.backends.base import BoundProgram, Buffer
from xpress_runtime.memory import backlog_rows
from xpress_runtime.plan import Plan


class Backlog:
    """``num_rows`` taps wait, of the positions from the drafter's last context on. Made by :meth:`Plan.part`."""

    def __init__(self, plan: Plan) -> None:
        assert plan.num_rows == 1, "a backlog is one sequence's"
        taps = plan.buffers.taps
        self._plan = plan
        self.capacity = backlog_rows(plan.prefill_chunk, plan.block_size)
        self._store = plan.backend.allocate((1, 1, self.capacity, taps.shape[2]), taps.dtype)
        self._start = plan.backend.allocate((1,), np.dtype(np.int64))
        # Where acceptance leaves the context position that it would have without a backlog.
        self.unused_position = plan.backend.allocate((1,), np.dtype(np.int64))
        self.num_rows = 0
        plan.load("store-taps")

    def clear(self) -> None:
        """Nothing waits: a new text begins, or the drafter has read everything."""
        self.num_rows = 0

    def begin_round(self) -> None:
        """The taps of the round that is queued next are stored behind what waits."""
        self._start.write(np.array([self.num_rows]))

    def add(self, num_emitted: int) -> None:
        """That many of the stored taps belong to verified tokens; what lies behind is overwritten."""
        self.num_rows += num_emitted

    def context(self) -> tuple[Buffer, int]:
        """What waits, as the drafter reads it: taps [1, S, F] and S, a width that it was built for."""
        plan = self._plan
        width = max(self.num_rows, 1)
        if not plan.backend.flexible_shapes:
            width = plan.block_size if width <= plan.block_size else self.capacity
        plan.buffers.context_position.write(plan.positions - self.num_rows)
        return self._store.view(1, width, self._store.shape[3]), width

    def of_round(self, width: int) -> Buffer:  # noqa: ARG002
        """Where the target leaves a round's taps."""
        return self._plan.buffers.taps

    def bind_store(self, width: int) -> BoundProgram:
        """Taps of ``width`` verified slots → the store."""
        plan = self._plan
        taps = plan.shaped("target", "taps", plan.buffers.taps, 1, width)
        return plan.program("store-taps").bind({"store": self._store, "taps": taps, "start": self._start, "store_out": self._store})
