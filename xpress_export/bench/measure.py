"""Running every prompt in every mode on one session: same threads, same machine, taking turns.

Knows nothing about what the modes mean or how figures are shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from xpress_export.bench.modes import Mode
from xpress_export.bench.prompts import BenchPrompt
from xpress_runtime.backends import Backend
from xpress_runtime.backends.device import DeviceBackend
from xpress_runtime.generation import MAX_SEED, GenerationResult
from xpress_runtime.session import Session

WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Job:
    """One generation. ``repeat`` counts from 1; ``total_seconds`` is what the caller waited, prefill and text included.

    ``device_bytes``: memory in use on the device afterwards, by whatever process; None without a device.
    """

    prompt: BenchPrompt
    mode: Mode
    repeat: int
    result: GenerationResult
    total_seconds: float
    device_bytes: int | None

    @property
    def name(self) -> str:
        return f"{self.prompt.name}.{self.mode.name}.{self.repeat}"


def num_steps(prompts: Sequence[BenchPrompt], modes: Sequence[Mode], repeats: int) -> int:
    """How many steps :func:`measure` reports."""
    return len(modes) + repeats * len(prompts)


def check_modes(session: Session, prompt: BenchPrompt, modes: Sequence[Mode]) -> None:
    """Let the session refuse what the bundle was not built for (OptionError, BundleError) before anything is measured."""
    for mode in modes:
        session.stream(prompt.tokens, mode.config)


def measure(
    session: Session,
    prompts: Sequence[BenchPrompt],
    modes: Sequence[Mode],
    *,
    repeats: int = 1,
    report: Callable[[str], None] = lambda _: None,
) -> list[Job]:
    """Generate every prompt ``repeats`` times in every mode, the modes taking turns on each prompt and another one going first each time.

    A short generation in every mode goes before, so that loading and first allocations are not measured. Where tokens are sampled, a prompt
    has one seed for all modes, and another one in each repeat. ``report`` hears each step.
    """
    for mode in modes:
        report(f"warm-up, {mode.label}")
        limit = min(WARM_UP_TOKENS, mode.config.max_new_tokens)
        session.generate(prompts[0].tokens, replace(mode.config, max_new_tokens=limit))
    jobs = []
    for turn in range(repeats * len(prompts)):
        repeat, index = divmod(turn, len(prompts))
        report(f"prompt {index + 1} of {len(prompts)}" + (f", repeat {repeat + 1} of {repeats}" if repeats > 1 else ""))
        first = turn % len(modes)
        jobs += [_run(session, prompts[index], mode, repeat + 1, turn) for mode in (*modes[first:], *modes[:first])]
    return jobs


def _run(session: Session, prompt: BenchPrompt, mode: Mode, repeat: int, turn: int) -> Job:
    config = mode.config
    if config.temperature and config.seed is not None:
        config = replace(config, seed=(config.seed + turn) % (MAX_SEED + 1))
    started = time.perf_counter()
    result = session.generate(prompt.tokens, config)
    seconds = time.perf_counter() - started
    return Job(prompt, mode, repeat, result, seconds, device_bytes(session.backend))


def device_bytes(backend: Backend) -> int | None:
    """Bytes in use on the backend's GPU, by whatever process; None on a CPU."""
    if not isinstance(backend, DeviceBackend):
        return None
    free, total = backend.device.cuda.memory()
    return total - free
