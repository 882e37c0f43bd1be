"""`xpress-export bench`: plain decoding, other drafters, denoising steps and refiner against each other, on one bundle."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from xpress_export.cli.options import (
    IntegersType,
    bundle_argument,
    chat_option,
    combined,
    distribution_options,
    json_option,
    refuse_unused_sampling,
    session_options,
)
from xpress_export.cli.progress import progress
from xpress_export.cli.show import table
from xpress_runtime.errors import OptionError

if TYPE_CHECKING:
    from xpress_export.bench.findings import Threshold
    from xpress_export.bench.modes import ModePlan
    from xpress_export.bench.prompts import PromptLine
    from xpress_export.bench.report import Report
    from xpress_export.bench.tables import Table
    from xpress_runtime.generation import GenerationConfig
    from xpress_runtime.manifest import Manifest

_WIDTH = 120

_prompt_options = combined(
    click.option(
        "--prompts",
        type=click.Path(path_type=Path),
        help='Your prompts: a file with {"prompt": "…"} or {"messages": […]} a line, and "family" to show some of them together.',
    ),
    click.option(
        "--set",
        "sets",
        type=click.Choice(["math", "code", "chat"]),
        multiple=True,
        help="A built-in set of prompts; may be given several times. Default: all three.",
    ),
    click.option(
        "--num-prompts", type=click.IntRange(1), help="Prompts of each set or family, the first ones. Default: 10 of a set, all of a file."
    ),
    chat_option,
)
_mode_options = combined(
    click.option(
        "--groups",
        metavar="G[,G…]",
        help="Among A (plain, always measured), B (autoregressive drafter), L (prompt lookup), C (many steps, no refiner), "
        "D (one step and refiner), ablation, sweep (all built K) and auto. Default: all.",
    ),
    click.option("--steps", type=IntegersType("S[,S…]"), help="Denoising steps of the ablation. Default: 1,5,10."),
    click.option("--many-steps", type=int, help="Denoising steps of group C. Default: 10."),
    click.option("--num-passes", type=int, help="Refinement passes of group D, the ablation and auto. Default: the bundle's first."),
    click.option("--shortlist", type=int, help="Candidates per slot that the refiner scores. Default: the bundle's first."),
)
_sampling_options = combined(
    click.option("--max-new-tokens", type=click.IntRange(2), default=64, show_default=True, help="Tokens of each generation at most."),
    click.option("--ignore-stop", is_flag=True, help="Go on past stop tokens, so that all outputs have the same length."),
    click.option(
        "--temperature", type=float, default=0.0, show_default=True, help="0: greedy, and tokens are compared with plain decoding's."
    ),
    distribution_options,
    click.option("--seed", type=int, default=0, show_default=True, help="Of sampling and of the intervals' bootstrap."),
    click.option("--repeats", type=click.IntRange(1, 1000), default=1, show_default=True, help="Generations of each prompt in each mode."),
)
_output_options = combined(
    click.option("--output", type=click.Path(path_type=Path), help="A new folder for report.html, report.json and rows.csv."),
    click.option("--memory", is_flag=True, help="Also measure each mode's peak memory, in a process of its own."),
    click.option("--fail-under-speedup", type=float, metavar="X", help="Exit code 1 when the speed-up over plain decoding is below X."),
    click.option("--fail-under-tau", type=float, metavar="X", help="Exit code 1 when the mean acceptance length τ is below X."),
    click.option("--fail-group", type=click.Choice(["B", "L", "C", "D", "auto"]), help="The group that these two are about. Default: D."),
)


@click.command("bench")
@bundle_argument
@_prompt_options
@_mode_options
@_sampling_options
@session_options
@_output_options
@json_option
def command(
    bundle: Path,
    prompts: Path | None,
    sets: tuple[str, ...],
    num_prompts: int | None,
    chat: bool | None,
    repeats: int,
    seed: int,
    backend: str,
    threads: int | None,
    runtime_cache: Path | None,
    no_verify: bool,
    output: Path | None,
    memory: bool,
    fail_under_speedup: float | None,
    fail_under_tau: float | None,
    fail_group: str | None,
    as_json: bool,
    groups: str | None,
    steps: tuple[int, ...] | None,
    many_steps: int | None,
    num_passes: int | None,
    shortlist: int | None,
    **sampling: Any,
) -> None:
    """Measure what speculation gains with BUNDLE, and what of it: drafter, denoising steps, refiner.

    Modes take turns on every prompt, and speed-up and acceptance come with 95 % intervals over prompts. The report in --output opens in a
    browser without a network. With --json standard output is what report.json holds.
    """
    from xpress_export.bench.environment import load_average
    from xpress_export.bench.findings import require_thresholds
    from xpress_export.bench.measure import check_modes, num_steps
    from xpress_export.bench.output import report_folder, write_report
    from xpress_export.bench.prompts import encode_prompts
    from xpress_export.bench.run import run_bench, with_memory
    from xpress_runtime.bundle import Bundle
    from xpress_runtime.generation import GenerationConfig
    from xpress_runtime.session import Session, WarningThresholds

    load_before = load_average()
    config = GenerationConfig(seed=seed, **sampling)
    refuse_unused_sampling({**sampling, "seed": None})
    lines = _lines(prompts, sets, num_prompts)
    opened = Bundle.open(bundle, verify=not no_verify)
    modes = {"steps": steps, "many_steps": many_steps, "num_passes": num_passes, "shortlist": shortlist}
    plan = _plan(opened.manifest, config, groups, modes)
    required = _thresholds(plan, fail_under_speedup, fail_under_tau, fail_group)
    with ExitStack() as stack:
        folder = stack.enter_context(report_folder(output)) if output is not None else None
        # Modes that do not pay are measured on purpose: no warning about each generation.
        silent = WarningThresholds(acceptance_rate=0.0, round_ms=math.inf)
        with Session.open(bundle, backend, threads=threads, verify=False, thresholds=silent, runtime_cache=runtime_cache) as session:
            encoded = encode_prompts(session, lines, chat=chat)
            check_modes(session, encoded[0], plan.modes)
            with progress("bench", num_steps(encoded, plan.modes, repeats), quiet=as_json) as step:
                report = run_bench(session, encoded, plan, repeats=repeats, seed=seed, threads=threads, load_before=load_before, step=step)
        if memory:
            with progress("bench", len(plan.modes), quiet=as_json) as step:
                report = with_memory(report, bundle, report.subject["backend"], threads, runtime_cache, step)
        if folder is not None:
            write_report(report, folder)
    click.echo(json.dumps(report.to_json(), allow_nan=False) if as_json else "\n".join(_shown(report, output)))
    require_thresholds(report, required)


def _lines(path: Path | None, sets: tuple[str, ...], num_prompts: int | None) -> list[PromptLine]:
    from xpress_export.bench.prompts import BUILT_IN_SETS, built_in_prompts, read_prompts

    if path is None:
        return built_in_prompts(sets or BUILT_IN_SETS, num_prompts)
    if sets:
        raise OptionError(f"--prompts {path} and --set {sets[0]} are given; leave one of them out")
    return read_prompts(path, num_prompts)


# Which groups each option has an effect on.
_USED_BY = {
    "steps": ("ablation",),
    "many_steps": ("C",),
    "num_passes": ("D", "ablation", "auto"),
    "shortlist": ("D", "ablation", "sweep", "auto"),
}


def _plan(manifest: Manifest, config: GenerationConfig, groups: str | None, options: dict[str, Any]) -> ModePlan:
    from xpress_export.bench.modes import GROUPS, plan_modes

    if groups is None:
        chosen = list(GROUPS)
    else:
        # Letters in either case, as people write them.
        names = {group.lower(): group for group in GROUPS}
        parts = [part.strip() for part in groups.split(",")]
        chosen = [names.get(part.lower(), part) for part in parts]
    given = {option: value for option, value in options.items() if value is not None}
    for option in given:
        if not set(_USED_BY[option]) & set(chosen):
            name = option.replace("_", "-")
            raise OptionError(
                f"--{name} is for group {' or '.join(_USED_BY[option])}, which --groups {groups} leaves out; leave out --{name} too"
            )
    return plan_modes(manifest, config, groups=chosen, **given)


def _thresholds(plan: ModePlan, speedup: float | None, tau: float | None, group: str | None) -> list[Threshold]:
    from xpress_export.bench.findings import Threshold

    asked = [("--fail-under-speedup", "speed-up", speedup), ("--fail-under-tau", "τ", tau)]
    thresholds = [Threshold(option, figure, group or "D", value) for option, figure, value in asked if value is not None]
    if group is not None and not thresholds:
        raise OptionError("--fail-group needs --fail-under-speedup or --fail-under-tau; give one of them, or leave it out")
    for threshold in thresholds:
        if not (math.isfinite(threshold.at_least) and threshold.at_least > 0):
            raise OptionError(f"{threshold.option} is {threshold.at_least:g}, expected a number over 0")
        if not plan.of_group(threshold.group):
            raise OptionError(
                f"{threshold.option} is about group {threshold.group}, which is not measured; choose another one with --fail-group"
            )
    return thresholds


def _shown(report: Report, output: Path | None) -> Iterator[str]:
    """Tables and findings for a terminal of 120 columns."""
    from xpress_export.bench import tables
    from xpress_export.bench.findings import findings

    measurements = report.measurements
    what = ", ".join(measurements.families)
    yield f"{len(measurements.prompts)} prompts ({what}), at most {report.settings['max_new_tokens']} tokens, {report.subject['backend']}"
    yield from ("", _text(tables.overview(report)))
    others = (tables.ablation(report), tables.stages(report, "token"), tables.widths(report), tables.memory(report))
    for shown in (*others, *tables.families(report)):
        if shown:
            yield from ("", f"{shown.caption}:", _text(shown))
    yield ""
    yield from (
        line
        for note in (*findings(report), *report.plan.notes, *report.notes)
        for line in textwrap.wrap(note, _WIDTH, subsequent_indent="  ")
    )
    yield ""
    yield f"report: {output}" if output is not None else "--output FOLDER keeps a report with plots, and every figure as JSON and CSV"


def _text(shown: Table) -> str:
    return table(shown.header, shown.rows)
