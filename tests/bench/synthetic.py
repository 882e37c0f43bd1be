"""A run that was not measured: a manifest with every group, and generations whose figures follow from a seed, for tests without a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from xpress_export.bench.figures import Measurements
from xpress_export.bench.measure import Job
from xpress_export.bench.memory import PeakMemory
from xpress_export.bench.modes import PLAIN, Mode, ModePlan, plan_modes
from xpress_export.bench.prompts import BenchPrompt
from xpress_export.bench.report import Report
from xpress_runtime.generation import GenerationConfig, GenerationResult
from xpress_runtime.manifest import CacheShape, DrafterRecord, DraftModelRecord, Manifest, Origin, TargetRecord
from xpress_runtime.stats import GenerationStats, Stage

BLOCK_SIZE = 8
CACHES = CacheShape(1, 1, 8)
PLAIN_MS = 20.0
# How likely a proposal is right, by mode; what a round costs beside the target's pass, in milliseconds.
ACCEPTANCE = {"autoregressive": 0.6, "lookup": 0.2, "auto": 0.5}
DRAFT_MS = {"autoregressive": 30.0, "lookup": 0.1, "auto": 4.0}


def manifest(**changes: Any) -> Manifest:
    """A bundle with refiner and autoregressive drafter, block size 8, K of 2, 4, 1 and 0."""
    origin = Origin("folder/tiny", None, "apache-2.0", "0123456789abcdef" * 4)
    fields: dict[str, Any] = {
        "target": TargetRecord(origin, "llama", 16, 100, 512, (2,), CACHES),
        "drafter": DrafterRecord(origin, BLOCK_SIZE, 4, (0,), "xpress", 4, None, "previous", 512, 100, CACHES),
        "draft_model": DraftModelRecord(origin, (0, 1), 16, 100, True, CACHES),
        "num_passes": (2, 4, 1, 0),
        "shortlists": (0, 256),
        "sampling": True,
        "base_head": False,
        "capacity": 512,
        "cache_rows": 1024,
        "prefill_chunk": 128,
        "batch": 1,
        "graph_sets": (),
        "has_tokenizer": True,
        "files": {},
        "built_with": {"torch": "2"},
        **changes,
    }
    return Manifest(**fields)


def result(
    lengths: Sequence[int],
    *,
    num_proposals: int = BLOCK_SIZE - 1,
    draft_ms: float = 0.0,
    refine_ms: float = 0.0,
    verify_ms: float = PLAIN_MS,
    host_ms: float = 0.0,
    prefill_ms: float = 50.0,
    tokens: Sequence[int] | None = None,
    num_passes: int | None = None,
) -> GenerationResult:
    """A generation whose rounds accepted ``lengths`` tokens each; times are those of one round."""
    stats = GenerationStats(12, num_proposals, num_passes, proposals=[num_proposals] * len(lengths))
    stats.acceptance_lengths, stats.kept_lengths = list(lengths), list(lengths)
    seconds = {Stage.DRAFT: draft_ms, Stage.REFINE: refine_ms, Stage.VERIFY: verify_ms}
    for stage, each in seconds.items():
        stats.stage_seconds[stage] = len(lengths) * each / 1e3
    stats.decode_seconds = len(lengths) * (sum(seconds.values()) + host_ms) / 1e3
    stats.prefill_seconds = stats.stage_seconds[Stage.PREFILL] = prefill_ms / 1e3
    made = tuple(range(1 + sum(lengths))) if tokens is None else tuple(tokens)
    return GenerationResult("text", made, "length", stats)


def prompts(families: Sequence[str] = ("math", "code", "chat"), each: int = 4, excerpt: str = "Why?") -> list[BenchPrompt]:
    return [BenchPrompt(family, number, excerpt, (1, 2, 3)) for family in families for number in range(1, each + 1)]


def job(prompt: BenchPrompt, mode: Mode, made: GenerationResult, repeat: int = 1) -> Job:
    return Job(prompt, mode, repeat, made, made.stats.prefill_seconds + made.stats.decode_seconds, None)


def made_up(plan: ModePlan, asked: Sequence[BenchPrompt], *, repeats: int = 1, num_tokens: int = 64, seed: int = 0) -> list[Job]:
    """Generations in which more steps and more passes bring more accepted proposals, and cost time."""
    random = np.random.default_rng(seed)
    jobs = []
    for repeat in range(1, repeats + 1):
        for prompt in asked:
            ease = random.uniform(0.7, 1.3)
            jobs += [job(prompt, mode, _generation(mode, ease, num_tokens, random), repeat) for mode in plan.modes]
    return jobs


def _generation(mode: Mode, ease: float, num_tokens: int, random: np.random.Generator) -> GenerationResult:
    noise = random.uniform(0.97, 1.03)
    if mode.name == PLAIN:
        return result([1] * num_tokens, num_proposals=0, verify_ms=PLAIN_MS * noise, host_ms=0.2)
    steps, passes = mode.config.draft_steps, mode.config.num_passes or 0
    likely = min(ACCEPTANCE.get(mode.name, 0.4 + 0.02 * steps + 0.05 * min(passes, 2)) * ease, 0.95)
    lengths: list[int] = []
    while (room := num_tokens - sum(lengths)) > 0:
        accepted = int(np.argmin(random.random(BLOCK_SIZE - 1) < likely)) if likely < 1 else BLOCK_SIZE - 1
        lengths.append(min(accepted + 1, room))
    draft = DRAFT_MS.get(mode.name, 3.0 * steps)
    times = {"draft_ms": draft * noise, "refine_ms": 0.6 * passes, "verify_ms": 26 * noise, "host_ms": 0.3}
    return result(lengths, num_passes=mode.config.num_passes, **times)


def report(
    asked: Sequence[BenchPrompt] | None = None, *, groups: Sequence[str] | None = None, temperature: float = 0.0, **fields: Any
) -> Report:
    """A whole report about :func:`made_up` generations."""
    asked = prompts() if asked is None else asked
    chosen = {} if groups is None else {"groups": groups}
    plan = plan_modes(manifest(), GenerationConfig(64, temperature=temperature, seed=0), **chosen)
    origin = {"source": "tiny", "revision": None, "licence": "apache-2.0", "identity": "0123456789abcdef"}
    subject = {
        **dict.fromkeys(("target", "drafter"), origin),
        "draft_model": {**origin, "layers": (0, 1)},
        "bundle": "demo-bundle",
        "backend": "ort-cpu",
        "graph_set": "fp32-length",
        "head": "xpress",
        "block_size": BLOCK_SIZE,
        "num_passes": [2, 4, 1, 0],
        "shortlists": [0],
        "capacity": 512,
        "prefill_chunk": 128,
        "built_with": {"torch": "2"},
    }
    machine = {"system": "Linux", "architecture": "x86_64", "processor": "A processor", "num_cores": 2, "num_threads": None}
    machine |= {"memory_bytes": 8_000_000_000, "device": None, "load_before": 0.1}
    values: dict[str, Any] = {
        "measurements": Measurements(asked, plan.modes, made_up(plan, asked)),
        "plan": plan,
        "subject": subject,
        "settings": {"started": "2024-03-31T10:00:00+00:00", "num_prompts": len(asked), "max_new_tokens": 64, "temperature": temperature},
        "environment": {"versions": {"python": "3.11"}, "machine": machine},
        "memory": PeakMemory(750_000_000, None),
        **fields,
    }
    return Report(**values)
