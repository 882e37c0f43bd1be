"""Decoding without a model: seeded texts, each with the block that a drafter would propose at every place, and machines that cost time.

Every policy meets the same block at the same place. A policy sees noisy times with outliers; totals are made of the true ones, so that no
result hangs on a lucky outlier.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from xpress_runtime.speculation import SpeculationPolicy, StageCosts

Array = NDArray[np.float64]
# Places in a text [n] and its generator → acceptance of each slot given those before it, and confidences, both [n, num_proposals].
Process = Callable[[NDArray[np.int64], np.random.Generator], tuple[Array, Array]]


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
    """True costs in seconds. ``resume``: added to the first draft after plain steps; ``drift``: slower by this share every 1,000 tokens."""

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

    def policy(self) -> SpeculationPolicy:
        verify = {width: self.verify(width) for width in (1, (self.block_size + 1) // 2, self.block_size)}
        costs = StageCosts.calibrated(self.draft, verify, block_size=self.block_size, resume=self.draft + self.resume)
        return SpeculationPolicy(self.block_size, self.widths, self.sees_block, costs)


CPU = Machine(8, range(1, 9), True, draft=5e-3, plain=20e-3, per_slot=1.2e-3, resume=1e-3)
BLIND_CPU = Machine(8, range(1, 9), False, draft=5e-3, plain=20e-3, per_slot=1.2e-3, resume=1e-3)
WIDE_CPU = Machine(16, range(1, 17), True, draft=5e-3, plain=20e-3, per_slot=1.2e-3, resume=1e-3)
SLOWING_CPU = Machine(8, range(1, 9), True, draft=5e-3, plain=20e-3, per_slot=1.2e-3, resume=1e-3, drift=0.3)
GPU = Machine(16, (1, 16), False, draft=1.5e-3, plain=6e-3, per_slot=0.02e-3, resume=0.2e-3, rounds_in_flight=2)


class Fixed:
    """Always ``width`` slots; 1 is plain decoding."""

    def __init__(self, width: int) -> None:
        self._width = width

    def new_request(self) -> None: ...

    def begin(self) -> bool:
        return self._width > 1

    def width(self, _: Sequence[float] | None) -> int:
        return self._width

    def record_plain(self, seconds: float) -> None: ...

    def record_round(self, *_: object) -> None: ...


class Text:
    """What a drafter would propose at each of ``num_tokens`` places: how many proposals are accepted [num_tokens], and confidences."""

    def __init__(self, process: Process, num_proposals: int, num_tokens: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        acceptance, self.confidences = process(np.arange(num_tokens), rng)
        accepts = rng.random((num_tokens, num_proposals)) < acceptance
        self.num_accepted = np.logical_and.accumulate(accepts, axis=1).sum(axis=1)
        self.num_tokens, self.seed = num_tokens, seed


@dataclass
class Run:
    """Of every round: the place where it began, its seconds and tokens, and whether it was drafted."""

    places: list[int]
    seconds: list[float]
    tokens: list[int]
    drafted: list[bool]

    @property
    def per_token(self) -> float:
        return sum(self.seconds) / sum(self.tokens)

    def drafted_share(self, first: int, last: int) -> float:
        """Of the rounds that begin at places ``first`` … ``last`` - 1."""
        return float(np.mean([drafted for place, drafted in zip(self.places, self.drafted, strict=True) if first <= place < last]))


def simulate(policy: Policy, machine: Machine, text: Text, *, request: int | None = None) -> Run:
    """Decode ``text``; with ``request``, another begins every so many tokens."""
    clock = np.random.default_rng((text.seed, 1))
    records: deque[Callable[[], None]] = deque()
    run = Run([], [], [], [])
    place, next_request, after_plain = 0, request, False

    def measured(seconds: float) -> float:
        return seconds * float(clock.normal(1.0, 0.05)) * (4.0 if clock.random() < 0.01 else 1.0)

    def record(num_left: int) -> None:
        while len(records) > num_left:
            records.popleft()()

    while place < text.num_tokens:
        if next_request is not None and request is not None and place >= next_request:
            record(0)
            policy.new_request()
            next_request += request
        slower = 1.0 + machine.drift * place / 1000
        drafted = policy.begin()
        if drafted:
            confidence = text.confidences[place].tolist() if machine.sees_block else None
            width = policy.width(confidence)
            accepted = min(int(text.num_accepted[place]), width - 1)
            draft = slower * (machine.draft + machine.resume * after_plain)
            verify = slower * machine.verify(width)
            records.append(partial(policy.record_round, width, accepted, confidence, measured(draft), measured(verify)))
            seconds, tokens = draft + verify, 1 + accepted
        else:
            seconds, tokens = slower * machine.plain, 1
            records.append(partial(policy.record_plain, measured(seconds)))
        record(machine.rounds_in_flight - 1)
        after_plain = not drafted
        run.places.append(place)
        run.seconds.append(seconds)
        run.tokens.append(tokens)
        run.drafted.append(drafted)
        place += tokens
    record(0)
    return run


def total_per_token(runs: Sequence[Run]) -> float:
    return sum(sum(run.seconds) for run in runs) / sum(sum(run.tokens) for run in runs)


def best_fixed(machine: Machine, texts: Sequence[Text]) -> tuple[float, int]:
    """Seconds per token of the best fixed width on just these texts, and that width; 1 is plain decoding."""
    return min((total_per_token([simulate(Fixed(width), machine, text) for text in texts]), width) for width in {1, *machine.widths})


# Processes.


def constant(acceptance: Sequence[float] | float, *, spread: float = 0.0, informative: bool = True, num_proposals: int = 7) -> Process:
    """Every block alike, or with logits that vary by ``spread``; confidences equal acceptance, or say nothing."""
    logits = _logit(np.broadcast_to(np.asarray(acceptance, np.float64), num_proposals))

    def process(places: NDArray[np.int64], rng: np.random.Generator) -> tuple[Array, Array]:
        shape = (len(places), num_proposals)
        true = _probability(logits + spread * rng.normal(size=shape))
        return true, true if informative else rng.uniform(0.3, 1.0, shape)

    return process


def useless_but_sure(confidence: float, *, num_proposals: int = 7) -> Process:
    """Hardly a proposal is accepted, and confidences lie around ``confidence``."""

    def process(places: NDArray[np.int64], rng: np.random.Generator) -> tuple[Array, Array]:
        shape = (len(places), num_proposals)
        return np.full(shape, 1e-3), np.clip(confidence + 0.04 * rng.normal(size=shape), 0.0, 1.0)

    return process


def alternating(first: Process, second: Process, period: int) -> Process:
    def process(places: NDArray[np.int64], rng: np.random.Generator) -> tuple[Array, Array]:
        is_first = (places // period % 2 == 0)[:, None]
        one, other = first(places, rng), second(places, rng)
        return np.where(is_first, one[0], other[0]), np.where(is_first, one[1], other[1])

    return process


def requests_of_many_kinds(level: float, length: int, *, num_proposals: int = 7) -> Process:
    """Each request of ``length`` tokens has its own mean acceptance, each block its own; confidences are noisy, biased and too sure."""

    def process(places: NDArray[np.int64], rng: np.random.Generator) -> tuple[Array, Array]:
        shape = (len(places), num_proposals)
        kinds = rng.normal(level, 0.8, len(places) // length + 1)[places // length]
        logits = kinds[:, None] - 0.1 * np.arange(num_proposals) + 1.5 * rng.normal(size=shape)
        return _probability(logits), _probability((logits + rng.normal(size=shape) - 0.4) / 0.7)

    return process


def _logit(probability: Array) -> Array:
    return np.log(probability) - np.log1p(-probability)


def _probability(logit: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-logit))
