"""A bundle's graphs bound to the plan's buffers: one method per step of a round.

A round is a closed dataflow over fixed memory: what one graph writes is where the next one reads, and ``accept`` writes the state from
which the next round starts. This module moves tensors; it decides nothing about prompts, stopping or statistics.

Sizes: B rows, P block size, W verified slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xpress_runtime.backends.base import Backend, BoundProgram, Buffer, Program
from xpress_runtime.buffers import Buffers, RoundResult, cache_inputs, fixed, row_of
from xpress_runtime.bundle import Bundle
from xpress_runtime.errors import BundleError

# Flexible caches grow by this many rows, up to the bundle's.
_CACHE_STEP = 256


@dataclass(frozen=True)
class Committed:
    """What a round emitted, per row: the number of accepted drafts [B], the emitted tokens [B, W] and how many of them count [B]; and the
    seconds of each stage that was marked.
    """

    accepted: NDArray[Any]
    tokens: NDArray[Any]
    num_emitted: NDArray[Any]
    stage_seconds: list[float]


@dataclass(frozen=True)
class Round:
    """A round that is queued: where its result will be, its verified slots W, and which generation of each row it belongs to."""

    index: int
    result: RoundResult
    width: int
    generations: NDArray[np.int64]


class Plan:
    """Everything that generation touches for ``num_rows`` rows, allocated once. Refiners are loaded when a loop asks."""

    def __init__(self, bundle: Bundle, backend: Backend, num_rows: int = 1) -> None:
        manifest = bundle.manifest
        backend.admit(bundle, num_rows)
        self.bundle = bundle
        self.backend = backend
        self.num_rows = num_rows
        self.block_size = manifest.drafter.block_size
        self.mask_token_id = manifest.drafter.mask_token_id
        self.prefill_chunk = manifest.prefill_chunk
        self._programs: dict[str, Program] = {}
        self._steps: dict[tuple[Any, ...], tuple[BoundProgram, ...]] = {}
        self.load("embed", "target", "head", "drafter", "accept")
        try:
            self.buffers = Buffers(manifest, backend, self._programs, num_rows)
        except ValueError as problem:
            raise self._mismatch(problem) from problem
        self._cache_rows = manifest.cache_rows
        # Where each row stands, as far as the host knows; what a round may write behind it must fit the caches.
        self._positions = np.zeros(num_rows, np.int64)
        self._running = np.zeros(num_rows, np.bool_)
        # Counts the generations of each row: what an earlier one has still in flight is not the next one's.
        self._generations = np.zeros(num_rows, np.int64)
        self._num_rounds = 0

    def load(self, *graphs: str) -> None:
        """Load graphs now: a first round that does it would be slow, and may find a bundle that was replaced since it was opened."""
        for graph in graphs:
            self._program(graph)

    # Steps. Each runs on every row; an inactive row computes garbage behind its position and is changed by none of them.

    def prefill(self, row: int, tokens: NDArray[np.int64], *, with_drafter: bool) -> int:
        """Run a prompt of one row through the target (and the drafter's context) in chunks; returns the target's next token."""
        buffers, flexible = self.buffers, self.backend.flexible_shapes
        others_run = bool(np.delete(self._running, row).any())
        width = self.prefill_chunk
        for start in range(0, len(tokens), self.prefill_chunk):
            chunk = tokens[start : start + self.prefill_chunk]
            self._positions[row] = start + len(chunk)
            self._fit_caches(keep=others_run or start > 0)
            if flexible:
                width = len(chunk)
            # Padding stands behind the prompt: nothing attends to it, and the rows it writes are overwritten by what follows.
            ids = np.zeros((1, width), np.int64)
            ids[0, : len(chunk)] = chunk
            buffers.ids.view(1, width).write(ids)
            buffers.chunk_start.write(np.array([start]))
            buffers.chunk_end.write(np.array([start + len(chunk)]))
            self._run("prefill", width, row)
            if with_drafter:
                self._run("prefill-drafter", width, row)
        buffers.last_row.write(np.array([[(len(tokens) - 1) % self.prefill_chunk]]))
        self._run("prefill-head", width)
        return int(buffers.target_tokens.view(1, 1).read()[0, 0])

    def start(self, row: int, anchor: int, predecessor: int, position: int) -> None:
        """Set a row's state for its first round: ``anchor`` stands at ``position`` and is not cached, ``predecessor`` stands before it."""
        buffers = self.buffers
        self._positions[row] = position
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

    def stop(self, row: int) -> None:
        """Freeze a row: it takes part in no further round, and its part of the caches is free."""
        self._running[row] = False
        self._generations[row] += 1
        # To the front, where what it still computes needs no room.
        self._positions[row] = 0
        for buffer in (self.buffers.active, self.buffers.position, self.buffers.context_position):
            buffer.row(row).write(np.array([0]))

    def begin_round(self, width: int) -> Round:
        """The next round of ``width`` verified slots. Rounds are collected in the order in which they began."""
        results = self.buffers.results
        index = self._num_rounds % len(results)
        self._num_rounds += 1
        return Round(index, results[index], width, self._generations.copy())

    def draft(self) -> None:
        """Block ids → drafted hidden states and base logits, after storing the newly verified context."""
        self._run("draft")

    def refine(self, num_passes: int) -> None:
        """Base logits → verify ids, after ``num_passes`` Jacobi passes."""
        self._run("refine", num_passes)

    def verify(self, current: Round) -> None:
        """Verify ids → the target's tokens, taps and caches at the row's position; then acceptance."""
        self._run("verify", current.index)

    def decode_one(self, current: Round) -> None:
        """Anchor → the target's next token: a round that proposes nothing."""
        self._run("plain", current.index)

    def commit(self) -> None:
        """Make ``accept``'s outputs the state of the next round."""
        buffers = self.buffers
        self.backend.copy(buffers.next_anchor, buffers.anchor)
        self.backend.copy(buffers.next_predecessor, buffers.predecessor)
        self.backend.copy(buffers.next_position, buffers.position)
        self.backend.copy(buffers.next_active, buffers.active)

    def collect(self, oldest: Round) -> Committed:
        """Wait for a round and say what it emitted; a row that was stopped or started since the round began emitted nothing."""
        (accepted, tokens, num_emitted), stage_seconds = oldest.result.report.wait()
        same = oldest.generations == self._generations
        accepted, num_emitted = accepted * same, num_emitted * same
        self._positions += num_emitted
        self._fit_caches(keep=True)
        tokens = tokens.reshape(-1)[: self.num_rows * oldest.width].reshape(self.num_rows, oldest.width)
        return Committed(accepted, tokens, num_emitted, stage_seconds)

    def _fit_caches(self, *, keep: bool) -> None:
        """Give the caches the least multiple of a few hundred rows that holds every row and what its next round may write behind it."""
        if not self.backend.flexible_shapes:
            return
        needed = int(self._positions.max()) + 3 * self.block_size
        rows = min(-(-needed // _CACHE_STEP) * _CACHE_STEP, self.bundle.manifest.cache_rows)
        if rows == self._cache_rows or (keep and rows < self._cache_rows):
            return
        self.buffers.fit_caches(rows, keep=keep)
        self._cache_rows = rows

    # What a log, a parity check or a test may look at.

    def drafts(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """The last block's drafts [B, P-1] before and after refinement."""
        return self.buffers.base_tokens.read(), self.buffers.verify_ids.read()[:, 1:]

    def last_round(self) -> dict[str, NDArray[Any]]:
        """Copies of the last round's tensors: draft hidden [B, P, H], base and refined logits [B, P-1, …], verify logits [B, P, V]."""
        return {
            "hidden": self.buffers.draft_hidden.read(),
            "base_logits": self.buffers.base_logits.read(),
            "refined_logits": self.buffers.refined_logits.read(),
            "verify_logits": self.buffers.logits.read(),
        }

    def cached(self, row: int, length: int) -> dict[str, NDArray[Any]]:
        """Copies of the first ``length`` cache rows of one row, by model and cache name."""
        models = {"target": self.buffers.target_caches, "drafter": self.buffers.drafter_caches}
        return {
            f"{model}.{name}": caches[name].row(row).read()[0, :, :length]
            for model, caches in models.items()
            for name in cache_inputs(caches)
        }

    # Binding.

    def _run(self, step: str, *key: int) -> None:
        bound = self._steps.get((self._cache_rows, step, *key))
        if bound is None:
            try:
                bound = self._steps[(self._cache_rows, step, *key)] = self._bind(step, *key)
            except ValueError as problem:
                raise self._mismatch(problem) from problem
        for program in bound:
            program.run()

    def _bind(self, step: str, *key: int) -> tuple[BoundProgram, ...]:
        buffers, rows = self.buffers, self.num_rows
        match step, key:
            case "prefill", (width, row):
                return (
                    self._bind_embed(buffers.ids, 1, width),
                    self._bind_target(1, width, buffers.prefill_taps, buffers.chunk_start, row),
                )
            case "prefill-drafter", (width, row):
                # The block that the drafter drafts here is discarded, so any ids do; only its context rows are wanted.
                return (
                    self._bind_embed(buffers.block_ids, 1, self.block_size),
                    self._bind_drafter(1, width, buffers.prefill_taps, buffers.chunk_start, buffers.chunk_end, row),
                )
            case "prefill-head", (width,):
                return (self._bind_head(1, width, buffers.last_row, buffers.hidden, buffers.logits, buffers.target_tokens),)
            case "draft", ():
                return (
                    self._bind_embed(buffers.block_ids, rows, self.block_size),
                    self._bind_drafter(rows, self.block_size, buffers.taps, buffers.context_position, buffers.position),
                    self._bind_head(
                        rows, self.block_size, buffers.draft_rows, buffers.draft_hidden, buffers.base_logits, buffers.base_tokens
                    ),
                )
            case "refine", (num_passes,):
                return (self._bind_refiner(num_passes),)
            case "verify", (index,):
                return self._bind_verify(buffers.verify_ids, self.block_size, buffers.verify_rows, buffers.results[index])
            case "plain", (index,):
                return self._bind_verify(buffers.anchor.view(rows, 1), 1, buffers.plain_rows, buffers.results[index])
        raise AssertionError(f"no step {step}{key}")

    def _bind_verify(self, ids: Buffer, width: int, rows: Buffer, result: RoundResult) -> tuple[BoundProgram, ...]:
        buffers, num_rows = self.buffers, self.num_rows
        return (
            self._bind_embed(ids, num_rows, width),
            self._bind_target(num_rows, width, buffers.taps, buffers.position),
            self._bind_head(num_rows, width, rows, buffers.hidden, buffers.logits, buffers.target_tokens),
            self._bind_accept(ids, width, result),
        )

    def _bind_embed(self, ids: Buffer, num_rows: int, width: int) -> BoundProgram:
        embeddings = self._shaped("embed", "embeddings", self.buffers.embeddings, num_rows, width)
        return self._program("embed").bind({"ids": ids.view(num_rows, width), "embeddings": embeddings})

    def _bind_target(self, num_rows: int, width: int, taps: Buffer, position: Buffer, row: int | None = None) -> BoundProgram:
        return self._program("target").bind(
            {
                "embeddings": self._shaped("embed", "embeddings", self.buffers.embeddings, num_rows, width),
                "position": position,
                "hidden": self._shaped("target", "hidden", self.buffers.hidden, num_rows, width),
                "taps": self._shaped("target", "taps", taps, num_rows, width),
                **row_of(self.buffers.target_caches, row),
            }
        )

    def _bind_head(self, num_rows: int, width: int, rows: Buffer, hidden: Buffer, logits: Buffer, tokens: Buffer) -> BoundProgram:
        num_wanted = rows.shape[1]
        return self._program("head").bind(
            {
                "hidden": self._shaped("target", "hidden", hidden, num_rows, width),
                "rows": rows,
                "logits": self._shaped("head", "logits", logits, num_rows, num_wanted),
                "token": tokens.view(num_rows, num_wanted),
            }
        )

    def _bind_drafter(
        self, num_rows: int, width: int, taps: Buffer, context_position: Buffer, block_position: Buffer, row: int | None = None
    ) -> BoundProgram:
        return self._program("drafter").bind(
            {
                "embeddings": self._shaped("embed", "embeddings", self.buffers.embeddings, num_rows, self.block_size),
                "taps": self._shaped("target", "taps", taps, num_rows, width),
                "context_position": context_position,
                "block_position": block_position,
                "hidden": self._shaped("drafter", "hidden", self.buffers.draft_hidden, num_rows, self.block_size),
                **row_of(self.buffers.drafter_caches, row),
            }
        )

    def _bind_refiner(self, num_passes: int) -> BoundProgram:
        program = self._program(f"refiner-k{num_passes}")
        buffers, shortlist = self.buffers, self.bundle.manifest.shortlist
        bound = {
            "hidden": buffers.draft_hidden,
            "base_logits": buffers.base_logits,
            "anchor": buffers.anchor,
            "predecessor": buffers.predecessor,
            "verify_ids": buffers.verify_ids,
        }
        if "refined_logits" in program.outputs:
            scored = shortlist or buffers.base_logits.shape[2]
            bound["refined_logits"] = buffers.refined_logits.view(self.num_rows, self.block_size - 1, scored)
        if "candidates" in program.outputs:
            bound["candidates"] = buffers.candidates.view(*buffers.base_tokens.shape, shortlist)
        return program.bind(bound)

    def _bind_accept(self, ids: Buffer, width: int, result: RoundResult) -> BoundProgram:
        buffers = self.buffers
        return self._program("accept").bind(
            {
                "verify_ids": ids,
                "target_tokens": buffers.target_tokens.view(self.num_rows, width),
                "position": buffers.position,
                "predecessor": buffers.predecessor,
                "active": buffers.active,
                "accepted": result.accepted,
                "tokens": result.tokens.view(self.num_rows, width),
                "num_emitted": result.num_emitted,
                "block_ids": buffers.block_ids,
                "next_anchor": buffers.next_anchor,
                "next_predecessor": buffers.next_predecessor,
                "next_position": buffers.next_position,
                "context_position": buffers.context_position,
                "next_active": buffers.next_active,
            }
        )

    def _program(self, graph: str) -> Program:
        if graph not in self._programs:
            self._programs[graph] = self.backend.load(self.bundle, graph)
        return self._programs[graph]

    def _shaped(self, graph: str, output: str, buffer: Buffer, num_rows: int, width: int) -> Buffer:
        return buffer.view(num_rows, width, fixed(self._program(graph).outputs[output].dims[2]))

    def _mismatch(self, problem: Exception) -> BundleError:
        return BundleError(
            f"{self.bundle.folder}: the graphs are not those that the manifest describes ({problem}); build the bundle again"
        )
