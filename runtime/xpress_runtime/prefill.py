"""The prompt: through the target and into the drafter's memory, chunk by chunk, up to the logits of its last token.

Knows chunks; knows nothing about what a drafter keeps of them.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from xpress_runtime.backends.base import BoundProgram
from xpress_runtime.drafters.base import Drafter
from xpress_runtime.plan import Plan
from xpress_runtime.verification import bind_target


class PromptReader:
    """The prompt of one row, chunk by chunk; rounds of other rows may run in between."""

    def __init__(self, plan: Plan, row: int, tokens: NDArray[np.int64], drafter: Drafter | None) -> None:
        self._plan = plan
        self._row = row
        self._tokens = tokens
        self._drafter = drafter
        self._start = 0

    def read_chunk(self) -> bool:
        """Read the next chunk. True behind the last one: the logits of its last token are then the first of the plan's logits, the best of
        them its first token, until another step runs.
        """
        plan, buffers, start = self._plan, self._plan.buffers, self._start
        chunk = self._tokens[start : start + plan.prefill_chunk]
        plan.begin_prompt_chunk(self._row, start, len(chunk))
        width = len(chunk) if plan.backend.flexible_shapes else plan.prefill_chunk
        # Padding stands behind the prompt: nothing attends to it, and the rows it writes are overwritten by what follows.
        ids = np.zeros((1, width), np.int64)
        ids[0, : len(chunk)] = chunk
        buffers.ids.view(1, width).write(ids)
        buffers.chunk_start.write(np.array([start]))
        buffers.chunk_end.write(np.array([start + len(chunk)]))
        plan.run(("prefill", width, self._row), partial(_bind_target, plan, width, self._row))
        if self._drafter is not None:
            self._drafter.read_chunk(self._row, width)
        self._start += len(chunk)
        if self._start < len(self._tokens):
            return False
        buffers.last_row.write(np.array([[len(chunk) - 1]]))
        plan.run(("prefill-head", width), partial(_bind_head, plan, width))
        return True


def prefill(plan: Plan, row: int, tokens: NDArray[np.int64], drafter: Drafter | None) -> None:
    """Run the whole prompt of one row, as :class:`PromptReader` does."""
    reader = PromptReader(plan, row, tokens, drafter)
    while not reader.read_chunk():
        pass


def _bind_target(plan: Plan, width: int, row: int) -> tuple[BoundProgram, ...]:
    buffers = plan.buffers
    return (
        plan.bind_embed(buffers.ids, 1, width),
        bind_target(plan, 1, width, buffers.prefill_taps, buffers.chunk_start, row),
    )


def _bind_head(plan: Plan, width: int) -> tuple[BoundProgram, ...]:
    buffers = plan.buffers
    return (plan.bind_head(1, width, buffers.last_row, buffers.hidden, buffers.logits, buffers.target_tokens),)
