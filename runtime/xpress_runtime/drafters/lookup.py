"""Prompt lookup: what followed the last words when they stood earlier in the text. No weights; one small graph on the text so far."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xpress_runtime.backends.base import BoundProgram, Buffer
from xpress_runtime.drafters.base import Drafter
from xpress_runtime.plan import Plan, Round
from xpress_runtime.verification import DrawnFrom


class LookupDrafter(Drafter):
    """Proposals are certain: each is the only candidate of its slot."""

    name = "lookup"

    def __init__(self, plan: Plan, *, sampled: bool = False) -> None:
        super().__init__(plan, sampled=sampled)
        self._memory = plan.part(_LookupMemory)

    def drawn_from(self) -> DrawnFrom:
        return DrawnFrom(self._memory.scores, self._memory.candidates)

    def read_chunk(self, row: int, width: int) -> None:
        """The text is read when the row starts."""

    def start(self, row: int, prompt: Sequence[int], anchor: int) -> None:
        self._memory.write(row, [*prompt, anchor])

    def draft(self) -> None:
        self.plan.run(("lookup",), self._bind)
        self.plan.backend.copy(self._memory.next_history, self._memory.history)

    def refine(self) -> None:
        """There is nothing to refine."""

    def observe(self, current: Round) -> None:
        tokens, rows = current.result.tokens, self.plan.num_rows
        self.plan.backend.copy(tokens.view(rows, current.width), self._memory.tokens.view(rows, current.width))

    def catch_up(self, row: int, text: Sequence[int], num_missed: int) -> None:  # noqa: ARG002
        self._memory.write(row, text)

    def confidence(self) -> Buffer:
        return self._memory.confidence

    def _bind(self) -> tuple[BoundProgram, ...]:
        buffers, memory = self.plan.buffers, self._memory
        bound = {
            "history": memory.history,
            "tokens": memory.tokens,
            "context_position": buffers.context_position,
            "position": buffers.position,
            "history_out": memory.next_history,
            "verify_ids": buffers.verify_ids,
            "draft_scores": memory.scores,
            "candidates": memory.candidates,
            "confidence": memory.confidence,
        }
        return (self.plan.program("lookup").bind(bound),)


class _LookupMemory:
    """The text of every row by position, and what lookup says of it."""

    def __init__(self, plan: Plan) -> None:
        int64, float32 = np.dtype(np.int64), np.dtype(np.float32)
        rows, num_proposals = plan.num_rows, plan.block_size - 1
        self._num_positions = plan.bundle.manifest.cache_rows
        self.history = plan.backend.allocate((rows, self._num_positions), int64)
        self.next_history = plan.backend.allocate((rows, self._num_positions), int64)
        # What the last round emitted.
        self.tokens = plan.backend.allocate((rows, plan.block_size), int64)
        self.scores = plan.backend.allocate((rows, num_proposals, 1), float32)
        self.candidates = plan.backend.allocate((rows, num_proposals, 1), int64)
        self.confidence = plan.backend.allocate((rows, num_proposals), float32)
        plan.load("lookup")

    def write(self, row: int, text: Sequence[int]) -> None:
        """The whole text of a row."""
        history = np.zeros((1, self._num_positions), np.int64)
        history[0, : len(text)] = text
        self.history.row(row).write(history)
