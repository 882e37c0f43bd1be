"""`xpress-export parity`: a bundle against PyTorch and transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from xpress_export.cli.options import bundle_argument, json_option, threads_option
from xpress_export.cli.progress import progress
from xpress_export.cli.quiet import quiet_libraries
from xpress_export.cli.show import table
from xpress_runtime.errors import OptionError

if TYPE_CHECKING:
    from xpress_export.checkpoints import DrafterCheckpoint, TargetCheckpoint
    from xpress_runtime.bundle import Bundle
    from xpress_runtime.manifest import Origin


@click.command("parity")
@bundle_argument
@click.option("--target", help="Where the target lies now. Default: where the bundle was built from.")
@click.option("--drafter", help="Where the drafter lies now. Default: where the bundle was built from.")
@threads_option
@json_option
def command(bundle: Path, target: str | None, drafter: str | None, threads: int | None, as_json: bool) -> None:
    """Compare every graph of BUNDLE with PyTorch, its target and its generation with transformers.

    The result is written into the bundle. Exit code 1 when something differs by more than the tolerance.
    """
    from xpress_export.checkpoints import open_drafter, open_target
    from xpress_export.parity.check import check_same_checkpoints
    from xpress_export.parity.report import require_passed
    from xpress_runtime.bundle import Bundle

    quiet_libraries()
    opened = Bundle.open(bundle)
    target_checkpoint = open_target(*_whereabouts("target", target, opened.manifest.target.origin))
    drafter_checkpoint = open_drafter(*_whereabouts("drafter", drafter, opened.manifest.drafter.origin))
    check_same_checkpoints(opened, target_checkpoint, drafter_checkpoint)
    opened = run_parity(opened, target_checkpoint, drafter_checkpoint, threads=threads, as_json=as_json)
    assert opened.manifest.parity is not None
    if as_json:
        click.echo(json.dumps(opened.manifest.parity))
    require_passed(opened.manifest.parity)


def run_parity(
    bundle: Bundle, target: TargetCheckpoint, drafter: DrafterCheckpoint, *, as_json: bool, threads: int | None = None
) -> Bundle:
    """Run the check with progress, write its result into the bundle and, unless ``as_json``, show it."""
    from xpress_export.parity.check import check_parity

    num_steps = len(bundle.manifest.graph_sets[0].graphs) + 2 + len(bundle.manifest.num_passes)
    with progress("parity", num_steps, quiet=as_json) as report:
        parity = check_parity(bundle, target, drafter, threads=threads, report=report)
    if not as_json:
        click.echo(_shown(parity))
    return bundle.write_manifest(bundle.manifest.with_parity(parity))


def _whereabouts(role: str, given: str | None, origin: Origin) -> tuple[str, str | None]:
    """Reference and revision of a checkpoint to compare with."""
    if given is not None:
        return given, None
    # Only what came from the hub has a revision. A folder that is not here any more must not be asked for there.
    if origin.revision is None and not Path(origin.source).expanduser().exists():
        raise OptionError(f"the bundle was built from the {role} in '{origin.source}', which is not here; give its place with --{role}")
    return origin.source, origin.revision


def _shown(parity: dict[str, object]) -> str:
    from xpress_export.parity.report import shown_error

    graphs, target, generation = parity["graphs"], parity["target"], parity["generation"]
    assert isinstance(graphs, dict) and isinstance(target, dict) and isinstance(generation, dict)
    rows = [
        [
            name,
            shown_error(entry["max_abs_error"]),
            shown_error(entry["scaled_error"]),
            _agreement(entry["argmax"]),
            _verdict(entry["passed"]),
        ]
        for name, entry in graphs.items()
    ]
    rows.append(
        [
            "target / transformers",
            shown_error(target["max_abs_error"]),
            shown_error(target["scaled_error"]),
            f"{target['argmax']['agreeing']}/{target['argmax']['rows']}",
            _verdict(target["passed"]),
        ]
    )
    lines = [table(["compared with PyTorch", "largest error", "relative", "same best token", "result"], rows)]
    lines.append(
        f"generation / transformers: {generation['tokens']} tokens equal over {generation['prompts']} prompts in modes "
        f"{', '.join(generation['modes'])}: {_verdict(generation['passed'])}"
    )
    lines += [
        f"  {entry['mode']}, prompt {entry['prompt']}, token {entry['index']}: {entry['found']} instead of {entry['expected']}, "
        f"margin {entry['margin']:.2e}, logit error {entry['logit_error']:.2e}: {'tie' if entry['tie'] else 'different'}"
        for entry in generation["divergences"]
    ]
    return "\n".join(lines)


def _agreement(argmax: dict[str, dict[str, int]]) -> str:
    return " ".join(f"{entry['agreeing']}/{entry['rows']}" for entry in argmax.values())


def _verdict(passed: object) -> str:
    return "ok" if passed else "FAILED"
