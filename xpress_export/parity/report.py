"""A parity result in words, and what failed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from xpress_runtime.errors import CheckFailed


def failures(parity: Mapping[str, Any]) -> list[str]:
    """What did not pass in the result of one set, one short phrase each."""
    failed = []
    for name, graph in parity["graphs"].items():
        found = graph["range"]
        if found is not None and not found["passed"]:
            failed.append(f"graph {name}: {overflow(found)}")
        elif not graph["passed"]:
            failed.append(
                f"graph {name} (output {graph['worst_output']}: {shown_error(graph['scaled_error'])}, tolerance {graph['tolerance']:.0e})"
            )
    if not parity["target"]["passed"]:
        failed.append(f"target logits ({shown_error(parity['target']['scaled_error'])})")
    failed += [
        f"generation {entry['mode']}, prompt {entry['prompt']}, token {entry['index']}: {entry['found']} instead of {entry['expected']}"
        for entry in parity["generation"]["divergences"]
        if not entry["tie"]
    ]
    if not parity["generation"]["passed"] and not parity["generation"]["tokens"]:
        failed.append("generation (no token was compared)")
    failed += [
        f"acceptance {mode}: {entry['mean_acceptance_length']:.3f} tokens a round instead of {entry['reference']:.3f} in fp32"
        for mode, entry in parity.get("acceptance", {}).get("modes", {}).items()
        if not entry["passed"]
    ]
    return failed


def overflow(found: Mapping[str, Any]) -> str:
    """A value range that was left: where, by what, and what to do."""
    place = " ".join(part for part in (found["operator"], "in " + found["module"] if found["module"] else "") if part)
    size = "no finite number" if found["largest"] == sys.float_info.max else f"{found['largest']:.3g}"
    return f"{place} reaches {size}, beyond {found['limit']:.5g} ({found['not_finite']} values overflow); build with --precision bf16"


def shown_error(error: float) -> str:
    """An error for a reader; the largest float stands for what has no size: other ids, another shape, not a number."""
    return "different" if error == sys.float_info.max else f"{error:.1e}"


def require_passed(parity: Mapping[str, Mapping[str, Any]]) -> None:
    """CheckFailed with everything that did not pass in any of the sets."""
    failed = [f"{name}: {'; '.join(failures(result))}" for name, result in parity.items() if not result["passed"]]
    if failed:
        raise CheckFailed("parity failed: " + "; ".join(failed))
