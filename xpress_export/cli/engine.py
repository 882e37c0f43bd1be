"""`xpress-export engine`: TensorRT engines into a bundle that has half-precision graphs."""

from __future__ import annotations

import json
from pathlib import Path

import click

from xpress_export.cli.options import bundle_argument, combined, compute_capability_option, json_option, timing_cache_option
from xpress_export.cli.progress import progress
from xpress_export.cli.show import engine_lines


@click.command("engine")
@bundle_argument
@combined(
    click.option("--kind", default="tensorrt-rtx", show_default=True, help="tensorrt-rtx, which needs no GPU, or tensorrt."),
    click.option("--precision", type=click.Choice(["fp16", "bf16"]), help="Which of the bundle's graphs. Default: fp16 if it has them."),
    click.option("--profile", help="edge, server or a TOML file; must agree with the bundle. Default: the bundle's own numbers."),
    click.option("--batch", type=click.IntRange(1, 1024), help="Rows of a round. Default: the profile's."),
    click.option("--layout", type=click.Choice(["shared", "pinned"]), help="One profile for all calls, or one each. Default: the kind's."),
    compute_capability_option,
    timing_cache_option,
    click.option("--force", is_flag=True, help="Replace engines of this kind."),
    json_option,
)
def command(
    bundle: Path,
    kind: str,
    precision: str | None,
    profile: str | None,
    batch: int | None,
    layout: str | None,
    compute_capability: tuple[str, ...],
    timing_cache: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Build TensorRT engines of BUNDLE's half-precision graphs into it.

    The engines of a kind appear when all of them are built; engines of other kinds stay as they are.
    """
    from xpress_engines.profiles import load_profile
    from xpress_export.engines_build import add_engines, engine_options, refuse_existing_engines, request_engines
    from xpress_runtime.bundle import Bundle
    from xpress_runtime.sets import Precision

    (request,) = request_engines([kind], compute_capabilities=compute_capability, timing_cache=timing_cache)
    chosen = load_profile(profile) if profile is not None else None
    opened = Bundle.open(bundle)
    refuse_existing_engines(opened, kind, replace=force)
    options = engine_options(
        request, opened.manifest, profile=chosen, precision=Precision(precision) if precision else None, batch=batch, layout=layout
    )
    num_graphs = len(opened.manifest.graph_set(options.graph_set).graphs)
    with progress("engine", num_graphs, quiet=as_json) as report:
        built = add_engines(opened, options, replace=force, report=report)
    if as_json:
        click.echo(json.dumps({"bundle": str(bundle), **built.to_json()}))
    else:
        click.echo("\n".join(engine_lines(built)))
