"""The report as one page that opens offline: plots as inline SVG, the tables under them, no script and no address of anything outside.

Whatever comes from prompts, checkpoints or a bundle is escaped by the template, and the page forbids itself to load or run anything.
"""

from __future__ import annotations

from typing import Any

import jinja2

from xpress_export.bench import plots, tables
from xpress_export.bench.findings import FEW_PROMPTS, findings
from xpress_export.bench.modes import GROUPS
from xpress_export.bench.report import Report

TEMPLATE = "report.html.jinja"


def render_page(report: Report) -> str:
    """A complete HTML document."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("xpress_export.bench", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(TEMPLATE).render(
        report=report,
        findings=findings(report),
        notes=[*report.plan.notes, *report.notes],
        groups={group: GROUPS[group] for group in GROUPS if report.plan.of_group(group)},
        sections=_sections(report),
        details=_details(report),
        prompts=tables.prompts(report),
    )


def _sections(report: Report) -> list[dict[str, Any]]:
    """Title, explanation, plots and tables of each part that has something to show."""
    sections = [
        _section(
            "Speed-up",
            "The time of a token in plain decoding over that in each mode, prefill left out. Lines are 95 % intervals over prompts: "
            "where one crosses 1, these prompts do not tell which is faster.",
            [("", plots.speedup_plot(report))],
            [tables.overview(report), tables.speed(report)],
        ),
        _section(
            "Denoising steps and the refiner",
            "Whether acceptance falls when denoising steps are cut, and whether the refiner brings it back.",
            [("", chart) for chart in plots.ablation_plots(report)],
            [tables.ablation(report)],
            half=True,
        ),
        _section(
            "Refinement passes",
            "A mode is faster than plain decoding where τ is above its break-even, the time of a round over that of a plain step.",
            [("", plots.sweep_plot(report))],
            [tables.sweep(report)],
        ),
        _section(
            "Acceptance",
            "How far into the block the target agrees, and how many tokens a round brings. A slot counts where all before it are right.",
            [("Acceptance by position", plots.position_plot(report)), ("Acceptance lengths", plots.lengths_plot(report))],
            [tables.acceptance(report), tables.positions(report), tables.lengths(report), tables.widths(report)],
        ),
        _section(
            "Where the time goes",
            "Drafting, refining and verifying are graph execution; host is the rest of a round. A plain step is all verification.",
            [("", plots.stage_plot(report))],
            [tables.stages(report, "token"), tables.stages(report, "round"), tables.memory(report)],
        ),
        _section(
            "By family of prompts",
            f"The same for each family alone, all on one scale. Intervals of a family of fewer than {FEW_PROMPTS} prompts are too narrow.",
            plots.family_plots(report),
            tables.families(report),
            half=True,
        ),
    ]
    return [section for section in sections if section["plots"] or section["tables"]]


def _section(title: str, text: str, charts: list[Any], shown: list[tables.Table], *, half: bool = False) -> dict[str, Any]:
    return {
        "title": title,
        "half": half,
        "text": text,
        "plots": [(caption, chart) for caption, chart in charts if chart],
        "tables": [table for table in shown if table],
    }


def _details(report: Report) -> list[tuple[str, str]]:
    """What was measured, how and where, as pairs of name and value."""
    subject, settings, environment = report.subject, report.settings, report.environment
    machine = environment["machine"]
    origins = [(role.replace("_", " "), subject[role]) for role in ("target", "drafter", "draft_model") if subject[role] is not None]
    layers = None if subject["draft_model"] is None else subject["draft_model"]["layers"]
    pairs: list[tuple[str, Any]] = [
        ("bundle", subject["bundle"]),
        ("backend", f"{subject['backend']}, graphs {subject['graph_set']}"),
        *((role, f"{origin['source']} ({origin['licence'] or 'licence unknown'}), {origin['identity'][:16]}") for role, origin in origins),
        ("layers of the draft model", layers),
        ("refining head", subject["head"]),
        ("block size", subject["block_size"]),
        ("built passes (K)", ", ".join(map(str, subject["num_passes"]))),
        ("built shortlists", ", ".join(map(str, subject["shortlists"]))),
        ("capacity", f"{subject['capacity']} tokens"),
        *((name.replace("_", " "), value) for name, value in settings.items()),
        ("machine", f"{machine['processor'] or machine['architecture']}, {machine['system']}, {machine['num_cores']} usable cores"),
        ("threads", machine["num_threads"] or "all usable cores"),
        ("memory", None if machine["memory_bytes"] is None else tables.megabytes(machine["memory_bytes"])),
        ("GPU", machine["device"]),
        ("load before", None if machine["load_before"] is None else f"{machine['load_before']:.2f}"),
        (
            "peak memory of the process",
            None if report.memory.host_bytes is None else f"{tables.megabytes(report.memory.host_bytes)}, all modes",
        ),
        ("in use on the GPU", None if report.memory.device_bytes is None else tables.megabytes(report.memory.device_bytes)),
        ("versions", ", ".join(f"{name} {version}" for name, version in environment["versions"].items())),
        ("built with", ", ".join(f"{name} {version}" for name, version in subject["built_with"].items())),
    ]
    return [(name, _shown(value)) for name, value in pairs if value is not None]


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
