"""How much memory a bundle needs, from its manifest alone.

What a backend adds (its own code, prepacked weights while loading, scratch memory of operators) is measured, not planned: the README has
the figures.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import asdict, dataclass

from xpress_runtime.manifest import GraphSet, Manifest
from xpress_runtime.sets import Precision

# Logits, and whatever is as wide as the vocabulary: fp32 in every precision.
_LOGIT_BYTES = 4
_ID_BYTES = 8


@dataclass(frozen=True)
class OnDemandNeed:
    """Bytes that a plan allocates when a request first asks for them, and then keeps.

    ``sampling``: a temperature or penalties. ``denoising``: several draft steps. ``lookup``: that drafter. ``backlog``: speculation "auto"
    with the block drafter; several rows that share rounds have it from the start. ``draft_model``: caches and working buffers of the
    autoregressive drafter; 0 where the bundle has none.
    """

    sampling: int
    denoising: int
    lookup: int
    backlog: int
    draft_model: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes at a capacity and a batch: weights as on disk, key and value caches, and the loop's working buffers.

    The total is what a plan takes when it is made, ``on_demand`` beside it. Weights are those of every graph, whether a request needs it or
    not.
    """

    weights: int
    target_caches: int
    drafter_caches: int
    working: int
    on_demand: OnDemandNeed

    @property
    def total(self) -> int:
        return self.weights + self.target_caches + self.drafter_caches + self.working


def memory_need(
    manifest: Manifest, graph_set: GraphSet, *, capacity: int | None = None, batch: int = 1, weights: int | None = None
) -> MemoryNeed:
    """What ``graph_set`` needs for ``batch`` rows of ``capacity`` tokens (default: the bundle's own).

    ``weights`` in bytes where they are not those of the graphs' files, as with engines.
    """
    element = Precision(graph_set.precision).element_bytes
    overhang = manifest.cache_rows - manifest.capacity
    cache_rows = (manifest.capacity if capacity is None else capacity) + overhang
    target, drafter, chunk = manifest.target, manifest.drafter, manifest.prefill_chunk
    folder = f"graphs/{graph_set.name}/"
    num_slots, num_proposals = batch * drafter.block_size, batch * drafter.num_proposals
    taps_size = len(drafter.tap_layers) * target.hidden_size
    # Embeddings and hidden states of the widest call, the block's hidden states, taps of the prompt and of a round.
    features = (2 * max(chunk, num_slots) + num_slots) * target.hidden_size + (chunk + num_slots) * taps_size
    # Of the target over a block, and of the drafter before and after refinement.
    logits = (num_slots + 2 * num_proposals) * target.vocab_size
    return MemoryNeed(
        weights=sum(record.bytes for name, record in manifest.files.items() if name.startswith(folder)) if weights is None else weights,
        target_caches=element * target.caches.elements(batch, cache_rows),
        drafter_caches=element * drafter.caches.elements(batch, cache_rows),
        working=element * features + _LOGIT_BYTES * logits + _ID_BYTES * num_proposals * max(manifest.shortlists),
        on_demand=_on_demand(manifest, element, cache_rows, batch),
    )


def _on_demand(manifest: Manifest, element: int, cache_rows: int, batch: int) -> OnDemandNeed:
    target, drafter, chunk = manifest.target, manifest.drafter, manifest.prefill_chunk
    num_slots, num_proposals = batch * drafter.block_size, batch * drafter.num_proposals
    drafted_logits = _LOGIT_BYTES * num_proposals * target.vocab_size
    # Three numbers for every token and row, the same of the prompt that is read, and the target's logits on their way, twice.
    sampling = _LOGIT_BYTES * target.vocab_size * (3 * batch + 3 + 2 * num_slots)
    draft_model = 0
    if manifest.draft_model is not None:
        record = manifest.draft_model
        working = element * 2 * max(chunk, 2 * batch) * record.hidden_size + _LOGIT_BYTES * batch * record.vocab_size + 2 * drafted_logits
        draft_model = element * record.caches.elements(batch, cache_rows) + working
    return OnDemandNeed(
        sampling=sampling if manifest.sampling else 0,
        # Twice, here and in lookup: what a step reads and what it writes.
        denoising=2 * (element * num_slots * target.hidden_size + drafted_logits),
        lookup=2 * _ID_BYTES * batch * cache_rows,
        # Beside what waits, rows that share rounds have taps of plain ones.
        backlog=element * batch * (backlog_rows(chunk, drafter.block_size) + (batch > 1)) * len(drafter.tap_layers) * target.hidden_size,
        draft_model=draft_model,
    )


def backlog_rows(prefill_chunk: int, block_size: int) -> int:
    """Rows of taps that wait for the drafter while a sequence is decoded plainly: what a call of the drafter takes anyway."""
    return max(prefill_chunk, block_size)


def largest_below(limit: int, size: Callable[[int], int], room: int) -> int:
    """The largest number below ``limit`` whose size is at most ``room``, or 0; sizes grow with the number."""
    return bisect.bisect_right(range(1, limit), room, key=size)
