"""The plots of a report, each with what it shows; empty where the modes that it needs were not measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from xpress_export.bench.charts import Point, Series, bar_chart, interval_chart, line_chart, stack_chart
from xpress_export.bench.figures import STAGES, ModeFigures
from xpress_export.bench.intervals import Estimate
from xpress_export.bench.modes import PLAIN, Mode
from xpress_export.bench.report import Report
from xpress_export.bench.svg import NUM_COLOURS, WIDTH

# Two charts of this width fit beside each other.
_HALF = 480


def speedup_plot(report: Report) -> Markup:
    """Speed-up of each mode over plain decoding, with intervals."""
    rows = _speedups(report.plan.modes, report.figures)
    return _speedup_chart(rows, "all prompts", [], WIDTH) if rows else Markup("")


def family_plots(report: Report) -> list[tuple[str, Markup]]:
    """Each family's name and its speed-ups, all on one scale; nothing where there is one family only."""
    if len(report.family_figures) < 2:
        return []
    families = {family: _speedups(report.plan.modes, figures) for family, figures in report.family_figures.items()}
    cover = [end for rows in families.values() for _, point in rows for end in point.ends]
    return [(family, _speedup_chart(rows, family, cover, _HALF)) for family, rows in families.items() if rows]


def _speedups(modes: Sequence[Mode], figures: Mapping[str, ModeFigures]) -> list[tuple[str, Point]]:
    return [(mode.title, point) for mode in modes if mode.name != PLAIN and (point := _point(figures[mode.name].speedup))]


def _speedup_chart(rows: Sequence[tuple[str, Point]], scope: str, cover: Sequence[float], width: int) -> Markup:
    title, axis = f"Speed-up over plain decoding, {scope}", "times as fast as plain decoding"
    return interval_chart(rows, title=title, axis=axis, reference=1.0, unit=" ×", cover=cover, width=width)


def sweep_plot(report: Report) -> Markup:
    """τ by the number of passes, and the τ that each would have to exceed."""
    measured = {float(mode.config.num_passes or 0): report.figures[mode.name] for mode in report.plan.of_group("sweep")}
    tau = {passes: point for passes, made in measured.items() if (point := _point(made.mean_acceptance_length))}
    if len(tau) < 2:
        return Markup("")
    limits = {passes: Point(made.break_even) for passes, made in measured.items() if made.break_even is not None}
    lines = [Series("τ, one denoising step", tau), Series("break-even τ", limits, dashed=True)]
    return line_chart(lines, title="Tokens per round by refinement passes", x_axis="refinement passes K", y_axis="tokens per round (τ)")


def ablation_plots(report: Report) -> list[Markup]:
    """τ and speed-up by denoising steps, with and without the refiner."""
    modes = report.plan.of_group("ablation")
    if len({mode.config.draft_steps for mode in modes}) < 2:
        return []
    charts = []
    for what, field in (("tokens per round (τ)", "mean_acceptance_length"), ("speed-up over plain", "speedup")):
        lines = []
        for passes in sorted({mode.config.num_passes or 0 for mode in modes}):
            label = f"refiner, K={passes}" if passes else "no refiner"
            points = {
                float(mode.config.draft_steps): point
                for mode in modes
                if (mode.config.num_passes or 0) == passes and (point := _point(getattr(report.figures[mode.name], field)))
            }
            lines.append(Series(label, points))
        if any(line.points for line in lines):
            charts.append(line_chart(lines, title=f"{what} by denoising steps", x_axis="denoising steps", y_axis=what, width=_HALF))
    return charts


def position_plot(report: Report) -> Markup:
    """Acceptance by position in the block, of the groups' own modes."""
    lines = []
    for mode in main_modes(report):
        shares = report.figures[mode.name].acceptance_by_position
        points = {float(slot): Point(share) for slot, share in enumerate(shares, 1) if share is not None}
        if points:
            lines.append(Series(mode.title, points))
    if not lines:
        return Markup("")
    title, y_axis = "Acceptance by position", "share of proposals accepted"
    return line_chart(lines, title=title, x_axis="position in the block", y_axis=y_axis, from_zero=True)


def lengths_plot(report: Report) -> Markup:
    """How often a round accepted how many tokens."""
    lines = []
    for mode in main_modes(report):
        made = report.figures[mode.name]
        longest = max((other for each in report.figures.values() for other in each.acceptance_lengths), default=1)
        if made.rounds:
            shares = {float(length): Point(made.acceptance_lengths.get(length, 0) / made.rounds) for length in range(1, longest + 1)}
            lines.append(Series(mode.title, shares))
    if not lines:
        return Markup("")
    x_axis = "tokens of a round (accepted drafts + 1)"
    return bar_chart(lines, title="Acceptance lengths", x_axis=x_axis, y_axis="share of rounds")


def stage_plot(report: Report) -> Markup:
    """Milliseconds per token in each stage."""
    rows = [
        (mode.title, {stage: made.stage_ms_per_token[stage] for stage in STAGES})
        for mode in report.plan.modes
        if (made := report.figures[mode.name]).stage_ms_per_token
    ]
    if not rows:
        return Markup("")
    return stack_chart(rows, title="Where the time of a token goes", axis="milliseconds per token", unit=" ms")


def main_modes(report: Report) -> list[Mode]:
    """Those that speculate and have a group of their own, and the bare drafter's one step, as many as there are colours."""
    chosen = [
        mode for mode in report.plan.modes if mode.name != PLAIN and (set(mode.groups) - {"ablation", "sweep"} or mode.name == "steps1-k0")
    ]
    return chosen[:NUM_COLOURS]


def _point(estimate: Estimate | None) -> Point | None:
    return None if estimate is None else Point(estimate.value, estimate.low, estimate.high)
