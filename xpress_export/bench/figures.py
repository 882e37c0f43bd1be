"""The figures of a mode, over all prompts or those of one family: speed, acceptance, and where the time goes.

Decoding figures leave out prefill and the first token, as those of a single generation do. Knows nothing about how they are shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from xpress_export.bench.intervals import Bootstrap, Estimate, Floats, Spread, spread
from xpress_export.bench.measure import Job
from xpress_export.bench.modes import PLAIN, Mode
from xpress_export.bench.prompts import BenchPrompt
from xpress_runtime.generation import GenerationResult
from xpress_runtime.stats import Stage

# Parts of decoding time, in the order of a round.
STAGES = (Stage.DRAFT.value, Stage.REFINE.value, Stage.VERIFY.value, "host")


@dataclass(frozen=True)
class ModeFigures:
    """Times are milliseconds; None where there is nothing to divide by.

    ``mean_acceptance_length`` (τ): kept tokens per round, pooled; ``…_by_prompt``: the same of each prompt. ``acceptance_by_position``: for
    each slot, the share of the rounds that verified it in which it was accepted. ``acceptance_lengths``: how many rounds accepted how many
    tokens. ``width_counts``: how many rounds verified how many proposals, 0 being plain steps. ``stage_ms_per_token`` and
    ``…_per_round``: draft, refine, verify and host. ``time_to_first_token_ms``: median over prompts.

    Over plain decoding: ``speedup`` of decoding, pooled; ``speedup_geometric_mean`` and ``speedup_by_prompt`` of the paired ratios of each
    prompt; ``speedup_end_to_end`` with prefill. ``break_even``: the time of a round over that of a plain step, which τ has to exceed.
    ``num_same_tokens``: prompts whose tokens equal those of plain decoding; None where tokens are sampled.
    """

    num_prompts: int
    num_jobs: int
    tokens: int
    rounds: int
    proposed: int
    accepted: int
    acceptance_rate: float | None
    mean_acceptance_length: Estimate | None
    mean_acceptance_length_by_prompt: Spread | None
    acceptance_by_position: tuple[float | None, ...]
    acceptance_lengths: dict[int, int]
    width_counts: dict[int, int]
    ms_per_token: Estimate | None
    tokens_per_second: float | None
    ms_per_round: float | None
    stage_ms_per_token: dict[str, float] | None
    stage_ms_per_round: dict[str, float] | None
    time_to_first_token_ms: float
    speedup: Estimate | None
    speedup_geometric_mean: Estimate | None
    speedup_by_prompt: Spread | None
    speedup_end_to_end: Estimate | None
    break_even: float | None
    num_same_tokens: int | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Measurements:
    """The jobs of a run, by prompt and mode. ``seed`` is that of the bootstrap."""

    def __init__(self, prompts: Sequence[BenchPrompt], modes: Sequence[Mode], jobs: Sequence[Job], seed: int = 0) -> None:
        self.prompts = tuple(prompts)
        self.modes = {mode.name: mode for mode in modes}
        self.jobs = tuple(jobs)
        self.families = tuple(dict.fromkeys(prompt.family for prompt in prompts))
        self._seed = seed
        self._results: dict[tuple[str, str], list[Job]] = {}
        for job in jobs:
            self._results.setdefault((job.mode.name, job.prompt.name), []).append(job)

    def of_prompt(self, mode: str, prompt: BenchPrompt) -> list[Job]:
        """The repeats of one prompt in one mode."""
        return self._results[mode, prompt.name]

    def speedup_of_prompt(self, mode: str, prompt: BenchPrompt) -> float | None:
        """Plain milliseconds per token over those of ``mode``, all repeats together; None where no token was decoded."""
        plain, made = _Totals([self.of_prompt(PLAIN, prompt)]), _Totals([self.of_prompt(mode, prompt)])
        return _over(float(plain.seconds[0] * made.tokens[0]), float(made.seconds[0] * plain.tokens[0]))

    def same_tokens(self, mode: str, prompt: BenchPrompt) -> bool:
        """Whether all repeats of a prompt gave plain decoding's tokens."""
        expected = self.of_prompt(PLAIN, prompt)[0].result.tokens
        return all(job.result.tokens == expected for job in self.of_prompt(mode, prompt))

    def acceptance_difference(self, mode: str, base: str) -> Estimate | None:
        """τ of ``mode`` minus τ of ``base``, over all prompts."""
        first, second = self._totals(mode, self.prompts), self._totals(base, self.prompts)
        return self._bootstrap(self.prompts).difference_of_ratios((first.tokens, first.rounds), (second.tokens, second.rounds))

    def figures(self, mode: str, family: str | None = None) -> ModeFigures:
        """Figures of ``mode`` over all prompts, or those of ``family``."""
        prompts = [prompt for prompt in self.prompts if family in (None, prompt.family)]
        made, plain = self._totals(mode, prompts), self._totals(PLAIN, prompts)
        bootstrap = self._bootstrap(prompts)
        stats = [result.stats for result in made.results]
        rounds, tokens = int(made.rounds.sum()), int(made.tokens.sum())
        proposed, accepted = sum(each.proposed for each in stats), sum(each.accepted for each in stats)
        seconds = {stage.value: sum(each.stage_seconds[stage] for each in stats) for stage in (Stage.DRAFT, Stage.REFINE, Stage.VERIFY)}
        seconds["host"] = sum(each.host_seconds for each in stats)
        per_token = bootstrap.ratio(1e3 * made.seconds, made.tokens)
        per_round = _over(1e3 * float(made.seconds.sum()), rounds)
        plain_ms = _over(1e3 * float(plain.seconds.sum()), int(plain.tokens.sum()))
        paired = _divided(plain.seconds * made.tokens, made.seconds * plain.tokens)
        sampled = self.modes[mode].config.temperature > 0
        return ModeFigures(
            num_prompts=len(prompts),
            num_jobs=len(stats),
            tokens=tokens,
            rounds=rounds,
            proposed=proposed,
            accepted=accepted,
            acceptance_rate=_over(accepted, proposed),
            mean_acceptance_length=bootstrap.ratio(made.tokens, made.rounds),
            mean_acceptance_length_by_prompt=spread(_divided(made.tokens, made.rounds)),
            acceptance_by_position=_by_position(made.results),
            acceptance_lengths=_counts(length for each in stats for length in each.acceptance_lengths),
            width_counts=_counts(proposals for each in stats for proposals in each.proposals),
            ms_per_token=per_token,
            tokens_per_second=None if per_token is None else _over(1e3, per_token.value),
            ms_per_round=per_round,
            stage_ms_per_token={stage: 1e3 * spent / tokens for stage, spent in seconds.items()} if tokens else None,
            stage_ms_per_round={stage: 1e3 * spent / rounds for stage, spent in seconds.items()} if rounds else None,
            time_to_first_token_ms=1e3 * float(np.median([each.time_to_first_token for each in stats])),
            speedup=bootstrap.ratio_of_ratios((plain.seconds, plain.tokens), (made.seconds, made.tokens)),
            speedup_geometric_mean=bootstrap.geometric_mean(paired),
            speedup_by_prompt=spread(paired),
            speedup_end_to_end=bootstrap.ratio_of_ratios((plain.waited, plain.output), (made.waited, made.output)),
            break_even=None if per_round is None or plain_ms is None else _over(per_round, plain_ms),
            num_same_tokens=None if sampled else sum(self.same_tokens(mode, prompt) for prompt in prompts),
        )

    def _totals(self, mode: str, prompts: Sequence[BenchPrompt]) -> _Totals:
        return _Totals([self.of_prompt(mode, prompt) for prompt in prompts])

    def _bootstrap(self, prompts: Sequence[BenchPrompt]) -> Bootstrap:
        return Bootstrap(len(prompts), self._seed)


