"""Verification: the target over the verified slots, and acceptance; in sampled rounds what changes the target's distribution in between.

Knows which graphs follow each other and what each reads; knows nothing about where drafts come from, beyond what they were drawn from.

Sizes: B rows, W verified slots (1: plain decoding), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from xpress_runtime.backends.base import BoundProgram, Buffer
from xpress_runtime.buffers import row_of
from xpress_runtime.generation import GenerationConfig
from xpress_runtime.plan import Plan, Round
from xpress_runtime.sampling import RowNumbers, SamplingForm


@dataclass(frozen=True)
class DrawnFrom:
    """What drafts were drawn from: scores [B, P-1, Q] over the vocabulary, or over ``candidates`` [B, P-1, Q]."""

    scores: Buffer
    candidates: Buffer | None


class WaitingTaps(Protocol):
    """Where taps wait that no drafter has read yet."""

    # Where acceptance leaves the context position that it would have if nothing waited.
    unused_position: Buffer

    def of_round(self, width: int) -> Buffer:
        """Where the target leaves the taps of ``width`` verified slots."""

    def bind_store(self, width: int) -> BoundProgram:
        """Taps of ``width`` verified slots → what waits."""


class SamplingMemory:
    """What sampling adds to a plan: the numbers of its rows, those of the row whose prompt is read, and logits on their way."""

    def __init__(self, plan: Plan) -> None:
        vocab_size = plan.bundle.manifest.target.vocab_size
        self.rows = RowNumbers(plan.backend, vocab_size, plan.num_rows)
        self.prompt = RowNumbers(plan.backend, vocab_size, 1)
        self.prompt_position = plan.backend.allocate((1,), np.dtype(np.int64))
        # No token stands between a prompt and its first token.
        self.no_ids = plan.backend.allocate((1, 1), np.dtype(np.int64))
        self.no_ids.write(np.array([[-1]]))
        logits = plan.buffers.logits
        self.processed = tuple(plan.backend.allocate(logits.shape, logits.dtype) for _ in range(2))


class Verification:
    """Verification of rounds of one form. ``drawn_from``: of sampled drafts; ``backlog``: where taps wait that no drafter has read yet."""

    def __init__(
        self,
        plan: Plan,
        form: SamplingForm,
        drawn_from: DrawnFrom | None = None,
        drafter_key: object = None,
        backlog: WaitingTaps | None = None,
    ) -> None:
        self._plan = plan
        self.form = form
        self._drawn_from = drawn_from
        self._backlog = backlog
        self._key = ("verify", form, drafter_key, backlog is not None)
        if form.sampled:
            plan.load("sample")
            self._memory = plan.part(SamplingMemory)
            if drawn_from is not None:
                plan.load(self._accept_graph)
            for graph, wanted in (("penalise", form.penalised), ("count", form.penalised), *self._filters):
                if wanted:
                    plan.load(graph)

    def start(self, row: int, config: GenerationConfig, prompt: Sequence[int]) -> None:
        """Take a request's settings for a row."""
        if self.form.sampled:
            self._memory.rows.write(row, config, prompt)
            self._memory.prompt.write(0, config, prompt)
            self._memory.prompt_position.write(np.array([len(prompt) - 1]))

    def first_token(self) -> int:
        """The token that follows the prompt whose last logits were computed last."""
        buffers = self._plan.buffers
        if self.form.sampled:
            self._plan.run((*self._key, "first"), self._bind_first)
        return int(buffers.target_tokens.view(1, 1).read()[0, 0])

    def run(self, current: Round) -> None:
        """Queue the verification of a round: anchor and drafts [B, W] → what is emitted, and the next round's state, to be committed."""
        self._plan.run((*self._key, current.width, current.index), partial(self._bind, current))

    @property
    def _accept_graph(self) -> str:
        assert self._drawn_from is not None
        return "accept-sampled" if self._drawn_from.candidates is None else "accept-candidates"

    @property
    def _filters(self) -> tuple[tuple[str, bool], ...]:
        return (("filter-top-k", self.form.top_k), ("filter-top-p", self.form.top_p))

    def _bind(self, current: Round) -> tuple[BoundProgram, ...]:
        plan, buffers, rows, width = self._plan, self._plan.buffers, self._plan.num_rows, current.width
        ids = (buffers.anchor if width == 1 else buffers.verify_ids).view(rows, width)
        wanted = buffers.plain_rows if width == 1 else buffers.verify_rows.view(rows, width)
        logits = plan.shaped("head", "logits", buffers.logits, rows, width)
        taps = buffers.taps if self._backlog is None else self._backlog.of_round(width)
        programs = [
            plan.bind_embed(ids, rows, width),
            bind_target(plan, rows, width, taps, buffers.position),
            plan.bind_head(rows, width, wanted, buffers.hidden, buffers.logits, buffers.target_tokens),
        ]
        if self.form.sampled:
            chain, logits = self._process(self._memory.rows, ids, logits)
            programs += chain
            if width == 1:
                programs.append(self._bind_sample(self._memory.rows, logits, buffers.position, rows))
        if self.form.sampled and width > 1:
            programs.append(self._bind_accept_sampled(ids, logits, current))
        else:
            programs.append(self._bind_accept(ids, current))
        if self.form.penalised:
            programs.append(self._bind_count(ids, current))
        if self._backlog is not None:
            programs.append(self._backlog.bind_store(width))
        return tuple(programs)

    def _bind_first(self) -> tuple[BoundProgram, ...]:
        buffers, memory = self._plan.buffers, self._memory
        logits = self._plan.shaped("head", "logits", buffers.logits, 1, 1)
        chain, logits = self._process(memory.prompt, memory.no_ids, logits)
        return (*chain, self._bind_sample(memory.prompt, logits, memory.prompt_position, 1))

    def _process(self, numbers: RowNumbers, ids: Buffer, logits: Buffer) -> tuple[list[BoundProgram], Buffer]:
        """Penalties, then top-k, then top-p and min-p, each where the form has it; and where the logits then are."""
        programs: list[BoundProgram] = []
        free = [buffer.view(*logits.shape) for buffer in self._memory.processed]

        def step(graph: str, output: str, inputs: dict[str, Buffer]) -> None:
            nonlocal logits
            target = free.pop(0)
            programs.append(self._plan.program(graph).bind({"logits": logits, output: target, **inputs}))
            # Never the head's own logits: a log may look at them.
            if programs[1:]:
                free.append(logits)
            logits = target

        if self.form.penalised:
            counts = {"counts": numbers.counts, "in_prompt": numbers.in_prompt}
            rates = {"repetition": numbers.repetition, "presence": numbers.presence, "frequency": numbers.frequency}
            step("penalise", "penalised", {"verify_ids": ids, **counts, **rates})
        scale = {"inverse_temperature": numbers.inverse_temperature}
        if self.form.top_k:
            step("filter-top-k", "filtered", {**scale, "top_k": numbers.top_k})
        if self.form.top_p:
            step("filter-top-p", "filtered", {**scale, "top_p": numbers.top_p, "min_p": numbers.min_p})
        return programs, logits

    def _bind_sample(self, numbers: RowNumbers, logits: Buffer, position: Buffer, num_rows: int) -> BoundProgram:
        token = self._plan.buffers.target_tokens.view(num_rows, 1)
        return self._plan.program("sample").bind({"logits": logits, "position": position, "token": token, **drawn_inputs(numbers)})

    def _bind_accept(self, ids: Buffer, current: Round) -> BoundProgram:
        tokens = self._plan.buffers.target_tokens.view(self._plan.num_rows, current.width)
        return self._plan.program("accept").bind({"verify_ids": ids, "target_tokens": tokens, **self._state(current)})

    def _bind_accept_sampled(self, ids: Buffer, logits: Buffer, current: Round) -> BoundProgram:
        drawn_from = self._drawn_from
        assert drawn_from is not None, "sampled drafts were drawn from something"
        bound = {
            "verify_ids": ids,
            "logits": logits,
            "draft_scores": drawn_from.scores,
            **drawn_inputs(self._memory.rows),
            **self._state(current),
        }
        if drawn_from.candidates is not None:
            bound["candidates"] = drawn_from.candidates
        return self._plan.program(self._accept_graph).bind(bound)

    def _bind_count(self, ids: Buffer, current: Round) -> BoundProgram:
        numbers = self._memory.rows
        bound = {"counts": numbers.counts, "verify_ids": ids, "num_emitted": current.result.num_emitted, "next_counts": numbers.next_counts}
        return self._plan.program("count").bind(bound)

    def commit(self) -> None:
        """Make the round's outputs the state of the next one."""
        self._plan.commit()
        if self.form.penalised:
            numbers = self._memory.rows
            self._plan.backend.copy(self._plan.front(numbers.next_counts), self._plan.front(numbers.counts))

    def _state(self, current: Round) -> dict[str, Buffer]:
        buffers, result = self._plan.buffers, current.result
        # With a backlog the context begins where the drafter stopped reading, not where this round began.
        context_position = buffers.context_position if self._backlog is None else self._backlog.unused_position
        return {
            "position": buffers.position,
            "predecessor": buffers.predecessor,
            "active": buffers.active,
            "accepted": result.accepted,
            "tokens": result.tokens.view(self._plan.num_rows, current.width),
            "num_emitted": result.num_emitted,
            "block_ids": buffers.block_ids,
            "next_anchor": buffers.next_anchor,
            "next_predecessor": buffers.next_predecessor,
            "next_position": buffers.next_position,
            "context_position": context_position,
            "next_active": buffers.next_active,
        }


def bind_target(plan: Plan, num_rows: int, width: int, taps: Buffer, position: Buffer, row: int | None = None) -> BoundProgram:
    """Embeddings [num_rows, width, H] at ``position`` → hidden states, taps, caches; of one row's caches, or of all."""
    return plan.program("target").bind(
        {
            "embeddings": plan.shaped("embed", "embeddings", plan.buffers.embeddings, num_rows, width),
            "position": position,
            "hidden": plan.shaped("target", "hidden", plan.buffers.hidden, num_rows, width),
            "taps": plan.shaped("target", "taps", taps, num_rows, width),
            **row_of(plan.buffers.target_caches, row),
        }
    )


def drawn_inputs(numbers: RowNumbers) -> dict[str, Buffer]:
    """What every graph that draws reads of its rows."""
    return {"noise_key": numbers.noise_key, "inverse_temperature": numbers.inverse_temperature, "sampled": numbers.sampled}
