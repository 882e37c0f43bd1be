"""Taps of many rows that no drafter has read yet: those of each row's last rounds, until a round drafts for that row.

A row that drafts round after round reads its taps where the target left them. A row that was decoded plainly, or sat out while others
drafted, has them in a store, and reads them in a call of its own before it drafts again. Knows nothing about when to draft.

Sizes: B rows, P block size, F taps of a token, M stored rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xpress_runtime.backends.base import BoundProgram, Buffer
from xpress_runtime.drafters import BlockDrafter
from xpress_runtime.memory import backlog_rows
from xpress_runtime.plan import Plan

Rows = NDArray[np.bool_]


def num_computed(rows: Rows) -> int:
    """The number of rows that a round of ``rows`` computes: all up to the last one."""
    return int(np.flatnonzero(rows)[-1]) + 1


class RowTaps:
    """Made by :meth:`Plan.part`."""

    def __init__(self, plan: Plan) -> None:
        num_rows, block_size, size = plan.buffers.taps.shape
        dtype, int64 = plan.buffers.taps.dtype, np.dtype(np.int64)
        self._plan = plan
        self._block_size = block_size
        self._capacity = backlog_rows(plan.prefill_chunk, block_size)
        self._store = plan.backend.allocate((num_rows, 1, self._capacity, size), dtype)
        self._start = plan.backend.allocate((num_rows,), int64)
        # Plain rounds leave theirs here, so that those of the last drafted round stay.
        self._plain = plan.backend.allocate((num_rows, 1, size), dtype)
        # Where acceptance leaves the context position that it would have if nothing waited.
        self.unused_position = plan.backend.allocate((num_rows,), int64)
        # How many taps of each row wait, and whether they are those of the last drafted round, at their place.
        self._waiting = np.zeros(num_rows, np.int64)
        self._in_place = np.zeros(num_rows, np.bool_)
        plan.load("store-taps")

    def start(self, row: int) -> None:
        """Another text begins in this row; its drafter has read all of the prompt."""
        self._waiting[row] = 0

    def before_drafting(self, rows: Rows, drafter: BlockDrafter) -> None:
        """What waits of ``rows`` is read by the next draft, or now."""
        for row in np.flatnonzero(rows & ~self._in_place):
            self._read(int(row), drafter)
        # Rows that do not draft store nothing of what is left from others.
        self._plan.buffers.context_position.write(self._plan.positions - self._waiting * rows)

    def before_verifying(self, drafted: Rows | None, drafter: BlockDrafter) -> None:
        """The next round stores its taps behind what waits; nothing does of rows that were ``drafted``."""
        if drafted is not None:
            self._waiting[drafted] = 0
        for row in np.flatnonzero(self._waiting + self._block_size > self._capacity):
            self._read(int(row), drafter)
        self._start.write(self._waiting)

    def after_round(self, num_emitted: NDArray[np.int64], drafted: Rows | None) -> None:
        """That many of each row's taps belong to verified tokens. In a round that drafted, those of other rows lost their place."""
        self._waiting += num_emitted
        if drafted is None:
            self._in_place &= num_emitted == 0
        else:
            self._in_place = drafted.copy()

    def of_round(self, width: int) -> Buffer:
        """Where the target leaves the taps of ``width`` verified slots."""
        return self._plain if width == 1 else self._plan.buffers.taps

    def bind_store(self, width: int) -> BoundProgram:
        """Taps of ``width`` verified slots → the store."""
        plan = self._plan
        taps = plan.shaped("target", "taps", self.of_round(width), plan.num_rows, width)
        return plan.program("store-taps").bind({"store": self._store, "taps": taps, "start": self._start, "store_out": self._store})

    def _read(self, row: int, drafter: BlockDrafter) -> None:
        waiting = int(self._waiting[row])
        if not waiting:
            return
        plan, position = self._plan, self._plan.positions[row]
        width = waiting if plan.backend.flexible_shapes else plan.prefill_chunk
        plan.buffers.chunk_start.write(np.array([position - waiting]))
        plan.buffers.chunk_end.write(np.array([position]))
        drafter.read_taps(row, self._store.row(row).view(1, width, self._store.shape[3]), width)
        self._waiting[row] = 0
