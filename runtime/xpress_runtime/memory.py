"""How much memory a bundle needs, from its manifest alone.

What a backend adds (its own code, prepacked weights while loading, scratch memory of operators) is measured, not planned: the README has
the figures.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass

from xpress_runtime.manifest import GraphSet, Manifest
from xpress_runtime.sets import Precision

# Base logits, refined logits and verify logits: fp32 in every precision.
_LOGIT_BYTES = 4


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes at a capacity and a batch: weights as on disk, key and value caches, and the loop's working buffers."""

    weights: int
    target_caches: int
    drafter_caches: int
    working: int

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
    target, drafter = manifest.target, manifest.drafter
    folder = f"graphs/{graph_set.name}/"
    num_slots = batch * (drafter.block_size + 2 * drafter.num_proposals)
    features = (2 + len(drafter.tap_layers)) * target.hidden_size
    feature_rows = max(manifest.prefill_chunk, batch * drafter.block_size) + batch * drafter.block_size
    return MemoryNeed(
        weights=sum(record.bytes for name, record in manifest.files.items() if name.startswith(folder)) if weights is None else weights,
        target_caches=element * target.caches.elements(batch, cache_rows),
        drafter_caches=element * drafter.caches.elements(batch, cache_rows),
        working=_LOGIT_BYTES * num_slots * target.vocab_size + element * feature_rows * features,
    )


def backlog_rows(prefill_chunk: int, block_size: int) -> int:
    """Rows of taps that wait for the drafter while a sequence is decoded plainly: what a call of the drafter takes anyway."""
    return max(prefill_chunk, block_size)


def largest_below(limit: int, size: Callable[[int], int], room: int) -> int:
    """The largest number below ``limit`` whose size is at most ``room``, or 0; sizes grow with the number."""
    return bisect.bisect_right(range(1, limit), room, key=size)
