"""The tables of a report as text cells, the same for the terminal and the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from xpress_export.bench.figures import STAGES, ModeFigures
from xpress_export.bench.intervals import Estimate
from xpress_export.bench.modes import PLAIN, Mode
from xpress_export.bench.plots import main_modes
from xpress_export.bench.report import Report

_FAMILIES_A_TABLE = 6


@dataclass(frozen=True)
class Table:
    """A caption, column names and rows of as many cells; the first cell of a row names it."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __bool__(self) -> bool:
        return bool(self.rows)

    def is_numeric(self, column: int) -> bool:
        """Whether a column holds numbers only, or nothing."""
        return all(row[column][:1] in "0123456789+-" for row in self.rows)


def overview(report: Report) -> Table:
    """Every mode in one line."""
    header = ("", "ms/token", "speed-up", "95 % interval", "τ", "break-even", "accepted", "first token", "tokens/s", "same")
    rows = []
    for mode in report.plan.modes:
        made = report.figures[mode.name]
        rows.append(
            (
                mode.title,
                number(made.ms_per_token),
                times(made.speedup),
                bounds(made.speedup) if mode.name != PLAIN else "",
                number(made.mean_acceptance_length) if mode.name != PLAIN else "1",
                number(made.break_even) if mode.name != PLAIN else "",
                percent(made.acceptance_rate),
                f"{made.time_to_first_token_ms:.0f} ms",
                number(made.tokens_per_second, 1),
                "" if made.num_same_tokens is None else f"{made.num_same_tokens}/{made.num_prompts}",
            )
        )
    return Table("All modes", header, tuple(rows))


def speed(report: Report) -> Table:
    """Speed-up in all its forms."""
    header = ("", "pooled", "95 % interval", "geometric mean", "95 % interval", "median prompt", "slowest", "fastest", "with prefill")
    rows = []
    for mode in report.plan.modes:
        made = report.figures[mode.name]
        by_prompt = made.speedup_by_prompt
        if mode.name != PLAIN and made.speedup is not None and by_prompt is not None:
            each = (by_prompt.median, by_prompt.low, by_prompt.high)
            pooled = (times(made.speedup), bounds(made.speedup), times(made.speedup_geometric_mean), bounds(made.speedup_geometric_mean))
            rows.append((mode.title, *pooled, *map(times, each), times(made.speedup_end_to_end)))
    return Table("Speed-up over plain decoding", header, tuple(rows))


def acceptance(report: Report) -> Table:
    """τ pooled and by prompt, and what it is made of."""
    header = ("", "τ", "95 % interval", "mean of prompts", "median", "lowest", "highest", "accepted", "proposed", "rate", "rounds")
    rows = []
    for mode in report.plan.modes:
        made = report.figures[mode.name]
        by_prompt = made.mean_acceptance_length_by_prompt
        if mode.name != PLAIN and by_prompt is not None:
            each = (by_prompt.mean, by_prompt.median, by_prompt.low, by_prompt.high)
            pooled = (number(made.mean_acceptance_length), bounds(made.mean_acceptance_length))
            rows.append(
                (
                    mode.title,
                    *pooled,
                    *map(number, each),
                    str(made.accepted),
                    str(made.proposed),
                    percent(made.acceptance_rate),
                    str(made.rounds),
                )
            )
    return Table("Acceptance", header, tuple(rows))


def families(report: Report) -> list[Table]:
    """Speed-up and τ of each family of prompts, a few families a table; nothing where there is one family only."""
    names = list(report.family_figures)
    if len(names) < 2:
        return []
    tables = []
    for chosen in (names[first : first + _FAMILIES_A_TABLE] for first in range(0, len(names), _FAMILIES_A_TABLE)):
        rows = []
        for mode in report.plan.modes:
            if mode.name != PLAIN:
                made = [report.family_figures[family][mode.name] for family in chosen]
                rows.append((mode.title, *(_speed_and_tau(each) for each in made)))
        tables.append(Table("By family: speed-up and τ", ("", *chosen), tuple(rows)))
    return tables


def ablation(report: Report) -> Table:
    """Denoising steps by refiner off and on."""
    header = ("denoising steps", "refiner", "τ", "95 % interval", "speed-up", "95 % interval", "break-even", "ms/round")
    rows = []
    for mode in sorted(report.plan.of_group("ablation"), key=lambda mode: (mode.config.draft_steps, mode.config.num_passes or 0)):
        made = report.figures[mode.name]
        tau, passes = made.mean_acceptance_length, mode.config.num_passes
        figures = (
            number(tau),
            bounds(tau),
            times(made.speedup),
            bounds(made.speedup),
            number(made.break_even),
            number(made.ms_per_round, 1),
        )
        rows.append((str(mode.config.draft_steps), f"K={passes}" if passes else "none", *figures))
    return Table("Ablation: denoising steps and refiner", header, tuple(rows))


