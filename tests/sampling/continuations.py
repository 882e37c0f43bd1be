"""Two tokens after a prompt, sampled many times by the runtime's own loop: every row of a plan starts from one text with a seed of its own.

The prompt is read once, and what it leaves in the caches is copied to every row. What a round writes behind it, the next sample overwrites.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from xpress_runtime.backends.base import Buffer
from xpress_runtime.buffers import cache_inputs
from xpress_runtime.generation import GenerationConfig
from xpress_runtime.loop import Loop
from xpress_runtime.loops import Loops
from xpress_runtime.plan import Plan
from xpress_runtime.prefill import prefill
from xpress_runtime.sampling import noise_key
from xpress_runtime.stats import GenerationStats
from xpress_runtime.verification import SamplingMemory

# Its last tokens stood there before, so that prompt lookup has something to propose, and penalties something to count.
TEXT = (2, 5, 1, 2, 5)


@dataclass(frozen=True)
class Pairs:
    """How often each two tokens were written [V, V], and in which share of the first rounds the first draft was accepted."""

    counts: NDArray[np.int64]
    acceptance: float


def sample_pairs(plan: Plan, config: GenerationConfig, num_samples: int) -> Pairs:
    """Continuations of :data:`TEXT`, of which the last token counts as output, with the seeds 0, 1, 2, …"""
    loop = Loops().loop(plan, config)
    prompt, anchor, position = TEXT[:-1], TEXT[-1], len(TEXT) - 1
    begin(plan, loop, config, prompt, anchor)
    numbers = plan.part(SamplingMemory).rows
    buffers = plan.buffers
    state = [
        buffers.anchor,
        buffers.predecessor,
        buffers.position,
        buffers.context_position,
        buffers.active,
        buffers.block_ids,
        numbers.counts,
    ]
    saved = [buffer.read() for buffer in state]
    keys = noise_keys(num_samples)
    stats = GenerationStats(len(prompt), plan.block_size - 1, None)
    pairs = np.zeros((num_samples, 2), np.int64)
    num_accepted = 0
    assert num_samples % plan.num_rows == 0
    for start in range(0, num_samples, plan.num_rows):
        for buffer, values in zip(state, saved, strict=True):
            buffer.write(values)
        plan.positions[:] = position
        these = slice(start, start + plan.num_rows)
        numbers.noise_key.write(keys[these])
        first = loop.round(stats)
        num_accepted += int((first.accepted > 0).sum())
        pairs[these] = first.tokens[:, :2]
        needs_more = first.num_emitted == 1
        if needs_more.any():
            pairs[these, 1] = np.where(needs_more, loop.round(stats).tokens[:, 0], pairs[these, 1])
    vocab_size = plan.bundle.manifest.target.vocab_size
    counts = np.bincount(pairs @ [vocab_size, 1], minlength=vocab_size**2).reshape(vocab_size, vocab_size)
    return Pairs(counts, num_accepted / num_samples)


def begin(plan: Plan, loop: Loop, config: GenerationConfig, prompt: Sequence[int], anchor: int) -> None:
    """Every row at its first round after the prompt and ``anchor``; the settings' noise is still that of one seed."""
    for row in range(plan.num_rows):
        loop.verification.start(row, replace(config, seed=0), prompt)
    prefill(plan, 0, np.asarray(prompt, np.int64), loop.drafter)
    for caches in plan.caches.values():
        for name in cache_inputs(caches):
            _repeat_first_row(caches[name])
    for row in range(plan.num_rows):
        plan.start(row, anchor, prompt[-1], len(prompt))
        if loop.drafter is not None:
            loop.drafter.start(row, prompt, anchor)


@cache
def noise_keys(num_seeds: int) -> NDArray[np.int64]:
    """Of the seeds 0, 1, 2, …"""
    return np.array([noise_key(seed) for seed in range(num_seeds)])


def _repeat_first_row(buffer: Buffer) -> None:
    values = buffer.read()
    values[:] = values[:1]
    buffer.write(values)
