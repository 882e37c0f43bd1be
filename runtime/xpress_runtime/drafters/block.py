"""The block drafter: DFlash fills a block in one pass or in several denoising steps, and a refiner corrects it in parallel passes.

Sizes: B rows, P block size, S context rows of a call, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from xpress_runtime.backends.base import BoundProgram, Buffer
from xpress_runtime.backlog import Backlog
from xpress_runtime.buffers import row_of
from xpress_runtime.drafters.base import Drafter, bind_refiner, drafted_scores
from xpress_runtime.graph_names import BASE_HEAD, refiner_name
from xpress_runtime.plan import Plan, Round
from xpress_runtime.verification import DrawnFrom


class BlockDrafter(Drafter):
    """``num_passes`` and ``shortlist`` are built ones. ``backlog``: where the context waits, if not in the last round's taps."""

    name = "block"
    num_passes: int
    shortlist: int
    draft_steps: int

    def __init__(
        self,
        plan: Plan,
        num_passes: int,
        shortlist: int = 0,
        draft_steps: int = 1,
        *,
        sampled: bool = False,
        backlog: Backlog | None = None,
    ) -> None:
        super().__init__(plan, sampled=sampled)
        self.num_passes = num_passes
        self.shortlist = shortlist if num_passes else 0
        # How many slots are filled after each step. Steps that would fill none are left out: they would draft the same again.
        self.fills = slots_filled(plan.block_size - 1, draft_steps)
        self.draft_steps = len(self.fills)
        self._backlog = backlog
        self._head = BASE_HEAD if plan.bundle.manifest.base_head else "head"
        plan.load("drafter", self._head, refiner_name(num_passes, self.shortlist, sampled=sampled))
        if self.draft_steps > 1:
            plan.load("denoise")

    def drawn_from(self) -> DrawnFrom:
        return drafted_scores(self.plan, self.num_passes, self.shortlist, sampled=self.sampled, base_logits=self._drafted()[1])

    def read_chunk(self, row: int, width: int) -> None:
        self.plan.run(("prefill-drafter", width, row), partial(self._bind_chunk, self.plan.buffers.prefill_taps, width, row))

    def read_taps(self, row: int, taps: Buffer, width: int) -> None:
        """Take in ``taps`` [1, width, F] of a row without drafting; the plan's chunk positions say where they stand."""
        self.plan.run(("read taps", width, row), partial(self._bind_chunk, taps, width, row))

    def start(self, row: int, prompt: Sequence[int], anchor: int) -> None:  # noqa: ARG002
        if self._backlog is not None:
            self._backlog.clear()

    def draft(self) -> None:
        taps, width = (self.plan.buffers.taps, self.plan.block_size) if self._backlog is None else self._backlog.context()
        key = ("draft", width, self._backlog is not None)
        self.plan.run(key, partial(self._bind_draft, self.plan.buffers.block_ids, taps, width))
        if self.draft_steps == 1:
            return
        memory = self.plan.part(_DenoiseMemory)
        for step, num_filled in enumerate(self.fills):
            self.plan.run(("denoise", num_filled, step == 0, step % 2), partial(memory.bind, num_filled, step))
            if step + 1 < self.draft_steps:
                ids = memory.ids[step % 2]
                self.plan.run(("draft again", step % 2, *key), partial(self._bind_draft, ids, taps, width))

    def refine(self) -> None:
        hidden, base_logits = self._drafted()
        bind = partial(bind_refiner, self.plan, self.num_passes, self.shortlist)
        self.plan.run(
            ("refine", *self._variant, self._last_set), lambda: (bind(sampled=self.sampled, hidden=hidden, base_logits=base_logits),)
        )

    def observe(self, current: Round) -> None:
        """The taps of the round are its own buffer's."""

    def catch_up(self, row: int, text: Sequence[int], num_missed: int) -> None:
        """The backlog has what it needs."""

    def read_backlog(self) -> None:
        """Store the waiting context in the drafter's caches without drafting."""
        assert self._backlog is not None
        taps, width = self._backlog.context()
        self.plan.run(("read backlog", width), partial(self._bind_context, self.plan.buffers.block_ids, taps, width))
        self._backlog.clear()

    @property
    def _variant(self) -> tuple[int, int, bool]:
        return self.num_passes, self.shortlist, self.sampled

    @property
    def _last_set(self) -> int | None:
        """Which half of the denoising memory the last step leaves its block in."""
        return (self.draft_steps - 1) % 2 if self.draft_steps > 1 else None

    def _drafted(self) -> tuple[Buffer, Buffer]:
        """Hidden states [B, P, H] and base logits [B, P-1, V] of the whole block."""
        if self._last_set is None:
            return self.plan.buffers.draft_hidden, self.plan.buffers.base_logits
        memory = self.plan.part(_DenoiseMemory)
        return memory.hidden[self._last_set], memory.logits[self._last_set]

    def _bind_draft(self, ids: Buffer, taps: Buffer, width: int) -> tuple[BoundProgram, ...]:
        plan, buffers = self.plan, self.plan.buffers
        drafted = (buffers.draft_rows, buffers.draft_hidden, buffers.base_logits, buffers.base_tokens)
        head = plan.bind_head(plan.num_rows, plan.block_size, *drafted, graph=self._head)
        return (*self._bind_context(ids, taps, width), head)

    def _bind_context(self, ids: Buffer, taps: Buffer, width: int) -> tuple[BoundProgram, ...]:
        plan, buffers, rows = self.plan, self.plan.buffers, self.plan.num_rows
        embed = plan.bind_embed(ids, rows, plan.block_size)
        return (embed, self._bind_drafter(rows, width, taps, buffers.context_position, buffers.position))

    def _bind_chunk(self, taps: Buffer, width: int, row: int) -> tuple[BoundProgram, ...]:
        # The block that the drafter drafts here is discarded, so any ids do; only its context rows are wanted.
        plan, buffers = self.plan, self.plan.buffers
        embed = plan.bind_embed(buffers.block_ids, 1, plan.block_size)
        return (embed, self._bind_drafter(1, width, taps, buffers.chunk_start, buffers.chunk_end, row))

    def _bind_drafter(
        self, num_rows: int, width: int, taps: Buffer, context_position: Buffer, block_position: Buffer, row: int | None = None
    ) -> BoundProgram:
        plan, buffers = self.plan, self.plan.buffers
        return plan.program("drafter").bind(
            {
                "embeddings": plan.shaped("embed", "embeddings", buffers.embeddings, num_rows, plan.block_size),
                "taps": plan.shaped("target", "taps", taps, num_rows, width),
                "context_position": context_position,
                "block_position": block_position,
                "hidden": plan.shaped("drafter", "hidden", buffers.draft_hidden, num_rows, plan.block_size),
                **row_of(buffers.drafter_caches, row),
            }
        )


