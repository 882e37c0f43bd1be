"""A parity result in words, and what failed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xpress_runtime.errors import CheckFailed


def failures(parity: Mapping[str, Any]) -> list[str]:
    """What did not pass, one short phrase each."""
    failed = [
        f"graph {name} (error {graph['scaled_error']:.1e}, tolerance {parity['tolerance']:.0e})"
        for name, graph in parity["graphs"].items()
        if not graph["passed"]
    ]
    if not parity["target"]["passed"]:
        failed.append(f"target logits (error {parity['target']['scaled_error']:.1e})")
    failed += [
        f"generation {entry['mode']}, prompt {entry['prompt']}, token {entry['index']}: {entry['found']} instead of {entry['expected']}"
        for entry in parity["generation"]["divergences"]
        if not entry["tie"]
    ]
    if not parity["generation"]["passed"] and not parity["generation"]["tokens"]:
        failed.append("generation (no token was compared)")
    return failed


def require_passed(parity: Mapping[str, Any]) -> None:
    """CheckFailed with everything that did not pass."""
    if not parity["passed"]:
        raise CheckFailed("parity failed: " + "; ".join(failures(parity)))
