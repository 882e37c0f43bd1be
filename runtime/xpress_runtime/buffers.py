"""All memory of a plan but its programs: caches, working buffers and the state of the next round, allocated once.

Sizes: B rows, P block size, N cache rows, T taps, V vocabulary, H hidden size. Knows shapes and who shares what; knows nothing about steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xpress_runtime.backends.base import Backend, Buffer, Program, Report, TensorInfo
from xpress_runtime.manifest import CacheShape, Manifest

INT64 = np.dtype(np.int64)

Caches = dict[str, Buffer]


@dataclass(frozen=True)
class RoundResult:
    """What one round in flight leaves for the host: accepted drafts [B], tokens [B, P], their number [B], and the report with them."""

    accepted: Buffer
    tokens: Buffer
    num_emitted: Buffer
    report: Report


class Buffers:
    """The buffers of ``num_rows`` rows. ``programs`` are the loaded graphs by name; their outputs say dtypes and widths."""

    def __init__(self, manifest: Manifest, backend: Backend, programs: Mapping[str, Program], num_rows: int) -> None:
        self._backend = backend
        block_size, num_proposals = manifest.drafter.block_size, manifest.drafter.num_proposals
        chunk = manifest.prefill_chunk
        target = programs["target"].outputs
        hidden, taps, logits = target["hidden"], target["taps"], programs["head"].outputs["logits"]
        working_rows = max(chunk, num_rows * block_size)

        self.target_caches = allocate_caches(backend, manifest.target.caches, programs["target"], num_rows, manifest.cache_rows)
        self.drafter_caches = allocate_caches(backend, manifest.drafter.caches, programs["drafter"], num_rows, manifest.cache_rows)
        # Working memory, wide enough for a prefill chunk of one row and for a block of every row.
        self.ids = self._ids(chunk)
        self.embeddings = self._features(hidden, working_rows)
        self.hidden = self._features(hidden, working_rows)
        # The taps of a round feed the next draft, so a prefill in between must not overwrite them.
        self.taps = self._features(taps, num_rows, block_size)
        self.prefill_taps = self._features(taps, chunk)
        self.draft_hidden = self._features(hidden, num_rows, block_size)
        self.base_logits = self._features(logits, num_rows, num_proposals)
        # What the drafts were chosen from: refined logits, in sampled rounds over the temperature, of the vocabulary or of candidates.
        self.draft_scores = self._features(logits, num_rows, num_proposals)
        self.candidates = self._ids(num_rows * num_proposals * max(*manifest.shortlists, 1))
        self.logits = self._features(logits, num_rows, block_size)
        self.base_tokens = self._ids(num_rows, num_proposals)
        self.target_tokens = self._ids(num_rows, block_size)
        self.draft_rows = self._constant(np.tile(np.arange(1, block_size), (num_rows, 1)))
        self.verify_rows = self._constant(np.tile(np.arange(block_size), (num_rows, 1)))
        self.plain_rows = self._constant(np.zeros((num_rows, 1)))
        self.last_row = self._ids(1, 1)
        self.chunk_start = self._ids(1)
        self.chunk_end = self._ids(1)

        # State of the next round.
        self.block_ids = self._ids(num_rows, block_size)
        self.verify_ids = self._ids(num_rows, block_size)
        self.anchor = self._ids(num_rows)
        self.predecessor = self._ids(num_rows)
        self.position = self._ids(num_rows)
        self.context_position = self._ids(num_rows)
        self.active = self._ids(num_rows)
        # Separate from what they replace: a graph may not read memory that it has already overwritten.
        self.next_anchor = self._ids(num_rows)
        self.next_predecessor = self._ids(num_rows)
        self.next_position = self._ids(num_rows)
        self.next_active = self._ids(num_rows)
        # One for each round in flight: a round that runs must not overwrite what the host still reads of the one before.
        self.results = tuple(self._result(num_rows, block_size) for _ in range(backend.rounds_in_flight))

    def fit(self, caches: Caches, cache_rows: int, *, keep: bool) -> None:
        """Give caches another number of rows within their memory; ``keep`` moves what they hold."""
        for name in cache_inputs(caches):
            caches[name] = caches[_output_name(name)] = self._backend.relayout(caches[name], cache_rows, keep=keep)

    def _result(self, num_rows: int, block_size: int) -> RoundResult:
        accepted, tokens, num_emitted = self._ids(num_rows), self._ids(num_rows, block_size), self._ids(num_rows)
        return RoundResult(accepted, tokens, num_emitted, self._backend.report((accepted, tokens, num_emitted)))

    def _ids(self, *shape: int) -> Buffer:
        return self._backend.allocate(shape, INT64)

    def _constant(self, values: NDArray[Any]) -> Buffer:
        buffer = self._ids(*values.shape)
        buffer.write(values.astype(np.int64))
        return buffer

    def _features(self, info: TensorInfo, *leading: int) -> Buffer:
        return self._backend.allocate((*leading, fixed(info.dims[2])), info.dtype)


def allocate_caches(backend: Backend, shape: CacheShape, program: Program, num_rows: int, cache_rows: int) -> Caches:
    """Key and value caches [num_rows, kv heads, cache_rows, head dim] of every layer, as the graph's inputs and outputs call them."""
    caches: Caches = {}
    for layer in range(shape.num_layers):
        for name in (f"key_cache.{layer}", f"value_cache.{layer}"):
            if name not in program.inputs:
                raise ValueError(f"input {name} is missing")
            info = program.inputs[name]
            # One address as input and as output: the update happens in place.
            caches[name] = caches[_output_name(name)] = backend.allocate(
                (num_rows, fixed(info.dims[1]), cache_rows, fixed(info.dims[3])), info.dtype
            )
    return caches


def cache_inputs(caches: Caches) -> list[str]:
    """The names under which graphs read the caches; each is also there under the name of its output."""
    return [name for name in caches if "_out." not in name]


def row_of(caches: Caches, row: int | None) -> Caches:
    """The caches of one row, or of all."""
    return caches if row is None else {name: buffer.row(row) for name, buffer in caches.items()}


def fixed(dim: int | str) -> int:
    """A dim that every graph of a bundle fixes."""
    assert isinstance(dim, int), f"dim {dim} is fixed when a bundle is built"
    return dim


def _output_name(cache: str) -> str:
    return cache.replace("_cache.", "_cache_out.")
