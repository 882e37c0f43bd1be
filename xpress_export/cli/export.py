"""`xpress-export export`: the ONNX graphs alone, for a runtime of one's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from xpress_export.cli.options import build_options, checkpoint_options, combined, draft_model_options, json_option, opened_draft_model
from xpress_export.cli.progress import progress
from xpress_export.cli.quiet import quiet_libraries


@click.command("export")
@checkpoint_options
@click.option("--output", required=True, type=click.Path(path_type=Path), help="The folder to make for the graphs.")
@build_options
@draft_model_options
@combined(
    click.option(
        "--precision",
        type=click.Choice(["fp32", "fp16", "bf16"]),
        default="fp32",
        show_default=True,
        help="fp32: attention bounded by lengths, for ONNX Runtime on CPUs; fp16, bf16: by a mask, for GPUs.",
    ),
    click.option("--force", is_flag=True, help="Replace an existing folder."),
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
    precision: str,
    force: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Export the ONNX graphs of a target and a drafter, without tokenizer, manifest and parity.

    Large tensors of all graphs lie in one weights.bin beside them.
    """
    from xpress_export.build import ATTENTION_FORMS, weight_bytes
    from xpress_export.checkpoints import open_pair
    from xpress_export.graph_set import export_graph_set, set_graph_names
    from xpress_export.options import resolve_options, resolve_precisions
    from xpress_export.staging import refuse_existing, staged_folder
    from xpress_runtime.sets import Precision

    refuse_existing(output, replace=force)
    quiet_libraries()
    target_checkpoint, drafter_checkpoint = open_pair(target, drafter, target_revision=target_revision, drafter_revision=drafter_revision)
    resolved = resolve_options(target_checkpoint, drafter_checkpoint, **options)
    (chosen,) = resolve_precisions(target_checkpoint, [Precision(precision)], with_half=False)
    model = opened_draft_model(target_checkpoint, draft_model, draft_model_revision, draft_layers)
    needed = weight_bytes(target_checkpoint, drafter_checkpoint, chosen, model)
    with (
        progress("export", len(set_graph_names(resolved, model)), quiet=as_json) as report,
        staged_folder(output, needed_bytes=needed, replace=force) as staging,
    ):
        exported = export_graph_set(
            target_checkpoint,
            drafter_checkpoint,
            resolved,
            staging,
            precision=chosen,
            attention_form=ATTENTION_FORMS[chosen],
            draft_model=model,
            report=report,
        )
    if as_json:
        click.echo(json.dumps({"folder": str(output), "graphs": {name: graph.operators for name, graph in exported.items()}}))
    else:
        for graph in exported.values():
            click.echo(f"{output / graph.path.name}  {sum(graph.operators.values())} operators")