class _Totals:
    """Sums over the repeats of each prompt, float64 [num_prompts]: decoded tokens, rounds, decoding seconds, all output tokens and the
    seconds that a caller waited for them.
    """

    def __init__(self, jobs: Sequence[Sequence[Job]]) -> None:
        self.results = [job.result for repeats in jobs for job in repeats]
        self.rounds = _sums([[job.result.stats.rounds for job in repeats] for repeats in jobs])
        self.output = _sums([[job.result.stats.output_tokens for job in repeats] for repeats in jobs])
        self.tokens = _sums([[job.result.stats.output_tokens - 1 for job in repeats] for repeats in jobs])
        self.seconds = _sums([[job.result.stats.decode_seconds for job in repeats] for repeats in jobs])
        self.waited = _sums([[job.total_seconds for job in repeats] for repeats in jobs])


def _sums(values: Sequence[Sequence[float]]) -> Floats:
    return np.array([sum(each) for each in values], np.float64)


def _divided(numerator: Floats, denominator: Floats) -> Floats:
    """Element by element, NaN where there is nothing to divide by."""
    return np.divide(numerator, denominator, out=np.full_like(numerator, np.nan), where=denominator > 0)


def _over(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def _counts(values: Any) -> dict[int, int]:
    return dict(sorted(Counter(values).items()))


def _by_position(results: Sequence[GenerationResult]) -> tuple[float | None, ...]:
    num_proposals = max((result.stats.num_proposals for result in results), default=0)
    accepted, verified = [0] * num_proposals, [0] * num_proposals
    for result in results:
        for slot, (right, tried) in enumerate(zip(*result.stats.slot_counts(), strict=True)):
            accepted[slot] += right
            verified[slot] += tried
    return tuple(_over(right, tried) for right, tried in zip(accepted, verified, strict=True))
