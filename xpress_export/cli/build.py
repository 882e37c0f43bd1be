"""`xpress-export build`: a bundle from a target and a drafter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from xpress_export.cli.options import (
    build_options,
    checkpoint_options,
    combined,
    draft_model_options,
    engine_options,
    json_option,
    opened_draft_model,
    resolved_options,
)
from xpress_export.cli.progress import progress
from xpress_export.cli.quiet import quiet_libraries
from xpress_export.cli.show import engine_lines
from xpress_runtime.errors import OptionError

if TYPE_CHECKING:
    from xpress_engines.profiles import ProfileSet
    from xpress_export.engines_build import EngineRequest


@click.command("build")
@checkpoint_options
@click.option("--output", required=True, type=click.Path(path_type=Path), help="The bundle folder to make.")
@build_options
@draft_model_options
@engine_options
@combined(
    click.option("--no-parity", is_flag=True, help="Do not compare the bundle with PyTorch and transformers."),
    click.option("--force", is_flag=True, help="Replace an existing bundle."),
    json_option,
)
def command(
    target: str,
    target_revision: str | None,
    drafter: str,
    drafter_revision: str | None,
    draft_model: str | None,
    draft_model_revision: str | None,
    draft_layers: tuple[int, ...] | None,
    output: Path,
    engines: tuple[str, ...],
    precisions: tuple[str, ...],
    profile: str | None,
    compute_capability: tuple[str, ...],
    timing_cache: Path | None,
    no_parity: bool,
    force: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Build a bundle from a target and a drafter, and compare it with PyTorch.

    The folder appears when it is complete, engines included. Exit code 1 means that the bundle was written and its parity check failed.
    """
    from xpress_export.build import build_bundle
    from xpress_export.checkpoints import open_pair
    from xpress_export.graph_set import set_graph_names
    from xpress_export.options import check_engine_support, resolve_precisions
    from xpress_export.rebuild import compare_with_older
    from xpress_export.staging import refuse_existing
    from xpress_runtime.backends import open_backend
    from xpress_runtime.bundle import Bundle
    from xpress_runtime.engines import open_engines
    from xpress_runtime.manifest import Manifest
    from xpress_runtime.sets import Precision

    refuse_existing(output, replace=force)
    requests, chosen = _engine_requests(engines, profile, compute_capability, timing_cache)
    if engines and set(precisions) == {"fp32"}:
        raise OptionError("--engine needs graphs in half precision, and --precision asks for fp32 alone; add --precision fp16")
    if not no_parity:
        # What the check will need at the end is missed now, before minutes of work.
        open_backend("ort-cpu")
    quiet_libraries()
    target_checkpoint, drafter_checkpoint = open_pair(target, drafter, target_revision=target_revision, drafter_revision=drafter_revision)
    resolved = resolved_options(target_checkpoint, drafter_checkpoint, options, chosen, profile)
    built = resolve_precisions(target_checkpoint, [Precision(name) for name in precisions], with_half=bool(engines))
    if requests:
        from xpress_export.engines_build import check_shortlists

        check_engine_support(target_checkpoint)
        check_shortlists(resolved.shortlists)
    model = opened_draft_model(target_checkpoint, draft_model, draft_model_revision, draft_layers)
    compare_with_older(output, target_checkpoint, drafter_checkpoint)
    num_graphs = len(set_graph_names(resolved, model))
    with progress("build", num_graphs * (len(built) + len(requests)) + 2, quiet=as_json) as report:

        def complete(staging: Path, manifest: Manifest) -> None:
            for request in requests:
                from xpress_export.engines_build import add_engines, engine_options

                half = next(precision for precision in built if precision is not Precision.FP32)
                made = engine_options(request, manifest, precision=half, layout=chosen.layout if chosen else None)
                add_engines(Bundle(staging, manifest), made, report=report)

        bundle = build_bundle(
            target_checkpoint,
            drafter_checkpoint,
            output,
            resolved,
            precisions=built,
            draft_model=model,
            replace=force,
            complete=complete,
            report=report,
        )

    if not no_parity:
        from xpress_export.cli.parity import run_parity

        bundle = run_parity(bundle, target_checkpoint, drafter_checkpoint, model, as_json=as_json)
    if as_json:
        click.echo(json.dumps({"bundle": str(output), "parity": bundle.manifest.parity}))
    else:
        for request in requests:
            click.echo("\n".join(engine_lines(open_engines(bundle, request.kind.name, verify=False).manifest)))
        click.echo(f"bundle: {output}")
    if bundle.manifest.parity is not None:
        from xpress_export.parity.report import require_passed

        require_passed(bundle.manifest.parity)


def _engine_requests(
    engines: Sequence[str], profile: str | None, compute_capabilities: Sequence[str], timing_cache: Path | None
) -> tuple[tuple[EngineRequest, ...], ProfileSet | None]:
    """What the options about engines ask for, checked before any work."""
    from xpress_engines.profiles import load_profile
    from xpress_export.engines_build import request_engines

    for option, given in (("--compute-capability", bool(compute_capabilities)), ("--timing-cache", timing_cache is not None)):
        if given and not engines:
            raise OptionError(f"{option} is for engines; give --engine as well")
    chosen = load_profile(profile) if profile is not None else None
    return request_engines(engines, compute_capabilities=compute_capabilities, timing_cache=timing_cache), chosen
