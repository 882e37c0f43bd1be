"""`xpress-export build`: a bundle from a target and a drafter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from xpress_export.cli.options import build_options, checkpoint_options, combined, json_option
from xpress_export.cli.progress import progress
from xpress_export.cli.quiet import quiet_libraries


@click.command("build")
@checkpoint_options
@click.option("--output", required=True, type=click.Path(path_type=Path), help="The bundle folder to make.")
@build_options
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
    output: Path,
    no_parity: bool,
    force: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Build a bundle from a target and a drafter, and compare it with PyTorch.

    The folder appears when it is complete. Exit code 1 means that the bundle was written and its parity check failed.
    """
    from xpress_export.build import build_bundle
    from xpress_export.checkpoints import open_pair
    from xpress_export.graph_set import graph_names
    from xpress_export.options import resolve_options
    from xpress_export.staging import refuse_existing
    from xpress_runtime.backends import open_backend

    refuse_existing(output, replace=force)
    if not no_parity:
        # What the check will need at the end is missed now, before minutes of work.
        open_backend("ort-cpu")
    quiet_libraries()
    target_checkpoint, drafter_checkpoint = open_pair(target, drafter, target_revision=target_revision, drafter_revision=drafter_revision)
    resolved = resolve_options(target_checkpoint, drafter_checkpoint, **options)
    with progress("build", len(graph_names(resolved)) + 2, quiet=as_json) as report:
        bundle = build_bundle(target_checkpoint, drafter_checkpoint, output, resolved, replace=force, report=report)

    if not no_parity:
        from xpress_export.cli.parity import run_parity

        bundle = run_parity(bundle, target_checkpoint, drafter_checkpoint, as_json=as_json)
    if as_json:
        click.echo(json.dumps({"bundle": str(output), "parity": bundle.manifest.parity}))
    else:
        click.echo(f"bundle: {output}")
    if bundle.manifest.parity is not None:
        from xpress_export.parity.report import require_passed

        require_passed(bundle.manifest.parity)