def sweep(report: Report) -> Table:
    """Every built number of passes."""
    header = ("K", "τ", "95 % interval", "break-even", "speed-up", "95 % interval", "refine ms/round", "ms/round")
    rows = []
    for mode in sorted(report.plan.of_group("sweep"), key=lambda mode: mode.config.num_passes or 0):
        made = report.figures[mode.name]
        tau, refine = made.mean_acceptance_length, None if made.stage_ms_per_round is None else made.stage_ms_per_round["refine"]
        speedup = (times(made.speedup), bounds(made.speedup))
        rows.append(
            (
                str(mode.config.num_passes),
                number(tau),
                bounds(tau),
                number(made.break_even),
                *speedup,
                number(refine),
                number(made.ms_per_round, 1),
            )
        )
    return Table("Refinement passes (K), one denoising step", header, tuple(rows))


def positions(report: Report) -> Table:
    """Acceptance by position of the block's slots."""
    shares = {mode: report.figures[mode.name].acceptance_by_position for mode in main_modes(report)}
    width = max((len(each) for each in shares.values()), default=0)
    rows = ((mode.title, *(number(share) for share in each), *[""] * (width - len(each))) for mode, each in shares.items())
    return Table("Acceptance by position", ("", *map(str, range(1, width + 1))), tuple(rows))


def lengths(report: Report) -> Table:
    """Rounds by the number of tokens that they accepted."""
    counts = {mode: report.figures[mode.name].acceptance_lengths for mode in main_modes(report)}
    return _counted("Rounds by acceptance length", counts)


def widths(report: Report) -> Table:
    """Rounds of "auto" by the number of proposals that they verified."""
    return _counted(
        "Rounds by verified proposals (0: a plain step)",
        {mode: report.figures[mode.name].width_counts for mode in report.plan.of_group("auto")},
    )


def stages(report: Report, of: Literal["token", "round"]) -> Table:
    """Milliseconds per token or per round."""
    rows = []
    for mode in report.plan.modes:
        made = report.figures[mode.name]
        parts = made.stage_ms_per_token if of == "token" else made.stage_ms_per_round
        if parts is not None:
            rows.append((mode.title, *(number(parts[stage]) for stage in STAGES), number(sum(parts.values()))))
    return Table(f"Where the time goes, milliseconds per {of}", ("", *STAGES, "sum"), tuple(rows))


def memory(report: Report) -> Table:
    """Peaks of each mode in a process of its own."""
    rows = []
    for name, peak in report.memory_of_modes.items():
        cells = ("none" if each is None else megabytes(each) for each in (peak.host_bytes, peak.device_bytes))
        rows.append((report.measurements.modes[name].title, *cells))
    return Table("Peak memory of a process that runs one mode", ("", "host", "device"), tuple(rows))


def prompts(report: Report) -> Table:
    """Every prompt: plain time, and the speed-up of the groups' own modes."""
    measured, modes = report.measurements, main_modes(report)
    rows = []
    for prompt in measured.prompts:
        stats = measured.of_prompt(PLAIN, prompt)[0].result.stats
        speedups = (times(measured.speedup_of_prompt(mode.name, prompt)) for mode in modes)
        rows.append(
            (prompt.name, prompt.excerpt, str(stats.prompt_tokens), str(stats.output_tokens), number(stats.ms_per_token), *speedups)
        )
    return Table("Every prompt", ("", "prompt", "tokens in", "out", "plain ms/token", *(mode.title for mode in modes)), tuple(rows))


def number(value: Estimate | float | None, digits: int = 2) -> str:
    """A figure, or nothing where there is none."""
    value = value.value if isinstance(value, Estimate) else value
    return "" if value is None else f"{value:.{digits}f}"


def times(value: Estimate | float | None) -> str:
    return f"{number(value)}×" if value is not None else ""


def bounds(value: Estimate | None) -> str:
    if value is None or value.low is None or value.high is None:
        return ""
    return f"{value.low:.2f}–{value.high:.2f}"


def megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.0f} MB"


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _speed_and_tau(figures: ModeFigures) -> str:
    if figures.speedup is None or figures.mean_acceptance_length is None:
        return ""
    return f"{times(figures.speedup)}, τ {number(figures.mean_acceptance_length)}"


def _counted(caption: str, counts: dict[Mode, dict[int, int]]) -> Table:
    columns: Sequence[int] = sorted({value for each in counts.values() for value in each})
    rows = ((mode.title, *(str(each.get(value, 0)) for value in columns)) for mode, each in counts.items())
    return Table(caption, ("", *map(str, columns)), tuple(rows))
