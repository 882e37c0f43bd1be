"""A bundle's graphs and the memory that they work on, for a number of rows: loading, binding, where each row stands, rounds in flight.

A round is a closed dataflow over fixed memory: what one graph writes is where the next one reads, and acceptance writes the state from
which the next round starts. Which graphs a step runs is said elsewhere (``verification``, ``drafters``); this module runs what they bind.
It decides nothing about prompts, stopping or statistics.

Sizes: B rows, P block size, W verified slots.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from xpress_runtime.backends.base import Backend, BoundProgram, Buffer, Program, TensorInfo
from xpress_runtime.buffers import Buffers, RoundResult, cache_inputs, fixed
from xpress_runtime.bundle import Bundle
from xpress_runtime.errors import BundleError

# Flexible caches grow by this many rows, up to the bundle's.
_CACHE_STEP = 256

# Steps that stay bound. Flexible shapes bind many, each for one width and one length of the caches; most never come again.
_MAX_BOUND_STEPS = 512

Part = TypeVar("Part")


@dataclass(frozen=True)
class Committed:
    """What a round of ``width`` verified slots W emitted, per row: the number of accepted drafts [B], the emitted tokens [B, W] and how
    many of them count [B]; and the seconds of each stage that was marked.
    """

    accepted: NDArray[Any]
    tokens: NDArray[Any]
    num_emitted: NDArray[Any]
    stage_seconds: list[float]
    width: int


@dataclass(frozen=True)
class Round:
    """A round that is queued: where its result will be, its verified slots W, and which generation of each row it belongs to; -1 for a row
    that it leaves out.
    """

    index: int
    result: RoundResult
    width: int
    generations: NDArray[np.int64]


class Plan:
    """Everything that generation touches for ``num_rows`` rows. What sampling or a kind of drafter adds is allocated at its first use."""

    def __init__(self, bundle: Bundle, backend: Backend, num_rows: int = 1) -> None:
        manifest = bundle.manifest
        backend.admit(bundle, num_rows)
        self.bundle = bundle
        self.backend = backend
        self.num_rows = num_rows
        # Rounds run on the first rows only, where a call may have any number of them.
        self._front_rows = num_rows
        self.block_size = manifest.drafter.block_size
        self.mask_token_id = manifest.drafter.mask_token_id
        self.prefill_chunk = manifest.prefill_chunk
        self._programs: dict[str, Program] = {}
        self._steps: OrderedDict[Hashable, tuple[BoundProgram, ...]] = OrderedDict()
        self._parts: dict[type, Any] = {}
        self.load("embed", "target", "head", "drafter", "accept")
        try:
            self.buffers = Buffers(manifest, backend, self._programs, num_rows)
        except ValueError as problem:
            raise self._mismatch(problem) from problem
        self.cache_rows = manifest.cache_rows
        # Caches that a part has allocated, by model.
        self.caches = {"target": self.buffers.target_caches, "drafter": self.buffers.drafter_caches}
        # Where each row stands, as far as the host knows; what a round may write behind it must fit the caches.
        self.positions = np.zeros(num_rows, np.int64)
        self._running = np.zeros(num_rows, np.bool_)
        # Counts the generations of each row: what an earlier one has still in flight is not the next one's.
        self._generations = np.zeros(num_rows, np.int64)
        self._num_rounds = 0

    def load(self, *graphs: str) -> None:
        """Load graphs now: a first round that does it would be slow, and may find a bundle that was replaced since it was opened."""
        for graph in graphs:
            self.program(graph)

    def part(self, kind: Callable[[Plan], Part]) -> Part:
        """What ``kind`` makes of this plan, made once: memory beyond the plan's own."""
        assert isinstance(kind, type)
        if kind not in self._parts:
            try:
                self._parts[kind] = kind(self)
            except ValueError as problem:
                raise self._mismatch(problem) from problem
        part: Part = self._parts[kind]
        return part

    def close(self) -> None:
        """Let go of programs and parts, which hold the plan in turn; its memory goes with the plan."""
        self._steps.clear()
        self._parts.clear()
        self._programs.clear()

    # Rows.

    def run_on_front(self, num_rows: int) -> None:
        """Rounds run on the first ``num_rows`` rows from now on, where the backend's shapes are flexible; rows behind are left alone."""
        if self.backend.flexible_shapes:
            self._front_rows = num_rows

    def front(self, buffer: Buffer) -> Buffer:
        """Of a buffer with a row for each of the plan's, those that rounds run on; another one as it is."""
        if self._front_rows == self.num_rows or buffer.shape[0] != self.num_rows:
            return buffer
        return buffer.view(self._front_rows, *buffer.shape[1:])

    def begin_prompt_chunk(self, row: int, start: int, num_tokens: int) -> None:
        """Make room for the prompt tokens ``start`` … of a row and what is written behind them."""
        others_run = bool(np.delete(self._running, row).any())
        self.positions[row] = start + num_tokens
        self._fit_caches(keep=others_run or start > 0)

    def start(self, row: int, anchor: int, predecessor: int, position: int) -> None:
        """Set a row's state for its first round: ``anchor`` stands at ``position`` and is not cached, ``predecessor`` stands before it."""
        buffers = self.buffers
        self.positions[row] = position
        self._running[row] = True
        self._generations[row] += 1
        block = np.full((1, self.block_size), self.mask_token_id, np.int64)
        block[0, 0] = anchor
        buffers.block_ids.row(row).write(block)
        for buffer, value in (
            (buffers.anchor, anchor),
            (buffers.predecessor, predecessor),
            (buffers.position, position),
            (buffers.context_position, position),
            (buffers.active, 1),
        ):
            buffer.row(row).write(np.array([value]))

    def hold(self, row: int) -> None:
        """Rounds of other rows write what they compute for this one behind the prompt that it has read so far."""
        for buffer in (self.buffers.position, self.buffers.context_position):
            buffer.row(row).write(self.positions[row : row + 1])

    def stop(self, row: int) -> None:
        """Freeze a row: it takes part in no further round, and its part of the caches is free."""
        self._running[row] = False
        self._generations[row] += 1
        # To the front, where what it still computes needs no room.
        self.positions[row] = 0
        for buffer in (self.buffers.active, self.buffers.position, self.buffers.context_position):
            buffer.row(row).write(np.array([0]))

    # Rounds. Each runs on every row; an inactive row computes garbage behind its position and is changed by none of them.

    def begin_round(self, width: int) -> Round:
        """The next round of ``width`` verified slots. Rounds are collected in the order in which they began."""
        results = self.buffers.results
        index = self._num_rounds % len(results)
        self._num_rounds += 1
        generations = self._generations.copy()
        generations[self._front_rows :] = -1
        return Round(index, results[index], width, generations)

    def commit(self) -> None:
        """Make acceptance's outputs the state of the next round."""
        buffers = self.buffers
        for made, state in (
            (buffers.next_anchor, buffers.anchor),
            (buffers.next_predecessor, buffers.predecessor),
            (buffers.next_position, buffers.position),
            (buffers.next_active, buffers.active),
        ):
            self.backend.copy(self.front(made), self.front(state))

    def collect(self, oldest: Round) -> Committed:
        """Wait for a round and say what it emitted: nothing in a row that it left out, or that was stopped or started since it began."""
        (accepted, tokens, num_emitted), stage_seconds = oldest.result.report.wait()
        same = oldest.generations == self._generations
        accepted, num_emitted = accepted * same, num_emitted * same
        self.positions += num_emitted
        self._fit_caches(keep=True)
        tokens = tokens.reshape(-1)[: self.num_rows * oldest.width].reshape(self.num_rows, oldest.width)
        return Committed(accepted, tokens, num_emitted, stage_seconds, oldest.width)

    def _fit_caches(self, *, keep: bool) -> None:
        """Give the caches the least multiple of a few hundred rows that holds every row and what its next round may write behind it."""
        if not self.backend.flexible_shapes:
            return
        needed = int(self.positions.max()) + 3 * self.block_size
        rows = min(-(-needed // _CACHE_STEP) * _CACHE_STEP, self.bundle.manifest.cache_rows)
        if rows == self.cache_rows or (keep and rows < self.cache_rows):
            return
        for caches in self.caches.values():
            self.buffers.fit(caches, rows, keep=keep)
        self.cache_rows = rows

    # Running.

    def run(self, step: Hashable, bind: Callable[[], tuple[BoundProgram, ...]]) -> None:
        """Queue a step. It is bound when it first runs, and again for caches of another length and other numbers of rows; equal steps bind
        equal buffers.
        """
        key = (self.cache_rows, self._front_rows, step)
        if key not in self._steps:
            try:
                self._steps[key] = bind()
            except ValueError as problem:
                raise self._mismatch(problem) from problem
            if len(self._steps) > _MAX_BOUND_STEPS:
                self._steps.popitem(last=False)
        self._steps.move_to_end(key)
        for program in self._steps[key]:
            program.run()

    def program(self, graph: str) -> Program:
        if graph not in self._programs:
            self._programs[graph] = _FrontProgram(self, self.backend.load(self.bundle, graph))
        return self._programs[graph]

    def shaped(self, graph: str, output: str, buffer: Buffer, num_rows: int, width: int) -> Buffer:
        """The buffer as a graph's output [num_rows, width, …]."""
        return buffer.view(num_rows, width, fixed(self.program(graph).outputs[output].dims[2]))

    def bind_embed(self, ids: Buffer, num_rows: int, width: int) -> BoundProgram:
        """Token ids → the embeddings that target and block drafter read."""
        embeddings = self.shaped("embed", "embeddings", self.buffers.embeddings, num_rows, width)
        return self.program("embed").bind({"ids": ids.view(num_rows, width), "embeddings": embeddings})

    def bind_head(
        self, num_rows: int, width: int, rows: Buffer, hidden: Buffer, logits: Buffer, tokens: Buffer, graph: str = "head"
    ) -> BoundProgram:
        """The wanted ``rows`` [num_rows, R] of hidden states → logits and best tokens."""
        num_wanted = rows.shape[1]
        return self.program(graph).bind(
            {
                "hidden": self.shaped("target", "hidden", hidden, num_rows, width),
                "rows": rows,
                "logits": self.shaped("head", "logits", logits, num_rows, num_wanted),
                "token": tokens.view(num_rows, num_wanted),
            }
        )

    # What a log, a parity check or a test may look at.

    def drafts(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """The last block's drafts [B, P-1] before and after refinement."""
        return self.buffers.base_tokens.read(), self.buffers.verify_ids.read()[:, 1:]

    def last_round(self) -> dict[str, NDArray[Any]]:
        """Copies of the last round's tensors: draft hidden [B, P, H], base and refined logits [B, P-1, …], verify logits [B, P, V]."""
        return {
            "hidden": self.buffers.draft_hidden.read(),
            "base_logits": self.buffers.base_logits.read(),
            "refined_logits": self.buffers.draft_scores.read(),
            "verify_logits": self.buffers.logits.read(),
        }

    def cached(self, row: int, length: int) -> dict[str, NDArray[Any]]:
        """Copies of the first ``length`` cache rows of one row, by model and cache name."""
        return {
            f"{model}.{name}": caches[name].row(row).read()[0, :, :length]
            for model, caches in self.caches.items()
            for name in cache_inputs(caches)
        }

    def _mismatch(self, problem: Exception) -> BundleError:
        return BundleError(
            f"{self.bundle.folder}: the graphs are not those that the manifest describes ({problem}); build the bundle again"
        )


class _FrontProgram:
    """A program that is bound to the front of what has a row for each of the plan's."""

    def __init__(self, plan: Plan, program: Program) -> None:
        self._plan = plan
        self._program = program
        self.inputs: Mapping[str, TensorInfo] = program.inputs
        self.outputs: Mapping[str, TensorInfo] = program.outputs

    def bind(self, buffers: Mapping[str, Buffer]) -> BoundProgram:
        return self._program.bind({name: self._plan.front(buffer) for name, buffer in buffers.items()})
