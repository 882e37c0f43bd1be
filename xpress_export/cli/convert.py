"""`xpress-export convert`: a drafter of any published format, written in the serving format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from xpress_export.cli.options import combined, json_option
from xpress_export.cli.quiet import quiet_libraries

if TYPE_CHECKING:
    from xpress_export.convert import Conversion


@click.command("convert")
@click.argument("checkpoint")
@combined(
    click.option("--output", required=True, type=click.Path(path_type=Path), help="The folder to make."),
    click.option("--revision", help="Revision of a checkpoint on the hub."),
    click.option(
        "--base-config",
        type=click.Path(path_type=Path),
        help="config.json, or its folder, of the DFlash drafter that a .pt file started from. Default: the one beside the file.",
    ),
    click.option("--num-passes", type=click.IntRange(1), help="Jacobi passes to write as the default. Default: the checkpoint's."),
    click.option(
        "--anchor-predecessor",
        type=click.Choice(["previous", "anchor"]),
        help="Which token stands before the anchor: the real previous one, or the anchor itself. Default: the checkpoint's.",
    ),
    click.option("--force", is_flag=True, help="Replace an earlier conversion."),
    json_option,
)
def command(
    checkpoint: str,
    output: Path,
    revision: str | None,
    base_config: Path | None,
    num_passes: int | None,
    anchor_predecessor: Literal["previous", "anchor"] | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write the drafter CHECKPOINT (xPress, DFlash, DSpark, speculators or a training checkpoint) in the serving format.

    Tensors stay as they are, bit for bit. conversion.json in the folder says where every field and every tensor came from.
    """
    from xpress_export.checkpoints import open_drafter
    from xpress_export.convert import CONVERTED, convert_drafter
    from xpress_export.staging import refuse_existing

    refuse_existing(output, replace=force, written=CONVERTED)
    quiet_libraries()
    conversion = convert_drafter(
        open_drafter(checkpoint, revision, base_config=base_config),
        output,
        num_passes=num_passes,
        anchor_predecessor=anchor_predecessor,
        overwrite=force,
    )
    click.echo(json.dumps({"folder": str(output), **conversion.to_json()}) if as_json else _shown(conversion))


def _shown(conversion: Conversion) -> str:
    from xpress_export.checkpoints.locate import shown

    revision = f" at {conversion.revision}" if conversion.revision else ""
    lines = [
        f"{conversion.format} {conversion.source}{revision}",
        f"written to {conversion.folder}; identity {conversion.identity[:12]}",
    ]
    for title, entries in (("fields", conversion.fields), ("tensors", conversion.tensors), ("left out", conversion.left_out)):
        if not entries:
            continue
        width = max(map(len, entries))
        link = ":" if title == "left out" else " ←"
        lines += ["", title, *(f"  {shown(name).ljust(width)}{link} {shown(source)}" for name, source in entries.items())]
    if conversion.carried:
        lines += ["", f"carried over {', '.join(map(shown, conversion.carried))}"]
    return "\n".join(lines)
