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


def prefill(plan: Plan, row: int, tokens: NDArray[np.int64], drafter: Drafter | None) -> None:
    """Run the prompt of one row; the logits of its last token are then the first of the plan's logits, the best of them its first token."""
    buffers = plan.buffers
    width = plan.prefill_chunk
    for start in range(0, len(tokens), plan.prefill_chunk):
        chunk = tokens[start : start + plan.prefill_chunk]
        plan.begin_prompt_chunk(row, start, len(chunk))
        if plan.backend.flexible_shapes:
            width = len(chunk)
        # Padding stands behind the prompt: nothing attends to it, and the rows it writes are overwritten by what follows.
        ids = np.zeros((1, width), np.int64)
        ids[0, : len(chunk)] = chunk
        buffers.ids.view(1, width).write(ids)
        buffers.chunk_start.write(np.array([start]))
        buffers.chunk_end.write(np.array([start + len(chunk)]))
        plan.run(("prefill", width, row), partial(_bind_target, plan, width, row))
        if drafter is not None:
            drafter.read_chunk(row, width)
    buffers.last_row.write(np.array([[(len(tokens) - 1) % plan.prefill_chunk]]))
    plan.run(("prefill-head", width), partial(_bind_head, plan, width))


def _bind_target(plan: Plan, width: int, row: int) -> tuple[BoundProgram, ...]:
    buffers = plan.buffers
    return (
        plan.bind_embed(buffers.ids, 1, width),
        bind_target(plan, 1, width, buffers.prefill_taps, buffers.chunk_start, row),
    )


def _bind_head(plan: Plan, width: int) -> tuple[BoundProgram, ...]:
    buffers = plan.buffers
    return (plan.bind_head(1, width, buffers.last_row, buffers.hidden, buffers.logits, buffers.target_tokens),)
