"""The buffers of a bundle and its graphs bound to them: one method per step of a round.

A round is a closed dataflow over fixed memory: what one graph writes is where the next one reads, and ``accept`` writes the state from
which the next round starts. This module moves tensors; it decides nothing about prompts, stopping or statistics.

Sizes: B rows, P block size, N cache rows, T taps, V vocabulary, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xpress_runtime.backends.base import Backend, BoundProgram, Buffer, Program, TensorInfo
from xpress_runtime.bundle import Bundle
from xpress_runtime.errors import BundleError
from xpress_runtime.manifest import CacheShape

_INT64 = np.dtype(np.int64)
# Flexible caches grow by this many rows, up to the bundle's.
_CACHE_STEP = 256


@dataclass(frozen=True)
class Committed:
    """What a round emitted, per row: the number of accepted drafts [B], the emitted tokens [B, W] and how many of them count [B]."""

    accepted: NDArray[Any]
    tokens: NDArray[Any]
    num_emitted: NDArray[Any]


class Plan:
    """Everything that generation touches for ``num_rows`` rows, allocated once. Refiners are loaded when a loop asks."""

    def __init__(self, bundle: Bundle, backend: Backend, num_rows: int = 1) -> None:
        manifest = bundle.manifest
        self.bundle = bundle
        self.backend = backend
        self.num_rows = num_rows
        self.block_size = manifest.drafter.block_size
        self.mask_token_id = manifest.drafter.mask_token_id
        self.prefill_chunk = manifest.prefill_chunk
        self._programs: dict[str, Program] = {}
        self._steps: dict[tuple[Any, ...], tuple[BoundProgram, ...]] = {}

        self.load("embed", "target", "head", "drafter", "accept")
        target, drafter = self._program("target"), self._program("drafter")
        working_rows = max(self.prefill_chunk, num_rows * self.block_size)
        hidden, taps = target.outputs["hidden"], target.outputs["taps"]
        logits = self._program("head").outputs["logits"]
        num_proposals = self.block_size - 1

        self._target_caches = self._caches(manifest.target.caches, target)
        self._drafter_caches = self._caches(manifest.drafter.caches, drafter)
        self._cache_rows = manifest.cache_rows
        # Where each row stands, as far as the host knows; what a round may write behind it must fit the caches.
        self._positions = np.zeros(num_rows, np.int64)
        self._running = np.zeros(num_rows, np.bool_)
        # Working memory, wide enough for a prefill chunk of one row and for a block of every row.
        self._ids = self._allocate(_INT64, self.prefill_chunk)
        self._embeddings = self._features(hidden, working_rows)
        self._hidden = self._features(hidden, working_rows)
        # The taps of a round feed the next draft, so a prefill in between must not overwrite them.
        self._taps = self._features(taps, num_rows, self.block_size)
        self._prefill_taps = self._features(taps, self.prefill_chunk)
        self._draft_hidden = self._features(hidden, num_rows, self.block_size)
        self._base_logits = self._features(logits, num_rows, num_proposals)
        self._refined_logits = self._features(logits, num_rows, num_proposals)
        self._candidates = self._allocate(_INT64, num_rows * num_proposals * max(manifest.shortlist, 1))
        self._logits = self._features(logits, num_rows, self.block_size)
        self._base_tokens = self._allocate(_INT64, num_rows, num_proposals)
        self._target_tokens = self._allocate(_INT64, num_rows, self.block_size)
        self._tokens = self._allocate(_INT64, num_rows, self.block_size)
        self._draft_rows = self._constant(np.tile(np.arange(1, self.block_size), (num_rows, 1)))
        self._verify_rows = self._constant(np.tile(np.arange(self.block_size), (num_rows, 1)))
        self._plain_rows = self._constant(np.zeros((num_rows, 1)))
        self._last_row = self._allocate(_INT64, 1, 1)
        self._chunk_start = self._allocate(_INT64, 1)
        self._chunk_end = self._allocate(_INT64, 1)

        # State of the next round.
        self.block_ids = self._allocate(_INT64, num_rows, self.block_size)
        self.verify_ids = self._allocate(_INT64, num_rows, self.block_size)
        self.anchor = self._allocate(_INT64, num_rows)
        self.predecessor = self._allocate(_INT64, num_rows)
        self.position = self._allocate(_INT64, num_rows)
        self.context_position = self._allocate(_INT64, num_rows)
        self.active = self._allocate(_INT64, num_rows)
        self._accepted = self._allocate(_INT64, num_rows)
        self._num_emitted = self._allocate(_INT64, num_rows)
        # Separate from what they replace: a graph may not read memory that it has already overwritten.
        self._next_anchor = self._allocate(_INT64, num_rows)
        self._next_predecessor = self._allocate(_INT64, num_rows)
        self._next_position = self._allocate(_INT64, num_rows)
        self._next_active = self._allocate(_INT64, num_rows)

    def load(self, *graphs: str) -> None:
        """Load graphs now: a first round that does it would be slow, and may find a bundle that was replaced since it was opened."""
        for graph in graphs:
            self._program(graph)

    # Steps. Each runs on every row; an inactive row computes garbage behind its position and is changed by none of them.

    def prefill(self, row: int, tokens: NDArray[np.int64], *, with_drafter: bool) -> int:
        """Run a prompt of one row through the target (and the drafter's context) in chunks; returns the target's next token."""
        others_run = bool(np.delete(self._running, row).any())
        for start in range(0, len(tokens), self.prefill_chunk):
            chunk = tokens[start : start + self.prefill_chunk]
            self._positions[row] = start + len(chunk)
            self._fit_caches(keep=others_run or start > 0)
            self._ids.view(1, len(chunk)).write(chunk[None])
            self._chunk_start.write(np.array([start]))
            self._chunk_end.write(np.array([start + len(chunk)]))
            self._run("prefill", len(chunk), row)
            if with_drafter:
                self._run("prefill-drafter", len(chunk), row)
        self._last_row.write(np.array([[(len(tokens) - 1) % self.prefill_chunk]]))
        self._run("prefill-head", len(chunk))
        return int(self._target_tokens.view(1, 1).read()[0, 0])

    def start(self, row: int, anchor: int, predecessor: int, position: int) -> None:
        """Set a row's state for its first round: ``anchor`` stands at ``position`` and is not cached, ``predecessor`` stands before it."""
        self._positions[row] = position
        self._running[row] = True
        block = np.full((1, self.block_size), self.mask_token_id, np.int64)
        block[0, 0] = anchor
        self.block_ids.row(row).write(block)
        for buffer, value in (
            (self.anchor, anchor),
            (self.predecessor, predecessor),
            (self.position, position),
            (self.context_position, position),
            (self.active, 1),
        ):
            buffer.row(row).write(np.array([value]))

    def stop(self, row: int) -> None:
        """Freeze a row: it takes part in no further round, and its part of the caches is free."""
        self._running[row] = False
        # To the front, where what it still computes needs no room.
        self._positions[row] = 0
        for buffer in (self.active, self.position, self.context_position):
            buffer.row(row).write(np.array([0]))

    def draft(self) -> None:
        """Block ids → drafted hidden states and base logits, after storing the newly verified context."""
        self._run("draft")

    def refine(self, num_passes: int) -> None:
        """Base logits → verify ids, after ``num_passes`` Jacobi passes."""
        self._run("refine", num_passes)

    def verify(self) -> None:
        """Verify ids → the target's tokens, taps and caches at the row's position; then acceptance."""
        self._run("verify")

    def decode_one(self) -> None:
        """Anchor → the target's next token: a round that proposes nothing."""
        self._run("plain")

    def commit(self, width: int) -> Committed:
        """Make ``accept``'s outputs the state of the next round; returns what was emitted. ``width`` is the number of verified slots."""
        self.backend.copy(self._next_anchor, self.anchor)
        self.backend.copy(self._next_predecessor, self.predecessor)
        self.backend.copy(self._next_position, self.position)
        self.backend.copy(self._next_active, self.active)
        self.backend.synchronise()
        committed = Committed(self._accepted.read(), self._tokens.view(self.num_rows, width).read(), self._num_emitted.read())
        self._positions += committed.num_emitted
        self._fit_caches(keep=True)
        return committed

    def _fit_caches(self, *, keep: bool) -> None:
        """Give the caches the least multiple of a few hundred rows that holds every row and what its next round may write behind it."""
        if not self.backend.flexible_caches:
            return
        needed = int(self._positions.max()) + 3 * self.block_size
        rows = min(-(-needed // _CACHE_STEP) * _CACHE_STEP, self.bundle.manifest.cache_rows)
        if rows == self._cache_rows or (keep and rows < self._cache_rows):
            return
        for caches in (self._target_caches, self._drafter_caches):
            for name in [name for name in caches if "_out." not in name]:
                cache = self.backend.relayout(caches[name], rows, keep=keep)
                caches[name] = caches[name.replace("_cache.", "_cache_out.")] = cache
        self._cache_rows = rows

    # What a log, a parity check or a test may look at.

    def drafts(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """The last block's drafts [B, P-1] before and after refinement."""
        return self._base_tokens.read(), self.verify_ids.read()[:, 1:]

    def last_round(self) -> dict[str, NDArray[Any]]:
        """Copies of the last round's tensors: draft hidden [B, P, H], base and refined logits [B, P-1, …], verify logits [B, P, V]."""
        return {
            "hidden": self._draft_hidden.read(),
            "base_logits": self._base_logits.read(),
            "refined_logits": self._refined_logits.read(),
            "verify_logits": self._logits.read(),
        }

    def cached(self, row: int, length: int) -> dict[str, NDArray[Any]]:
        """Copies of the first ``length`` cache rows of one row, by model and cache name."""
        models = {"target": self._target_caches, "drafter": self._drafter_caches}
        return {
            f"{model}.{name}": cache.row(row).read()[0, :, :length]
            for model, caches in models.items()
            for name, cache in caches.items()
            if "_out." not in name
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
        match step, key:
            case "prefill", (width, row):
                return self._bind_prefill(width, row)
            case "prefill-drafter", (width, row):
                # The block that the drafter drafts here is discarded; only its context rows are wanted.
                return (
                    self._bind_embed(self.block_ids.row(row), 1, self.block_size),
                    self._bind_drafter(1, width, self._prefill_taps, self._chunk_start, self._chunk_end, row),
                )
            case "prefill-head", (width,):
                return (self._bind_head(1, width, self._last_row, self._hidden, self._logits, self._target_tokens),)
            case "draft", ():
                rows = self.num_rows
                return (
                    self._bind_embed(self.block_ids, rows, self.block_size),
                    self._bind_drafter(rows, self.block_size, self._taps, self.context_position, self.position),
                    self._bind_head(rows, self.block_size, self._draft_rows, self._draft_hidden, self._base_logits, self._base_tokens),
                )
            case "refine", (num_passes,):
                return (self._bind_refiner(num_passes),)
            case "verify", ():
                return self._bind_verify(self.verify_ids, self.block_size, self._verify_rows)
            case "plain", ():
                return self._bind_verify(self.anchor.view(self.num_rows, 1), 1, self._plain_rows)
        raise AssertionError(f"no step {step}{key}")

    def _bind_prefill(self, width: int, row: int) -> tuple[BoundProgram, ...]:
        return (self._bind_embed(self._ids, 1, width), self._bind_target(1, width, self._prefill_taps, self._chunk_start, row))

    def _bind_verify(self, ids: Buffer, width: int, rows: Buffer) -> tuple[BoundProgram, ...]:
        num_rows = self.num_rows
        return (
            self._bind_embed(ids, num_rows, width),
            self._bind_target(num_rows, width, self._taps, self.position),
            self._bind_head(num_rows, width, rows, self._hidden, self._logits, self._target_tokens),
            self._bind_accept(ids, width),
        )

    def _bind_embed(self, ids: Buffer, num_rows: int, width: int) -> BoundProgram:
        embeddings = self._shaped("embed", "embeddings", self._embeddings, num_rows, width)
        return self._program("embed").bind({"ids": ids.view(num_rows, width), "embeddings": embeddings})

    def _bind_target(self, num_rows: int, width: int, taps: Buffer, position: Buffer, row: int | None = None) -> BoundProgram:
        return self._program("target").bind(
            {
                "embeddings": self._shaped("embed", "embeddings", self._embeddings, num_rows, width),
                "position": position,
                "hidden": self._shaped("target", "hidden", self._hidden, num_rows, width),
                "taps": self._shaped("target", "taps", taps, num_rows, width),
                **_row_of(self._target_caches, row),
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
                "embeddings": self._shaped("embed", "embeddings", self._embeddings, num_rows, self.block_size),
                "taps": self._shaped("target", "taps", taps, num_rows, width),
                "context_position": context_position,
                "block_position": block_position,
                "hidden": self._shaped("drafter", "hidden", self._draft_hidden, num_rows, self.block_size),
                **_row_of(self._drafter_caches, row),
            }
        )

    def _bind_refiner(self, num_passes: int) -> BoundProgram:
        name = f"refiner-k{num_passes}"
        program = self._program(name)
        buffers = {
            "hidden": self._draft_hidden,
            "base_logits": self._base_logits,
            "anchor": self.anchor,
            "predecessor": self.predecessor,
            "verify_ids": self.verify_ids,
        }
        if "refined_logits" in program.outputs:
            scored = self.bundle.manifest.shortlist or self._base_logits.shape[2]
            buffers["refined_logits"] = self._refined_logits.view(self.num_rows, self.block_size - 1, scored)
        if "candidates" in program.outputs:
            buffers["candidates"] = self._candidates.view(*self._base_tokens.shape, self.bundle.manifest.shortlist)
        return program.bind(buffers)

    def _bind_accept(self, ids: Buffer, width: int) -> BoundProgram:
        return self._program("accept").bind(
            {
                "verify_ids": ids,
                "target_tokens": self._target_tokens.view(self.num_rows, width),
                "position": self.position,
                "predecessor": self.predecessor,
                "active": self.active,
                "accepted": self._accepted,
                "tokens": self._tokens.view(self.num_rows, width),
                "num_emitted": self._num_emitted,
                "block_ids": self.block_ids,
                "next_anchor": self._next_anchor,
                "next_predecessor": self._next_predecessor,
                "next_position": self._next_position,
                "context_position": self.context_position,
                "next_active": self._next_active,
            }
        )

    def _mismatch(self, problem: Exception) -> BundleError:
        return BundleError(
            f"{self.bundle.folder}: the graphs are not those that the manifest describes ({problem}); build the bundle again"
        )

    # Allocation.

    def _program(self, graph: str) -> Program:
        if graph not in self._programs:
            self._programs[graph] = self.backend.load(self.bundle.graph_path(self.backend.graph_set, graph))
        return self._programs[graph]

    def _allocate(self, dtype: np.dtype[Any], *shape: int) -> Buffer:
        return self.backend.allocate(shape, dtype)

    def _constant(self, values: NDArray[Any]) -> Buffer:
        buffer = self._allocate(_INT64, *values.shape)
        buffer.write(values.astype(np.int64))
        return buffer

    def _features(self, info: TensorInfo, *leading: int) -> Buffer:
        return self._allocate(info.dtype, *leading, _fixed(info.dims[2]))

    def _shaped(self, graph: str, output: str, buffer: Buffer, num_rows: int, width: int) -> Buffer:
        return buffer.view(num_rows, width, _fixed(self._program(graph).outputs[output].dims[2]))

    def _caches(self, shape: CacheShape, program: Program) -> dict[str, Buffer]:
        caches = {}
        for layer in range(shape.num_layers):
            for kind in ("key_cache", "value_cache"):
                name = f"{kind}.{layer}"
                if name not in program.inputs:
                    raise self._mismatch(KeyError(name))
                info = program.inputs[name]
                heads, head_dim = _fixed(info.dims[1]), _fixed(info.dims[3])
                buffer = self._allocate(info.dtype, self.num_rows, heads, self.bundle.manifest.cache_rows, head_dim)
                # One address as input and as output: the update happens in place.
                caches[name] = caches[f"{kind}_out.{layer}"] = buffer
        return caches


def _row_of(caches: dict[str, Buffer], row: int | None) -> dict[str, Buffer]:
    return caches if row is None else {name: buffer.row(row) for name, buffer in caches.items()}


def _fixed(dim: int | str) -> int:
    assert isinstance(dim, int), f"dim {dim} is fixed when a bundle is built"
    return dim
