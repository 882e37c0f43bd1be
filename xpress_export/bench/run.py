"""One run of the experiment: measure, and put the result together with what it was measured on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from xpress_export.bench.environment import describe_environment, describe_subject, load_note
from xpress_export.bench.figures import Measurements
from xpress_export.bench.measure import Job, measure
from xpress_export.bench.memory import PeakMemory, measure_memory
from xpress_export.bench.modes import ModePlan
from xpress_export.bench.prompts import BenchPrompt
from xpress_export.bench.report import Report
from xpress_runtime.errors import EnvironmentProblem
from xpress_runtime.generation import GenerationConfig
from xpress_runtime.session import Session
from xpress_runtime.stats import peak_memory_bytes

Step = Callable[[str], None]


def run_bench(
    session: Session,
    prompts: Sequence[BenchPrompt],
    plan: ModePlan,
    *,
    repeats: int = 1,
    seed: int = 0,
    threads: int | None = None,
    load_before: float | None = None,
    step: Step = lambda _: None,
) -> Report:
    """Measure every mode of ``plan`` on ``prompts``. ``seed``: of the intervals. ``threads`` and ``load_before`` are for the record."""
    started = datetime.now(UTC)
    jobs = measure(session, prompts, plan.modes, repeats=repeats, report=step)
    environment = describe_environment(session, threads=threads, load_before=load_before)
    devices = [job.device_bytes for job in jobs if job.device_bytes is not None]
    return Report(
        measurements=Measurements(prompts, plan.modes, jobs, seed),
        plan=plan,
        subject=describe_subject(session),
        settings=_settings(plan.modes[0].config, prompts, repeats, seed, started),
        environment=environment,
        memory=PeakMemory(peak_memory_bytes(), max(devices, default=None)),
        notes=tuple(note for note in (load_note(environment), _cut_note(jobs, session.bundle.manifest.capacity)) if note),
    )


def with_memory(report: Report, bundle: Path, backend: str, threads: int | None, runtime_cache: Path | None, step: Step) -> Report:
    """The report with each mode's own peak memory, on its first prompt. No session should be open: a GPU's memory would count twice.

    A mode that cannot be measured alone costs a note, not the run.
    """
    prompt = report.measurements.prompts[0].tokens
    peaks, notes = {}, list(report.notes)
    for mode in report.plan.modes:
        step(f"memory, {mode.label}")
        try:
            peaks[mode.name] = measure_memory(bundle, backend, threads, runtime_cache, prompt, mode)
        except EnvironmentProblem as problem:
            notes.append(f"The peak memory of {mode.title} was not measured: {problem}.")
    return replace(report, memory_of_modes=peaks, notes=tuple(notes))


def _cut_note(jobs: Sequence[Job], capacity: int) -> str | None:
    cut = sum(job.result.finish_reason == "capacity" for job in jobs)
    return f"{cut} of {len(jobs)} generations ended at the bundle's capacity of {capacity} tokens." if cut else None


def _settings(config: GenerationConfig, prompts: Sequence[BenchPrompt], repeats: int, seed: int, started: datetime) -> dict[str, Any]:
    return {
        "started": started.isoformat(timespec="seconds"),
        "num_prompts": len(prompts),
        "max_new_tokens": config.max_new_tokens,
        "ignore_stop": config.ignore_stop,
        "repeats": repeats,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "min_p": config.min_p,
        "repetition_penalty": config.repetition_penalty,
        "presence_penalty": config.presence_penalty,
        "frequency_penalty": config.frequency_penalty,
        "seed": seed,
    }
