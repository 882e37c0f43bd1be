"""Acceptance of a half-precision set beside the fp32 set of the same bundle, over the same prompts.

Both are deterministic, and most texts are the same. Where they part, at a near tie of the target, the text behind is another one and its
acceptance says nothing about precision. So rounds are counted over the text that both have in common; what the whole texts give is listed
beside it. Knows results of generations; knows nothing about graphs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from xpress_export.parity.compare import first_difference
from xpress_runtime.generation import GenerationResult

# By how much the mean acceptance length may differ.
TOLERANCE = 0.02
# Rounds that may differ in any case: drafts have near ties too, and over a few short texts one round is more than the tolerance.
_SPARE_ROUNDS = 2


@dataclass(frozen=True)
class ModeAcceptance:
    """One mode over all prompts: ``tokens`` that both texts begin with (the first of each comes without a round), the rounds that each set
    needed for them, and the mean acceptance lengths over the whole texts.
    """

    tokens: int
    rounds: int
    reference_rounds: int
    whole: float | None
    reference_whole: float | None

    @property
    def passed(self) -> bool:
        """τ = tokens / rounds is within the tolerance, or the rounds differ by no more than two."""
        allowed = max(TOLERANCE * self.reference_rounds, _SPARE_ROUNDS)
        return abs(self.rounds - self.reference_rounds) <= allowed

    def to_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "mean_acceptance_length": self.tokens / self.rounds if self.rounds else None,
            "reference": self.tokens / self.reference_rounds if self.reference_rounds else None,
            **asdict(self),
        }


def compare_acceptance(
    found: Mapping[str, Sequence[GenerationResult]], reference: Mapping[str, Sequence[GenerationResult]]
) -> dict[str, ModeAcceptance]:
    """For each mode that drafts; ``found`` and ``reference`` hold the results of the same prompts in the same order."""
    return {
        mode: _compare_mode(results, reference[mode])
        for mode, results in found.items()
        if any(result.stats.num_proposals for result in results)
    }


def _compare_mode(found: Sequence[GenerationResult], reference: Sequence[GenerationResult]) -> ModeAcceptance:
    tokens = rounds = reference_rounds = 0
    for ours, theirs in zip(found, reference, strict=True):
        first = first_difference(ours.tokens, theirs.tokens)
        common = len(ours.tokens) if first is None else first
        tokens += max(common - 1, 0)
        rounds += _rounds(ours, common)
        reference_rounds += _rounds(theirs, common)
    return ModeAcceptance(tokens, rounds, reference_rounds, _whole(found), _whole(reference))


def _rounds(result: GenerationResult, num_tokens: int) -> int:
    """Rounds that a generation needed for its first ``num_tokens`` tokens."""
    made = 1
    for index, kept in enumerate(result.stats.kept_lengths):
        if made >= num_tokens:
            return index
        made += kept
    return len(result.stats.kept_lengths)


def _whole(results: Sequence[GenerationResult]) -> float | None:
    rounds = sum(result.stats.rounds for result in results)
    return sum(sum(result.stats.kept_lengths) for result in results) / rounds if rounds else None
