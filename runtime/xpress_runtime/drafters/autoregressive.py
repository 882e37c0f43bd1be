"""The autoregressive drafter: a causal LM of its own proposes token after token, on caches of its own.

It reads the two last tokens first: the one before the anchor is new to it where every draft was accepted, and where not it is computed once
more. Then each of its tokens is the next one's input. All of it is one sequence of graphs without the host.

Sizes: B rows, P block size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from xpress_runtime.backends.base import BoundProgram, Buffer
from xpress_runtime.buffers import allocate_caches, fixed, row_of
from xpress_runtime.drafters.base import Drafter, bind_refiner, drafted_scores
from xpress_runtime.errors import OptionError
from xpress_runtime.graph_names import SAMPLED, refiner_name
from xpress_runtime.plan import Plan, Round
from xpress_runtime.verification import DrawnFrom, SamplingMemory, drawn_inputs


class AutoregressiveDrafter(Drafter):
    """Drafts P-1 tokens, each from the ones before."""

    name = "autoregressive"

    def __init__(self, plan: Plan, *, sampled: bool = False) -> None:
        super().__init__(plan, sampled=sampled)
        if plan.bundle.manifest.draft_model is None:
            raise OptionError(
                "this bundle has no autoregressive drafter; build it again with --draft-model or --draft-layers, or choose another drafter"
            )
        self._memory = plan.part(_DraftModelMemory)
        plan.load("draft-start", self._step_graph, refiner_name(0, 0, sampled=sampled))

    def drawn_from(self) -> DrawnFrom:
        return drafted_scores(self.plan, 0, 0, sampled=self.sampled, base_logits=self._memory.block)

    def read_chunk(self, row: int, width: int) -> None:
        self.plan.run(("prefill-draft-model", width, row), partial(self._bind_chunk, width, row))

    def start(self, row: int, prompt: Sequence[int], anchor: int) -> None:
        """The prompt was read chunk by chunk."""

    def draft(self) -> None:
        self.plan.run(("draft", self.name, self.sampled), self._bind_draft)

    def refine(self) -> None:
        # From the same logits with the same noise this takes the same tokens once more, now as a block with what they were drawn from.
        hidden, block = self.plan.buffers.draft_hidden, self._memory.block
        self.plan.run(
            ("refine", self.name, self.sampled),
            lambda: (bind_refiner(self.plan, 0, 0, sampled=self.sampled, hidden=hidden, base_logits=block),),
        )

    def observe(self, current: Round) -> None:
        """Accepted drafts are in the caches, and what follows overwrites the others."""

    def catch_up(self, row: int, text: Sequence[int], num_missed: int) -> None:
        plan, buffers = self.plan, self.plan.buffers
        # The anchor and the token before it are read when a block is drafted; so were those of the last block, which may now be new.
        missed = np.asarray(text[:-2], np.int64)
        for start in range(len(text) - 2 - num_missed, len(missed), plan.prefill_chunk):
            chunk = missed[start : start + plan.prefill_chunk]
            # Padding is overwritten by what follows.
            ids = np.zeros((1, len(chunk) if plan.backend.flexible_shapes else plan.prefill_chunk), np.int64)
            ids[0, : len(chunk)] = chunk
            buffers.ids.view(*ids.shape).write(ids)
            buffers.chunk_start.write(np.array([start]))
            self.read_chunk(row, ids.shape[1])

    @property
    def _step_graph(self) -> str:
        return f"draft-step{SAMPLED if self.sampled else ''}"

    def _bind_chunk(self, width: int, row: int) -> tuple[BoundProgram, ...]:
        return self._memory.bind_model(self.plan.buffers.ids, 1, width, self.plan.buffers.chunk_start, row)

    def _bind_draft(self) -> tuple[BoundProgram, ...]:
        plan, memory, rows = self.plan, self._memory, self.plan.num_rows
        programs = [memory.bind_start(), *memory.bind_model(memory.first_ids, rows, 2, memory.first_position)]
        for slot in range(1, plan.block_size):
            if slot > 1:
                programs += memory.bind_model(memory.token, rows, 1, memory.positions[slot - 2])
            programs += [memory.bind_head(2 if slot == 1 else 1), self._bind_step(slot)]
        return tuple(programs)

    def _bind_step(self, slot: int) -> BoundProgram:
        plan, memory = self.plan, self._memory
        read, write = memory.collected[slot % 2], memory.collected[(slot + 1) % 2]
        bound = {"logits": memory.logits, "collected": read, "token": memory.token, "collected_out": write}
        if self.sampled:
            bound |= {"slot": memory.slots[slot - 1], "position": plan.buffers.position, **drawn_inputs(plan.part(SamplingMemory).rows)}
        return plan.program(self._step_graph).bind(bound)


class _DraftModelMemory:
    """The drafter's caches and working memory, of every row."""

    def __init__(self, plan: Plan) -> None:
        manifest, backend, rows = plan.bundle.manifest, plan.backend, plan.num_rows
        record = manifest.draft_model
        assert record is not None
        self._plan = plan
        self._embed, self._head = ("embed", "head") if record.shares_tables else ("draft-embed", "draft-head")
        decoder, head = plan.program("draft-decoder"), plan.program(self._head)
        plan.load(self._embed)
        int64 = np.dtype(np.int64)
        hidden, logits = decoder.outputs["hidden"], head.outputs["logits"]
        self._width = fixed(hidden.dims[2])
        self.caches = allocate_caches(backend, record.caches, decoder, rows, manifest.cache_rows)
        if plan.cache_rows != manifest.cache_rows:
            plan.buffers.fit(self.caches, plan.cache_rows, keep=False)
        plan.caches["draft-model"] = self.caches
        working_rows = max(plan.prefill_chunk, 2 * rows)
        self._embeddings = backend.allocate((working_rows, self._width), hidden.dtype)
        self._hidden = backend.allocate((working_rows, self._width), hidden.dtype)
        self.logits = backend.allocate((rows, 1, fixed(logits.dims[2])), logits.dtype)
        self._best = backend.allocate((rows, 1), int64)
        self.token = backend.allocate((rows, 1), int64)
        self.collected = [backend.allocate(plan.buffers.base_logits.shape, plan.buffers.base_logits.dtype) for _ in range(2)]
        self.block = self.collected[plan.block_size % 2]
        self.first_ids = backend.allocate((rows, 2), int64)
        self.first_position = backend.allocate((rows,), int64)
        # Of the drafts that are read again, one after the other.
        self.positions = [backend.allocate((rows,), int64) for _ in range(plan.block_size - 2)]
        self.slots = [backend.allocate((1,), int64) for _ in range(plan.block_size - 1)]
        for slot, buffer in enumerate(self.slots, start=1):
            buffer.write(np.array([slot]))
        self._rows = {width: backend.allocate((rows, 1), int64) for width in (1, 2)}
        self._rows[2].write(np.ones((rows, 1), np.int64))

    def bind_start(self) -> BoundProgram:
        """Anchor, predecessor, position → the first two ids and where they and the following ones stand."""
        buffers = self._plan.buffers
        positions = {f"position.{slot}": buffer for slot, buffer in enumerate(self.positions, start=1)}
        bound = {"anchor": buffers.anchor, "predecessor": buffers.predecessor, "position": buffers.position}
        return self._plan.program("draft-start").bind({**bound, "ids": self.first_ids, "start": self.first_position, **positions})

    def bind_model(self, ids: Buffer, num_rows: int, width: int, position: Buffer, row: int | None = None) -> tuple[BoundProgram, ...]:
        """Ids [num_rows, width] at ``position`` → hidden states, and the caches of one row or of all."""
        embeddings = self._embeddings.view(num_rows, width, self._width)
        embed = self._plan.program(self._embed).bind({"ids": ids.view(num_rows, width), "embeddings": embeddings})
        hidden = self._hidden.view(num_rows, width, self._width)
        bound = {"embeddings": embeddings, "position": position, "hidden": hidden, **row_of(self.caches, row)}
        return (embed, self._plan.program("draft-decoder").bind(bound))

    def bind_head(self, width: int) -> BoundProgram:
        """The last of ``width`` hidden states of every row → its logits."""
        rows = self._plan.num_rows
        hidden = self._hidden.view(rows, width, self._width)
        bound = {"hidden": hidden, "rows": self._rows[width], "logits": self.logits, "token": self._best}
        return self._plan.program(self._head).bind(bound)
