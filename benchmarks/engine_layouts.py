"""What optimization profiles cost: size, build time and peak memory of one graph's engine in every layout of its profiles.

    python benchmarks/engine_layouts.py BUNDLE [--graph target] [--batch 1 --batch 4] [--kind tensorrt-rtx]

The bundle must hold half-precision graphs. Each engine is built in a process of its own, whose peak is the one shown; nothing is added to
the bundle. Needs no GPU with kind tensorrt-rtx.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from xpress_engines.builder import EngineOptions, run_worker, worker_job
from xpress_engines.profiles import BlockSizes, dim_ranges, graph_calls
from xpress_export.cli.show import table
from xpress_export.engines_build import engine_options, request_engines
from xpress_runtime.bundle import Bundle

Ranges = Sequence[Mapping[str, tuple[int, int, int]]]


@click.command()
@click.argument("bundle", type=click.Path(exists=True, path_type=Path))
@click.option("--graph", default="target", show_default=True)
@click.option("--batch", "batches", multiple=True, type=click.IntRange(1), default=(1, 4), show_default=True)
@click.option("--kind", default="tensorrt-rtx", show_default=True)
def main(bundle: Path, graph: str, batches: tuple[int, ...], kind: str) -> None:
    """Build one graph of BUNDLE with every layout of profiles and print a table."""
    opened = Bundle.open(bundle)
    (request,) = request_engines([kind])
    rows = []
    for batch in batches:
        options = engine_options(request, opened.manifest, batch=batch)
        for layout, ranges in _layouts(opened, options, graph).items():
            click.echo(f"batch {batch}, {layout}", err=True)
            built, peak = _build(opened, options, graph, ranges)
            megabytes = ["?" if size is None else f"{size / 1e6:.0f}" for size in (built["bytes"], peak)]
            rows.append([str(batch), layout, str(len(ranges)), megabytes[0], f"{built['build_seconds']:.1f}", megabytes[1]])
    click.echo(table(["batch", "layout", "profiles", "MB", "seconds", "peak MB"], rows))


def _layouts(bundle: Bundle, options: EngineOptions, graph: str) -> dict[str, Ranges]:
    """Pinned for each call alone and for several of them, a range for each call, and one range that spans them all."""
    sizes = BlockSizes.of(bundle.manifest)
    calls = graph_calls(graph, options.profile, sizes)
    pinned = dim_ranges(graph, options.profile, "pinned", sizes)
    # From the smallest sizes of any call up to a call's own.
    lowest = {dim: min(call[dim] for call in calls) for dim in calls[0]}
    names = [" x ".join(str(size) for size in call.values()) for call in calls]
    spans = dict.fromkeys([*((index, index + 1) for index in range(len(calls))), (0, 2), (1, 3), (0, len(calls))])
    return {
        # Some graphs have one call only.
        **{f"pinned {', '.join(names[first:last])}": pinned[first:last] for first, last in spans if last <= len(calls)},
        "ranged, one a call": [{dim: (lowest[dim], size, size) for dim, size in call.items()} for call in calls],
        "shared": dim_ranges(graph, options.profile, "shared", sizes),
    }


def _build(bundle: Bundle, options: EngineOptions, graph: str, ranges: Ranges) -> tuple[dict[str, Any], int | None]:
    with tempfile.TemporaryDirectory() as folder:
        job = worker_job(bundle, options, Path(folder), {graph: ranges})
        events = {event["event"]: event for event in run_worker(job, options.kind.package)}
    return events["built"], events["done"]["peak_build_bytes"]


if __name__ == "__main__":
    main()
