"""`xpress-export parity`: a bundle against PyTorch and transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from xpress_export.cli.options import bundle_argument, json_option, threads_option
from xpress_export.cli.progress import progress
from xpress_export.cli.quiet import quiet_libraries
from xpress_export.cli.show_parity import shown_parity
from xpress_runtime.errors import OptionError

if TYPE_CHECKING:
    from xpress_export.checkpoints import DrafterCheckpoint, DraftModelCheckpoint, TargetCheckpoint
    from xpress_runtime.bundle import Bundle
    from xpress_runtime.manifest import DraftModelRecord, GraphSet, Origin


@click.command("parity")
@bundle_argument
@click.option("--target", help="Where the target lies now. Default: where the bundle was built from.")
@click.option("--drafter", help="Where the drafter lies now. Default: where the bundle was built from.")
@click.option("--draft-model", help="Where the draft model lies now, if the bundle has one. Default: where the bundle was built from.")
@click.option(
    "--precision", "precisions", type=click.Choice(["fp32", "fp16", "bf16"]), multiple=True, help="Graph sets to compare. Default: all."
)
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    help='Texts to generate from instead of three short ones: a file with one a line, as text or as {"prompt": "…"}.',
)
@click.option("--max-new-tokens", type=click.IntRange(2), help="Tokens to generate from each. Default: 24.")
@threads_option
@json_option
def command(
    bundle: Path,
    target: str | None,
    drafter: str | None,
    draft_model: str | None,
    precisions: tuple[str, ...],
    prompts: Path | None,
    max_new_tokens: int | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Compare every graph of BUNDLE with PyTorch, its target and its generation, with every drafter, with transformers.

    In half precision also: how close values come to the end of the precision's range, and acceptance against the fp32 graphs. The result
    is written into the bundle. Exit code 1 when something differs by more than the tolerance.
    """
    from xpress_export.checkpoints import open_draft_model, open_drafter, open_target
    from xpress_export.parity.check import check_same_checkpoints
    from xpress_export.parity.report import require_passed
    from xpress_runtime.bundle import Bundle

    quiet_libraries()
    opened = Bundle.open(bundle)
    graph_sets = _graph_sets(opened, precisions)
    options: dict[str, Any] = {} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}
    if prompts is not None:
        options["prompts"] = _read_prompts(prompts)
    # All places first: opening a target may take long.
    target_place = _whereabouts("target", target, opened.manifest.target.origin)
    drafter_place = _whereabouts("drafter", drafter, opened.manifest.drafter.origin)
    record, model = opened.manifest.draft_model, None
    model_place = _draft_model_place(draft_model, record)
    target_checkpoint, drafter_checkpoint = open_target(*target_place), open_drafter(*drafter_place)
    if record is not None:
        model = open_draft_model(*model_place, record.layers, target_checkpoint)
    check_same_checkpoints(opened, target_checkpoint, drafter_checkpoint, model)
    opened = run_parity(
        opened, target_checkpoint, drafter_checkpoint, model, graph_sets=graph_sets, threads=threads, as_json=as_json, **options
    )
    assert opened.manifest.parity is not None
    results = {graph_set.name: opened.manifest.parity[graph_set.name] for graph_set in graph_sets}
    if as_json:
        click.echo(json.dumps(results))
    require_passed(results)


def run_parity(
    bundle: Bundle,
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    draft_model: DraftModelCheckpoint | None = None,
    *,
    as_json: bool,
    graph_sets: Sequence[GraphSet] | None = None,
    **options: Any,
) -> Bundle:
    """Run the check of the given sets (default: all) with progress, write its results into the bundle and, unless ``as_json``, show them.

    ``options`` are those of :func:`xpress_export.parity.check.check_parity`.
    """
    from xpress_export.parity.check import check_parity, parity_steps

    graph_sets = bundle.manifest.graph_sets if graph_sets is None else graph_sets
    with progress("parity", parity_steps(bundle, graph_sets), quiet=as_json) as report:
        results = check_parity(bundle, target, drafter, draft_model, graph_sets=graph_sets, report=report, **options)
    if not as_json:
        click.echo("\n\n".join(shown_parity(result) for result in results.values()))
    return bundle.write_manifest(bundle.manifest.with_parity(results))


def _graph_sets(bundle: Bundle, precisions: tuple[str, ...]) -> list[GraphSet]:
    """The sets of these precisions, or all."""
    held = bundle.manifest.graph_sets
    for precision in precisions:
        if all(graph_set.precision != precision for graph_set in held):
            names = ", ".join(graph_set.name for graph_set in held)
            raise OptionError(f"the bundle holds no graphs in {precision} (it holds: {names}); build it again with --precision {precision}")
    return [graph_set for graph_set in held if not precisions or graph_set.precision in precisions]


def _read_prompts(path: Path) -> list[str]:
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as problem:
        raise OptionError(f"--prompts {path} cannot be read: {problem.strerror}") from None
    except UnicodeDecodeError as problem:
        raise OptionError(f"--prompts {path} is not UTF-8 text: {problem.reason} at byte {problem.start}") from None
    if not lines:
        raise OptionError(f"--prompts {path} is empty, expected one prompt a line")
    return [_prompt(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def _prompt(line: str, where: str) -> str:
    if not line.lstrip().startswith("{"):
        return line
    try:
        entry = json.loads(line)
    except (json.JSONDecodeError, RecursionError):
        # Text may begin with a brace too.
        return line
    prompt = entry.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        raise OptionError(f"--prompts {where} has no text 'prompt'")
    if not prompt.isascii() and any("\ud800" <= character <= "\udfff" for character in prompt):
        raise OptionError(f"--prompts {where} holds half of a surrogate pair, which is no text")
    return prompt


def _draft_model_place(given: str | None, record: DraftModelRecord | None) -> tuple[str | None, str | None]:
    """Reference and revision of the bundle's draft model, if it has one of its own: layers of the target lie where the target does."""
    if record is not None and not record.shares_tables:
        return _whereabouts("draft-model", given, record.origin)
    if given is not None:
        held = "none" if record is None else "one that is made of the target's layers"
        raise OptionError(f"--draft-model {given} is for a bundle with a draft model of its own, and this one has {held}; leave it out")
    return None, None


def _whereabouts(role: str, given: str | None, origin: Origin) -> tuple[str, str | None]:
    """Reference and revision of a checkpoint to compare with."""
    if given is not None:
        return given, None
    # Only what came from the hub has a revision. A folder that is not here any more must not be asked for there.
    if origin.revision is None and not Path(origin.source).expanduser().exists():
        raise OptionError(f"the bundle was built from the {role} in '{origin.source}', which is not here; give its place with --{role}")
    return origin.source, origin.revision
