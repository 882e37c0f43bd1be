"""The target's graphs against transformers: logits of a text that is fed in a prompt, blocks and single tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xpress_export.parity.compare import ArgmaxComparison, ArrayComparison, compare_argmax, compare_arrays
from xpress_export.parity.runner import Arrays, Runner, int64
from xpress_runtime.manifest import Manifest


@dataclass(frozen=True)
class TargetComparison:
    """Logits of every position."""

    logits: ArrayComparison
    argmax: ArgmaxComparison

    def passed(self, tolerance: float) -> bool:
        return self.logits.within(tolerance)

    def to_json(self, tolerance: float) -> dict[str, Any]:
        return {"passed": self.passed(tolerance), **self.logits.to_json(), "argmax": self.argmax.to_json()}


def compare_target(found: NDArray[Any], reference: NDArray[Any]) -> TargetComparison:
    """Compare logits [S, V]."""
    return TargetComparison(compare_arrays(found, reference), compare_argmax(found, reference))


def target_logits(runner: Runner, manifest: Manifest, tokens: Sequence[int]) -> NDArray[np.float32]:
    """Logits [S, V] of a sequence through ``embed``, ``target`` and ``head``, in calls of the widths that a generation uses."""
    shape = manifest.target.caches
    cache = np.zeros((1, shape.num_kv_heads, runner.cache_rows(len(tokens)), shape.head_dim), np.float32)
    caches: Arrays = {f"{kind}_cache.{layer}": cache for kind in ("key", "value") for layer in range(shape.num_layers)}
    logits = []
    position = 0
    for width in _widths(len(tokens), manifest):
        ids = int64([tokens[position : position + width]])
        dims = {"batch": 1, "tokens": width, "rows": width}
        embeddings = runner.run("embed", {"ids": ids}, dims)["embeddings"]
        outputs = runner.run("target", {"embeddings": embeddings, "position": int64([position]), **caches}, dims)
        caches = {name.replace("_cache_out.", "_cache."): array for name, array in outputs.items() if "_cache_out." in name}
        logits.append(runner.run("head", {"hidden": outputs["hidden"], "rows": int64([range(width)])}, dims)["logits"][0])
        position += width
    return np.concatenate(logits)


def _widths(length: int, manifest: Manifest) -> list[int]:
    """Prompt chunks over the first half, then blocks, then a single token."""
    widths: list[int] = []
    for width, until in ((manifest.prefill_chunk, (length + 1) // 2), (manifest.drafter.block_size, length - 1), (1, length)):
        while (done := sum(widths)) < until:
            widths.append(min(width, until - done))
    return widths
