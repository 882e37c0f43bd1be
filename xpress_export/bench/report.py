"""The result of a run as data: figures of every mode, one row for each generation, and what they were measured on.

Knows nothing about tables, pages or files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from xpress_export.bench.figures import Measurements, ModeFigures
from xpress_export.bench.measure import Job
from xpress_export.bench.memory import PeakMemory
from xpress_export.bench.modes import PLAIN, ModePlan
from xpress_runtime.stats import Stage

REPORT_FORMAT = 1


@dataclass(frozen=True)
class Report:
    """``memory``: the peak of the whole run, all modes in one process. ``memory_of_modes``: that of each mode in a process of its own,
    where it was measured. ``subject``, ``settings`` and ``environment`` are JSON objects: what was measured, how, and where.
    """

    measurements: Measurements
    plan: ModePlan
    subject: Mapping[str, Any]
    settings: Mapping[str, Any]
    environment: Mapping[str, Any]
    memory: PeakMemory
    memory_of_modes: Mapping[str, PeakMemory] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @cached_property
    def figures(self) -> dict[str, ModeFigures]:
        """By mode, over all prompts."""
        return {name: self.measurements.figures(name) for name in self.measurements.modes}

    @cached_property
    def family_figures(self) -> dict[str, dict[str, ModeFigures]]:
        """By family and mode."""
        made = self.measurements
        return {family: {name: made.figures(name, family) for name in made.modes} for family in made.families}

    @property
    def sampled(self) -> bool:
        return self.measurements.modes[PLAIN].config.temperature > 0

    def to_json(self) -> dict[str, Any]:
        """Everything, down to each generation; numbers are finite."""
        return {
            "format_version": REPORT_FORMAT,
            "subject": dict(self.subject),
            "settings": dict(self.settings),
            "environment": dict(self.environment),
            "notes": [*self.plan.notes, *self.notes],
            "peak_memory": self.memory.to_json(),
            "modes": {name: self._mode_json(name) for name in self.measurements.modes},
            "prompts": [
                {"name": prompt.name, "family": prompt.family, "excerpt": prompt.excerpt, "input_tokens": len(prompt.tokens)}
                for prompt in self.measurements.prompts
            ],
            "jobs": [
                {**row, "acceptance_lengths": job.result.stats.acceptance_lengths, "output": list(job.result.tokens)}
                for row, job in zip(job_rows(self.measurements), self.measurements.jobs, strict=True)
            ],
        }

    def _mode_json(self, name: str) -> dict[str, Any]:
        mode = self.measurements.modes[name]
        config = mode.config
        memory = self.memory_of_modes.get(name)
        return {
            "label": mode.label,
            "groups": list(mode.groups),
            "config": {
                "speculation": config.speculation,
                "drafter": None if name == PLAIN else config.drafter,
                "draft_steps": config.draft_steps if config.drafter == "block" and name != PLAIN else None,
                "num_passes": config.num_passes,
                "shortlist": config.shortlist,
            },
            "figures": self.figures[name].to_json(),
            "families": {family: figures[name].to_json() for family, figures in self.family_figures.items()},
            "peak_memory": None if memory is None else memory.to_json(),
        }


def job_rows(measurements: Measurements) -> list[dict[str, Any]]:
    """One flat row for each generation, in the order in which they ran; times in milliseconds.

    ``speedup`` is over plain decoding of the same prompt in the same repeat; ``status`` says why the generation ended.
    """
    plain = {(job.prompt.name, job.repeat): job for job in measurements.jobs if job.mode.name == PLAIN}
    return [_row(job, plain[job.prompt.name, job.repeat]) for job in measurements.jobs]


def _row(job: Job, plain: Job) -> dict[str, Any]:
    stats, config = job.result.stats, job.mode.config
    base, made = plain.result.stats.ms_per_token, stats.ms_per_token
    return {
        "job": job.name,
        "prompt": job.prompt.name,
        "family": job.prompt.family,
        "mode": job.mode.name,
        "groups": " ".join(job.mode.groups),
        "repeat": job.repeat,
        "seed": stats.seed,
        "input_tokens": stats.prompt_tokens,
        "output_tokens": stats.output_tokens,
        "rounds": stats.rounds,
        "proposed_tokens": stats.proposed,
        "accepted_tokens": stats.accepted,
        "acceptance_rate": stats.acceptance_rate,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "time_to_first_token_ms": 1e3 * stats.time_to_first_token,
        "draft_ms": 1e3 * stats.stage_seconds[Stage.DRAFT],
        "refine_ms": 1e3 * stats.stage_seconds[Stage.REFINE],
        "verify_ms": 1e3 * stats.stage_seconds[Stage.VERIFY],
        "host_ms": 1e3 * stats.host_seconds,
        "decode_ms": 1e3 * stats.decode_seconds,
        "total_ms": 1e3 * job.total_seconds,
        "ms_per_token": made,
        "speedup": base / made if base and made else None,
        "same_tokens": None if config.temperature else job.result.tokens == plain.result.tokens,
        "status": job.result.finish_reason,
    }
