"""Rounds without a model: seeded acceptance processes and stage costs, on which a policy and fixed widths are timed.

A policy sees noisy times with outliers; the total that is compared is made of the true ones, so that no result hangs on a lucky outlier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from xpress_runtime.speculation import SpeculationPolicy, StageCosts

# Acceptance of each slot given those before [P - 1] and confidences [P - 1], for a round that begins after so many tokens.
Process = Callable[[int, np.random.Generator], tuple[NDArray[np.float64], NDArray[np.float64]]]


class Policy(Protocol):
    def new_request(self) -> None: ...
    def begin(self) -> bool: ...
    def width(self, confidence: Sequence[float] | None) -> int: ...
    def record_plain(self, seconds: float) -> None: ...
    def record_round(
        self, width: int, accepted: int, confidence: Sequence[float] | None, draft_seconds: float, verify_seconds: float
    ) -> None: ...


@dataclass(frozen=True)
class Machine:
    """True costs in seconds. ``drift``: how much slower every stage has become after 1,000 tokens."""

    block_size: int
    widths: Sequence[int]
    sees_block: bool
    draft: float
    plain: float
    per_slot: float
    resume: float = 0.0
    drift: float = 0.0
    rounds_in_flight: int = 1

    def verify(self, width: int) -> float:
        return self.plain + self.per_slot * (width - 1)

    def costs(self) -> StageCosts:
        calibrated = {width: self.verify(width) for width in (1, (self.block_size + 1) // 2, self.block_size)}
        return StageCosts.calibrated(self.draft, calibrated, block_size=self.block_size, resume=self.draft + self.resume)

    def policy(self) -> SpeculationPolicy:
        return SpeculationPolicy(self.block_size, self.widths, self.sees_block, self.costs())


CPU = Machine(8, range(1, 9), True, draft=5e-3, plain=20e-3, per_slot=1.2e-3, resume=1e-3)
WIDE_CPU = Machine(16, range(1, 17), True, draft=5e-3, plain=20e-3, per_slot=1.2e-3, resume=1e-3)
GPU = Machine(16, (1, 16), False, draft=1.5e-3, plain=6e-3, per_slot=0.02e-3, resume=0.2e-3, rounds_in_flight=2)


class Fixed:
    """Always ``width`` slots; 1 is plain decoding."""

    def __init__(self, width: int) -> None:
        self._width = width

    def new_request(self) -> None: ...

    def begin(self) -> bool:
        return self._width > 1

    def width(self, confidence: Sequence[float] | None) -> int:  # noqa: ARG002
        return self._width

    def record_plain(self, seconds: float) -> None: ...

    def record_round(self, *_: object) -> None: ...


@dataclass
class Run:
    """``seconds`` and ``tokens`` of every round, in order; ``drafted``: whether it was one."""

    seconds: list[float]
    tokens: list[int]
    drafted: list[bool]

    @property
    def per_token(self) -> float:
        return sum(self.seconds) / sum(self.tokens)

    def time_of(self, first: int, last: int) -> float:
        """Seconds per token of the rounds that begin in tokens ``first`` … ``last`` - 1."""
        begins = np.cumsum([0, *self.tokens[:-1]])
        inside = (begins >= first) & (begins < last)
        return float(np.array(self.seconds)[inside].sum() / np.array(self.tokens)[inside].sum())


def simulate(
    policy: Policy, machine: Machine, process: Process, num_tokens: int, seed: int, *, request: int = 0, noise: float = 0.05
) -> Run:
    """Decode ``num_tokens``; ``request``: a new one begins every so many tokens (0: never)."""
    clock = np.random.default_rng(seed)
    run = Run([], [], [])
    length, after_plain = 0, False
    late: list[tuple[object, ...]] = []

    def measured(seconds: float) -> float:
        return seconds * float(clock.normal(1.0, noise)) * (4.0 if clock.random() < 0.01 else 1.0)

    def record(keep: int) -> None:
        while len(late) > keep:
            kind, *arguments = late.pop(0)
            getattr(policy, str(kind))(*arguments)

    next_request = request
    while length < num_tokens:
        if request and length >= next_request:
            record(0)
            policy.new_request()
            next_request += request
        slower = 1.0 + machine.drift * length / 1000
        # By place in the text, so that every policy meets the same blocks.
        rng = np.random.default_rng((seed, length))
        acceptance, confidence = process(length, rng)
        accepts = rng.random(machine.block_size - 1) < acceptance
        drafted = policy.begin()
        if drafted:
            shown = confidence if machine.sees_block else None
            width = policy.width(shown)
            accepted = int(np.logical_and.accumulate(accepts[: width - 1]).sum())
            draft = slower * (machine.draft + (machine.resume if after_plain else 0.0))
            verify = slower * machine.verify(width)
            seconds, tokens = draft + verify, 1 + accepted
            late.append(("record_round", width, accepted, shown, measured(draft), measured(verify)))
        else:
            seconds, tokens = slower * machine.plain, 1
            late.append(("record_plain", measured(seconds)))
        record(machine.rounds_in_flight - 1)
        after_plain = not drafted
        length += tokens
        run.seconds.append(seconds)
        run.tokens.append(tokens)
        run.drafted.append(drafted)
    record(0)
    return run


def best_fixed(machine: Machine, process: Process, num_tokens: int, seeds: Sequence[int]) -> tuple[float, int]:
    """Seconds per token of the best fixed width, and that width; 1 is plain decoding."""
    times = {}
    for width in sorted({1, *machine.widths}):
        runs = [simulate(Fixed(width), machine, process, num_tokens, seed) for seed in seeds]
        times[width] = sum(sum(run.seconds) for run in runs) / sum(sum(run.tokens) for run in runs)
    best = min(times, key=times.__getitem__)
    return times[best], best


def constant(acceptance: Sequence[float] | float, num_proposals: int, *, spread: float = 0.0, informative: bool = True) -> Process:
    """The same acceptance in every round, or logits that vary by ``spread``; confidences equal it, or say nothing."""
    logits = np.log(np.broadcast_to(acceptance, num_proposals)) - np.log1p(-np.broadcast_to(acceptance, num_proposals))

    def process(_: int, rng: np.random.Generator) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        true = 1.0 / (1.0 + np.exp(-(logits + spread * rng.normal(size=num_proposals))))
        return true, true if informative else rng.uniform(0.3, 1.0, num_proposals)

    return process


def alternating(first: Process, second: Process, period: int) -> Process:
    def process(length: int, rng: np.random.Generator) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return (second if length // period % 2 else first)(length, rng)

    return process
