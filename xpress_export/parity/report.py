"""A parity result in words, and what failed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from xpress_runtime.errors import CheckFailed


def failures(parity: Mapping[str, Any]) -> list[str]:
    """What did not pass, one short phrase each."""
    failed = [
        f"graph {name} (output {graph['worst_output']}: {shown_error(graph['scaled_error'])}, tolerance {parity['tolerance']:.0e})"
        for name, graph in parity["graphs"].items()
        if not graph["passed"]
    ]
    if not parity["target"]["passed"]:
        failed.append(f"target logits ({shown_error(parity['target']['scaled_error'])})")
    failed += [
        f"generation {entry['mode']}, prompt {entry['prompt']}, token {entry['index']}: {entry['found']} instead of {entry['expected']}"
        for entry in parity["generation"]["divergences"]
        if not entry["tie"]
    ]
    if not parity["generation"]["passed"] and not parity["generation"]["tokens"]:
        failed.append("generation (no token was compared)")
    return failed


def shown_error(error: float) -> str:
    """An error for a reader; the largest float stands for what has no size: other ids, another shape, not a number."""
    return "different" if error == sys.float_info.max else f"{error:.1e}"


def require_passed(parity: Mapping[str, Any]) -> None:
    """CheckFailed with everything that did not pass."""
    if not parity["passed"]:
        raise CheckFailed("parity failed: " + "; ".join(failures(parity)))
