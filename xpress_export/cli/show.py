"""How results are shown on a terminal: statistics, sizes and tables."""

from __future__ import annotations

from collections.abc import Sequence

from xpress_runtime.engines import EngineManifest
from xpress_runtime.generation import GenerationResult
from xpress_runtime.stats import Stage


def stats_lines(result: GenerationResult) -> list[str]:
    """Acceptance and times of a generation, one figure group a line."""
    stats = result.stats
    prefill_ms, host_ms = 1e3 * stats.prefill_seconds, 1e3 * stats.host_seconds
    seed = "" if stats.seed is None else f"; seed {stats.seed}"
    lines = [f"tokens: {stats.prompt_tokens} in, {stats.output_tokens} out ({result.finish_reason}); prefill {prefill_ms:.0f} ms{seed}"]
    if not stats.rounds:
        return lines
    if stats.num_proposals:
        share = "nothing was proposed"
        if stats.acceptance_rate is not None:
            positions = " ".join(f"{accepted:.2f}" for accepted in stats.acceptance_by_position)
            share = f"{stats.accepted} of {stats.proposed} proposals ({stats.acceptance_rate:.1%}), by position as verified {positions}"
        lines.append(f"acceptance: {share}; mean acceptance length {stats.mean_acceptance_length:.2f} over {stats.rounds} rounds")
    if stats.speculation == "auto":
        widths = ", ".join(f"{count} with {width}" if width else f"{count} plain" for width, count in stats.width_counts.items())
        lines.append(f"rounds by proposals verified: {widths}")
    stages = ", ".join(f"{stage.value} {1e3 * stats.stage_seconds[stage]:.0f}" for stage in (Stage.DRAFT, Stage.REFINE, Stage.VERIFY))
    lines.append(f"time: {stats.ms_per_token:.1f} ms per token, {stats.tokens_per_second:.1f} tokens/s; {stages}, host {host_ms:.0f} ms")
    return lines


def engine_lines(manifest: EngineManifest) -> list[str]:
    """What the engines of one kind are, and one line for each."""
    profile = manifest.profile
    calls = ", ".join(f"{name} {rows} × {tokens}" for name, (rows, tokens) in profile.calls.items())
    peak = "" if manifest.peak_build_bytes is None else f", peak memory {size(manifest.peak_build_bytes)}"
    rows = [
        [name, size(engine.bytes), str(engine.num_layers), str(len(engine.profiles)), f"{engine.build_seconds:.1f}"]
        for name, engine in manifest.engines.items()
    ]
    return [
        f"engines {manifest.kind} of {manifest.graph_set}, {manifest.builder} {manifest.builder_version}",
        f"  compute capabilities {', '.join(manifest.compute_capabilities)}",
        f"  profiles {calls} (rows × tokens), layout {profile.layout}; capacity {profile.capacity}",
        f"  {size(manifest.bytes)}, built in {manifest.build_seconds:.0f} s{peak}",
        table(["graph", "engine", "layers", "ranges of shapes", "seconds"], rows),
    ]


def size(num_bytes: float) -> str:
    """Bytes for a reader: 12.3 MB."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.2f} GB"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Numbers to the right, everything else to the left."""
    lines = [header, *rows]
    columns = range(len(header))
    widths = [max(len(line[column]) for line in lines) for column in columns]
    numeric = [all(row[column][:1] in "0123456789-" for row in rows) for column in columns]

    def show(line: Sequence[str]) -> str:
        cells = [line[i].rjust(widths[i]) if numeric[i] else line[i].ljust(widths[i]) for i in columns]
        return "  ".join(cells).rstrip()

    return "\n".join([show(header), "  ".join("-" * width for width in widths), *(show(row) for row in rows)])
