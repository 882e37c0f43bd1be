"""Fifth stage: what the drafter is worth. The real loop through an exported bundle, measured by the project's own benchmark.

Plain and speculative decoding take turns on the held-out prompts, and every speculative output must be plain decoding's. Knows nothing of
training.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples.distill.answers import as_text, chat_variables
from examples.distill.card import write_card
from examples.distill.prompts import ROW
from examples.distill.run_folder import RunFolder, read_json, read_rows, write_json
from examples.distill.settings import EvaluationSettings, Settings
from examples.distill.sizes import Sizes, drafter_sizes
from examples.distill.target import Target
from xpress_export.bench.modes import PLAIN, plan_modes
from xpress_export.bench.output import report_folder, write_report
from xpress_export.bench.prompts import PromptLine, encode_prompts, first_of_each_family
from xpress_export.bench.report import Report
from xpress_export.bench.run import run_bench
from xpress_export.bench.tables import bounds, number, times
from xpress_export.build import build_bundle
from xpress_export.checkpoints import open_draft_model, open_drafter
from xpress_export.checkpoints.pairing import check_pairing
from xpress_export.options import resolve_options
from xpress_runtime.errors import CheckFailed, OptionError
from xpress_runtime.generation import GenerationConfig
from xpress_runtime.session import Session, WarningThresholds


def evaluate_drafter(settings: Settings, folder: RunFolder, report: Callable[[str], None]) -> None:
    """Build a bundle of ``drafter/``, measure it, write ``evaluation/`` and the model card. Raises CheckFailed where output differs."""
    step = read_json(folder.drafter / "training.json", "train").get("step")
    target = Target(settings.target)
    sizes = drafter_sizes(settings.drafter, target.checkpoint.config, target.special_token_ids(), settings.prompts.thinking)
    # As it is without these figures; what is wrong with the drafter's notes is known before hours of measuring.
    write_card(folder, sizes, target)
    into = folder.make(folder.evaluation / f"step-{step}")
    bundle = _build(settings, folder, target, sizes, into / "bundle", report)
    shutil.rmtree(into / "report", ignore_errors=True)
    measured = _measure(settings, folder, bundle, into / "report", report)
    figures = _summary(measured, settings.evaluation)
    write_json(folder.evaluation / "evaluation.json", {"step": step, **figures})
    write_card(folder, sizes, target)
    for title, rows in figures["tables"].items():
        report(f"{title}: " + "; ".join(f"{row['mode']} τ {row['tau']}, {row['speedup']}" for row in rows))
    report(figures["agreement"])
    different = {name: made for name, made in measured.figures.items() if made.num_same_tokens != made.num_prompts}
    if different:
        names = ", ".join(f"{name} ({made.num_same_tokens} of {made.num_prompts})" for name, made in different.items())
        raise CheckFailed(f"outputs differ from plain decoding's in {names}; {into / 'report' / 'report.json'} holds every token")


def _build(settings: Settings, folder: RunFolder, target: Target, sizes: Sizes, output: Path, report: Callable[[str], None]) -> Path:
    drafter = open_drafter(str(folder.drafter))
    check_pairing(target.checkpoint, drafter)
    # The drafter's own number first: what a request gets that asks for no other.
    passes = [number for number in (sizes.num_passes, *settings.evaluation.passes) if number] if sizes.refiner_rank else []
    options = resolve_options(
        target.checkpoint,
        drafter,
        num_passes=tuple(dict.fromkeys(passes)) or None,
        capacity=min(settings.evaluation.capacity, target.checkpoint.config.max_positions),
        sampling=False,
    )
    draft_model = None
    if (folder.draft_model / "config.json").is_file():
        draft_model = open_draft_model(str(folder.draft_model), None, None, target.checkpoint)
    build_bundle(
        target.checkpoint, drafter, output, options, draft_model=draft_model, replace=True, report=lambda name: report(f"bundle: {name}")
    )
    return output


def _measure(settings: Settings, folder: RunFolder, bundle: Path, output: Path, report: Callable[[str], None]) -> Report:
    evaluation = settings.evaluation
    is_chat = settings.prompts.format == "chat"
    lines = [
        PromptLine(f"held-out prompt {row['id']}", row["family"], row["messages"] if is_chat else as_text(row["messages"]))
        for row in read_rows(folder.prompts("held_out"), "prompts", ROW)
    ]
    if not lines:
        raise OptionError(f"{folder.prompts('held_out')} holds no prompt; remove it and run 'prompts' again")
    if evaluation.prompts:
        lines = first_of_each_family(lines, evaluation.prompts)
    # Modes that do not pay are measured on purpose: no warning about each generation.
    silent = WarningThresholds(acceptance_rate=0.0, round_ms=math.inf)
    with report_folder(output) as staged, Session.open(bundle, "auto", thresholds=silent) as session:
        prompts = encode_prompts(session, lines, chat=is_chat, chat_variables=chat_variables(settings.prompts))
        groups = ["sweep", "ablation", "auto"] + (["B"] if session.bundle.manifest.draft_model is not None else [])
        config = GenerationConfig(max_new_tokens=evaluation.max_new_tokens)
        plan = plan_modes(session.bundle.manifest, config, groups=groups, steps=evaluation.draft_steps)
        measured = run_bench(session, prompts, plan, step=report)
        write_report(measured, staged)
    return measured


def _summary(measured: Report, evaluation: EvaluationSettings) -> dict[str, Any]:
    """The figures that a model card shows."""
    same = min((made.num_same_tokens or 0 for made in measured.figures.values()), default=0)
    total = len(measured.measurements.prompts)
    tables = {"All prompts": _rows(measured, measured.figures)}
    if len(measured.family_figures) > 1:
        tables |= {family.capitalize(): _rows(measured, figures) for family, figures in measured.family_figures.items()}
    return {
        "backend": measured.subject["backend"],
        "prompts": total,
        "max_new_tokens": evaluation.max_new_tokens,
        "agreement": f"In every mode the tokens were plain decoding's on {same} of {total} prompts.",
        "tables": tables,
    }


def _rows(measured: Report, figures: dict[str, Any]) -> list[dict[str, str]]:
    rows = []
    for mode in measured.plan.modes:
        if mode.name == PLAIN:
            continue
        made = figures[mode.name]
        between = bounds(made.speedup)
        speedup = times(made.speedup) + (f" ({between})" if between else "")
        rows.append({"mode": mode.title, "tau": number(made.mean_acceptance_length), "speedup": speedup})
    return rows
