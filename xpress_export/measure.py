"""Modes of one session measured against each other in one run: same prompts, same threads, taking turns.

Works on any prompts and configs; knows nothing about how figures are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from xpress_runtime.generation import GenerationConfig, GenerationResult
from xpress_runtime.session import Prompt, Session

WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class ModeFigures:
    """Pooled figures of one mode. Times are of decoding: prefill and the first token are left out."""

    results: tuple[GenerationResult, ...]

    @property
    def tokens(self) -> int:
        return sum(result.stats.output_tokens - 1 for result in self.results)

    @property
    def rounds(self) -> int:
        return sum(result.stats.rounds for result in self.results)

    @property
    def decode_ms(self) -> float:
        return 1e3 * sum(result.stats.decode_seconds for result in self.results)

    @property
    def ms_per_token(self) -> float:
        return self.decode_ms / max(self.tokens, 1)

    @property
    def ms_per_round(self) -> float:
        return self.decode_ms / max(self.rounds, 1)

    @property
    def host_share(self) -> float:
        """Share of decoding time that is not graph execution."""
        return 1e3 * sum(result.stats.host_seconds for result in self.results) / max(self.decode_ms, 1e-9)

    @property
    def mean_acceptance_length(self) -> float:
        """Pooled τ: kept tokens over rounds of all prompts."""
        return self.tokens / max(self.rounds, 1)

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of rounds in which the proposal of each slot 1 … P-1 was accepted, over all prompts."""
        lengths = list(chain.from_iterable(result.stats.acceptance_lengths for result in self.results))
        num_proposals = max((result.stats.num_proposals for result in self.results), default=0)
        return [sum(length > slot for length in lengths) / max(len(lengths), 1) for slot in range(1, num_proposals + 1)]


def speedups(figures: ModeFigures, base: ModeFigures) -> list[float]:
    """How many times faster than ``base`` a mode was, prompt by prompt; prompts that ended at once are left out."""
    pairs = zip(base.results, figures.results, strict=True)
    times = [(one.stats.ms_per_token, other.stats.ms_per_token) for one, other in pairs]
    return [one / other for one, other in times if one is not None and other is not None]


def measure_modes(
    session: Session,
    prompts: Sequence[Prompt],
    modes: Mapping[str, GenerationConfig],
    *,
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, ModeFigures]:
    """Generate every prompt in every mode, the modes taking turns on each prompt and a different one going first each time.

    A short generation in every mode goes before, so that loading and first allocations are not measured. ``report`` hears each step.
    """
    report("warm-up")
    for config in modes.values():
        session.generate(prompts[0], GenerationConfig(WARM_UP_TOKENS, speculation=config.speculation, num_passes=config.num_passes))
    results: dict[str, list[GenerationResult]] = {mode: [] for mode in modes}
    order = list(modes)
    for index, prompt in enumerate(prompts):
        report(f"prompt {index + 1} of {len(prompts)}")
        for turn in range(len(order)):
            mode = order[(index + turn) % len(order)]
            results[mode].append(session.generate(prompt, modes[mode]))
    return {mode: ModeFigures(tuple(made)) for mode, made in results.items()}
