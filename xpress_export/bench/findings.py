"""What a report says in words, no more than its intervals support; and thresholds, which a run can fail.

The questions are those of the experiment: is speculation faster, does acceptance fall with fewer denoising steps, does the refiner bring it
back, and is the output the target's own.
"""

from __future__ import annotations

from dataclasses import dataclass

from xpress_export.bench.figures import ModeFigures
from xpress_export.bench.intervals import Estimate
from xpress_export.bench.modes import PLAIN, Mode
from xpress_export.bench.report import Report
from xpress_runtime.errors import CheckFailed

FEW_PROMPTS = 10


def findings(report: Report) -> list[str]:
    """A sentence or two for each question that the measured modes can answer."""
    return [line for line in (_speed(report), _fastest(report), _steps(report), _refiner(report), _exactness(report), _few(report)) if line]


def interval(estimate: Estimate | None, unit: str = "") -> str:
    """``1.05 (0.98 to 1.12)``, or the value alone where it has no interval."""
    if estimate is None:
        return "no figure"
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.2f}{unit}"
    return f"{estimate.value:.2f}{unit} ({estimate.low:.2f} to {estimate.high:.2f})"


def _single(report: Report, group: str) -> Mode | None:
    return next(iter(report.plan.of_group(group)), None)


def _one_step(report: Report) -> Mode | None:
    return report.measurements.modes.get("steps1-k0")


def _speed(report: Report) -> str | None:
    mode = _single(report, "D") or _single(report, "C")
    if mode is None or (speedup := report.figures[mode.name].speedup) is None:
        return None
    figures = report.figures[mode.name]
    if speedup.low is None:
        verdict = "measured on too few prompts to say whether it is faster than plain decoding"
    elif not speedup.excludes(1):
        verdict = "too close to plain decoding to call"
    else:
        verdict = "faster than plain decoding" if speedup.value > 1 else "slower than plain decoding"
    return f"{mode.title} is {verdict}: {interval(speedup, ' ×')}. {_break_even(figures)}"


def _break_even(figures: ModeFigures) -> str:
    tau = figures.mean_acceptance_length
    if tau is None or figures.break_even is None:
        return ""
    return f"It keeps {tau.value:.2f} tokens a round and breaks even at {figures.break_even:.2f}."


def _fastest(report: Report) -> str | None:
    speedups = {name: made.speedup for name, made in report.figures.items() if name != PLAIN and made.speedup is not None}
    if len(speedups) < 2:
        return None
    name, speedup = max(speedups.items(), key=lambda entry: entry[1].value)
    gains = speedup.excludes(1) and speedup.value > 1
    caution = (
        "" if gains else ", which is slower than plain decoding" if speedup.excludes(1) else ", which is no gain that these prompts show"
    )
    return f"The fastest of the speculative modes is {report.measurements.modes[name].title}: {interval(speedup, ' ×')}{caution}."


def _steps(report: Report) -> str | None:
    """Does acceptance fall when denoising steps are cut?"""
    many, one = _single(report, "C"), _one_step(report)
    if many is None or one is None or many.name == one.name:
        return None
    change = report.measurements.acceptance_difference(one.name, many.name)
    if change is None:
        return None
    steps = many.config.draft_steps
    before, after = report.figures[many.name].mean_acceptance_length, report.figures[one.name].mean_acceptance_length
    assert before is not None and after is not None
    return (
        f"Fewer steps: without refiner, τ goes from {before.value:.2f} with {steps} steps to {after.value:.2f} with one. {_change(change)}"
    )


def _refiner(report: Report) -> str | None:
    """Does refinement bring acceptance back?"""
    refined, one, many = _single(report, "D"), _one_step(report), _single(report, "C")
    if refined is None or one is None:
        return None
    change = report.measurements.acceptance_difference(refined.name, one.name)
    stages, bare = report.figures[refined.name].stage_ms_per_round, report.figures[one.name].stage_ms_per_round
    if change is None or stages is None or bare is None:
        return None
    before, after = report.figures[one.name].mean_acceptance_length, report.figures[refined.name].mean_acceptance_length
    assert before is not None and after is not None
    passes = refined.config.num_passes
    # Without passes the stage still takes the drafts from the logits.
    cost = f"{stages['refine'] - bare['refine']:.2f} ms more a round"
    line = f"Refiner: after one step, τ goes from {before.value:.2f} to {after.value:.2f} with K={passes}, for {cost}. {_change(change)}"
    if many is not None and many.name != one.name:
        beside = report.measurements.acceptance_difference(refined.name, many.name)
        rounds = [report.figures[mode.name].ms_per_round for mode in (refined, many)]
        line += (
            f" Beside {many.config.draft_steps} steps without refiner, τ differs by {_signed(beside)}, "
            f"and a round takes {rounds[0]:.1f} ms instead of {rounds[1]:.1f}."
        )
    return line


def _change(change: Estimate) -> str:
    if not change.excludes(0):
        return f"That is {_signed(change)}: no difference that these prompts show."
    return f"That is a {'gain' if change.value > 0 else 'loss'}: {_signed(change)}."


def _signed(change: Estimate | None) -> str:
    if change is None:
        return "no figure"
    bounds = "" if change.low is None or change.high is None else f" ({change.low:+.2f} to {change.high:+.2f})"
    return f"{change.value:+.2f}{bounds}"


def _exactness(report: Report) -> str:
    if report.sampled:
        return "Tokens are sampled: modes agree with plain decoding in distribution, not token by token."
    total = len(report.measurements.prompts)
    different = {name: total - (made.num_same_tokens or 0) for name, made in report.figures.items() if made.num_same_tokens != total}
    if not different:
        return f"Every mode gave plain decoding's tokens on all {total} prompts."
    listed = ", ".join(f"{report.measurements.modes[name].title} on {number}" for name, number in different.items())
    return f"OTHER TOKENS THAN PLAIN DECODING'S: {listed} of {total} prompts. Greedy output differs by near ties or a defect: run parity."


def _few(report: Report) -> str | None:
    num_prompts = len(report.measurements.prompts)
    if num_prompts >= FEW_PROMPTS:
        return None
    return f"With {num_prompts} prompt{'s' if num_prompts > 1 else ''}, intervals are rough: they are too narrow below {FEW_PROMPTS}."


@dataclass(frozen=True)
class Threshold:
    """What a run must reach: ``at_least`` in ``figure`` of the mode of ``group``; ``option`` is how it was asked for."""

    option: str
    figure: str
    group: str
    at_least: float


def require_thresholds(report: Report, thresholds: list[Threshold]) -> None:
    """CheckFailed that names every threshold that was missed; pooled values count, not the ends of their intervals."""
    missed = []
    for threshold in thresholds:
        figures = report.figures[report.plan.of_group(threshold.group)[0].name]
        estimate = figures.speedup if threshold.figure == "speed-up" else figures.mean_acceptance_length
        if estimate is None or estimate.value < threshold.at_least:
            reached = "no figure" if estimate is None else f"{estimate.value:.3f}"
            missed.append(
                f"{threshold.figure} of group {threshold.group} is {reached}, expected at least {threshold.at_least:g} ({threshold.option})"
            )
    if missed:
        raise CheckFailed("; ".join(missed))