def slots_filled(num_proposals: int, draft_steps: int) -> tuple[int, ...]:
    """⌈(P-1)·s/S⌉ for the steps s = 1 … S, each number once."""
    return tuple(dict.fromkeys(-(-num_proposals * step // draft_steps) for step in range(1, draft_steps + 1)))


class _DenoiseMemory:
    """What is kept from step to step, twice: a step reads one half and writes the other."""

    def __init__(self, plan: Plan) -> None:
        buffers, slots = plan.buffers, (plan.num_rows, plan.block_size - 1)
        int64 = np.dtype(np.int64)
        self._plan = plan
        self.hidden = [plan.backend.allocate(buffers.draft_hidden.shape, buffers.draft_hidden.dtype) for _ in range(2)]
        self.logits = [plan.backend.allocate(buffers.base_logits.shape, buffers.base_logits.dtype) for _ in range(2)]
        self.ids = [plan.backend.allocate(buffers.block_ids.shape, int64) for _ in range(2)]
        self._filled = [plan.backend.allocate(slots, int64) for _ in range(2)]
        # Before the first step nothing is filled.
        self._none_filled = plan.backend.allocate(slots, int64)
        self._counts = [plan.backend.allocate(slots[:1], int64) for _ in range(plan.block_size)]
        for count, buffer in enumerate(self._counts):
            buffer.write(np.full(slots[:1], count, np.int64))

    def bind(self, num_filled: int, step: int) -> tuple[BoundProgram, ...]:
        """One step: what the drafter has just drafted and what was kept → what is kept, and the ids to draft from again."""
        buffers, read, write = self._plan.buffers, (step + 1) % 2, step % 2
        bound = {
            "hidden": buffers.draft_hidden,
            "base_logits": buffers.base_logits,
            "kept_hidden": self.hidden[read],
            "kept_logits": self.logits[read],
            "filled": self._filled[read] if step else self._none_filled,
            "block_ids": self.ids[read] if step else buffers.block_ids,
            "num_filled": self._counts[num_filled],
            "out_hidden": self.hidden[write],
            "out_logits": self.logits[write],
            "out_filled": self._filled[write],
            "out_ids": self.ids[write],
        }
        return (self._plan.program("denoise").bind(bound),)
