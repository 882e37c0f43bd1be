"""Whether a bundle fits the memory of a GPU, asked before anything is allocated, and what would fit if it does not.

Knows sizes only; knows nothing about devices or engines.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict

from xpress_runtime.backends.cuda import show_bytes
from xpress_runtime.errors import EnvironmentProblem
from xpress_runtime.manifest import Manifest
from xpress_runtime.memory import largest_below, memory_need

logger = logging.getLogger("xpress_runtime.backends")

# What the context, the libraries and the fragments between allocations take beyond what is planned.
_RESERVE_BYTES = 64 << 20


class MemoryPlan:
    """What ``num_rows`` rows of a bundle's graph set need on a device. ``weights`` in bytes, as the backend holds them."""

    def __init__(self, manifest: Manifest, graph_set: str, weights: int, num_rows: int) -> None:
        self._manifest = manifest
        self._graph_set = manifest.graph_set(graph_set)
        self._weights = weights
        self._num_rows = num_rows

    def check(self, free: int, total: int, *, loaded: bool = False, scratch: int = 0) -> None:
        """EnvironmentProblem unless the rest fits into ``free`` bytes. ``loaded``: the weights are on the device by now.

        What some requests add is allocated when they come, so for that there is a warning.
        """
        weights = 0 if loaded else self._weights

        def needed(capacity: int, batch: int) -> Mapping[str, int]:
            need = memory_need(self._manifest, self._graph_set, capacity=capacity, batch=batch)
            return {"weights": weights, "caches": need.target_caches + need.drafter_caches, "buffers": need.working, "scratch": scratch}

        capacity = self._manifest.capacity
        parts = needed(capacity, self._num_rows)
        room = free - _RESERVE_BYTES
        if sum(parts.values()) <= room:
            if not loaded:
                self._warn(room - sum(parts.values()))
            return
        listed = ", ".join(f"{name} {show_bytes(size)}" for name, size in parts.items() if size)
        raise EnvironmentProblem(
            f"capacity {capacity} at batch {self._num_rows} needs {show_bytes(sum(parts.values()))} of GPU memory ({listed}), "
            f"and the GPU has {show_bytes(max(room, 0))} of {show_bytes(total)} to spare; {self._advice(needed, room)}"
        )

    def _warn(self, left: int) -> None:
        added = asdict(memory_need(self._manifest, self._graph_set, batch=self._num_rows).on_demand)
        listed = ", ".join(f"{name.replace('_', ' ')} {show_bytes(size)}" for name, size in added.items() if size > left)
        if listed:
            logger.warning("the GPU has %s left for what requests may add, too little for: %s", show_bytes(left), listed)

    def _advice(self, needed: Callable[[int, int], Mapping[str, int]], room: int) -> str:
        capacity = largest_below(self._manifest.capacity, lambda value: sum(needed(value, self._num_rows).values()), room)
        batch = largest_below(self._num_rows, lambda value: sum(needed(self._manifest.capacity, value).values()), room)
        found = (("capacity", capacity, 2), ("batch", batch, 1))
        advice = [f"a {name} of {value} would fit: build again with --{name} {value}" for name, value, least in found if value >= least]
        return ", or ".join(advice) or "nothing smaller would fit either: end other programs on the GPU, or use a smaller model"
