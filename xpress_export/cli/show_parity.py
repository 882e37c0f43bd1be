"""The parity result of one graph set for a reader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xpress_export.cli.show import table
from xpress_export.parity.report import overflow, shown_error

Entry = Mapping[str, Any]


def shown_parity(parity: Entry) -> str:
    """Tables and lines: errors, value ranges, generation with its divergences, acceptance."""
    rows = [_error_row(name, graph, graph["tolerance"], _agreement(graph["ids"])) for name, graph in parity["graphs"].items()]
    target = parity["target"]
    rows.append(
        _error_row("target / transformers", target, parity["tolerance"], f"{target['argmax']['agreeing']}/{target['argmax']['rows']}")
    )
    lines = [
        f"{parity['graph_set']}, compared in {parity['compared_in']}",
        table(["compared with PyTorch", "largest error", "relative", "allowed", "same choices", "result"], rows),
    ]
    lines += _ties(parity["graphs"]["head"]["ids"])
    lines += _ranges(parity["graphs"])
    generation = parity["generation"]
    if "not_compared" not in generation:
        lines.append(
            f"generation / transformers: {generation['tokens']} tokens equal over {generation['prompts']} prompts in modes "
            f"{', '.join(generation['modes'])}: {_verdict(generation)}"
        )
    lines += [
        f"  {entry['mode']}, prompt {entry['prompt']}, token {entry['index']}: {entry['found']} instead of {entry['expected']}, "
        f"margin {entry['margin']:.2e}, logit error {entry['logit_error']:.2e}: {'tie' if entry['tie'] else 'different'}"
        for entry in generation["divergences"]
    ]
    return "\n".join([*lines, *_acceptance(parity.get("acceptance", {}))])


def _error_row(name: str, entry: Entry, allowed: float, agreement: str) -> list[str]:
    errors = [shown_error(entry["max_abs_error"]), shown_error(entry["scaled_error"]), f"{allowed:.1e}"]
    return [name, *errors, agreement, _verdict(entry)]


def _agreement(ids: Entry | None) -> str:
    """How often the graph chose as the reference did, of all choices that could be compared; and those that a near tie changed."""
    if ids is None:
        return ""
    ties = f" + {ids['near_ties']} near ties" if ids["near_ties"] else ""
    return f"{ids['agreeing']}/{ids['rows'] - ids['not_comparable']}{ties}"


def _ties(ids: Entry | None) -> list[str]:
    if ids is None:
        return []
    return [f"head: two best logits equal in {ids['equal_best']} of {ids['rows']} rows, closer than the error in {ids['close_best']}"]


def _ranges(graphs: Entry) -> list[str]:
    ranges = {name: graph["range"] for name, graph in graphs.items() if graph["range"]}
    if not ranges:
        return []
    rows = [
        [
            name,
            f"{found['largest']:.5g}",
            f"{found['operator']} {found['module']}",
            f"{found['headroom']:.3g}",
            ", ".join(graphs[name]["fp32"]),
        ]
        for name, found in ranges.items()
    ]
    lines = ["", table(["range", "largest value", "of", "headroom", "in fp32"], rows)]
    return lines + [f"graph {name}: {overflow(found)}" for name, found in ranges.items() if not found["passed"]]


def _acceptance(acceptance: Entry) -> list[str]:
    if "not_compared" in acceptance:
        return [f"generation and acceptance: not compared ({acceptance['not_compared']})"]
    return [
        f"acceptance {mode}: {entry['mean_acceptance_length']:.3f} tokens a round, fp32 {entry['reference']:.3f}, "
        f"over the {entry['tokens']} tokens that both made: {_verdict(entry)}"
        for mode, entry in acceptance.get("modes", {}).items()
        if entry["rounds"] and entry["reference_rounds"]
    ]


def _verdict(entry: Entry) -> str:
    if not entry["passed"]:
        return "FAILED"
    return "ok" if entry.get("conclusive", True) else "ok, too many near ties to compare most choices"
