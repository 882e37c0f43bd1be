"""Generation through the runtime against transformers' greedy continuation, token by token, plain and with every kind of drafter.

A difference counts as a tie only when the reference's two best logits differ by at most twice the measured logit error at that step, and
that error is within the tolerance: a wrong target must not explain its own tokens. Each is listed with its margin. After a tie the two
texts go different ways, so the comparison of that prompt ends there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from xpress_export.parity.compare import first_difference, top_margin
from xpress_export.parity.modes import greedy_modes
from xpress_export.parity.reference import ReferenceRun
from xpress_export.parity.runner import GraphRunner
from xpress_export.parity.target import target_logits
from xpress_runtime.generation import GenerationResult
from xpress_runtime.session import Session


@dataclass(frozen=True)
class Divergence:
    """The first differing token of a prompt: what was made and expected at output ``index``, and whether a tie explains it."""

    prompt: int
    mode: str
    index: int
    found: int | None
    expected: int | None
    margin: float
    logit_error: float
    allowed_error: float

    @property
    def tie(self) -> bool:
        return self.margin <= 2 * self.logit_error and self.logit_error <= self.allowed_error


@dataclass(frozen=True)
class GenerationComparison:
    """``tokens`` compared over all prompts and modes, every divergence, and what each mode made of each prompt."""

    prompts: int
    modes: list[str]
    tokens: int
    divergences: list[Divergence]
    results: Mapping[str, Sequence[GenerationResult]] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return self.tokens > 0 and all(divergence.tie for divergence in self.divergences)

    def to_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "prompts": self.prompts,
            "modes": self.modes,
            "tokens": self.tokens,
            "divergences": [{**asdict(divergence), "tie": divergence.tie} for divergence in self.divergences],
        }


def compare_generation(
    session: Session,
    prompts: Sequence[Sequence[int]],
    references: Sequence[ReferenceRun],
    max_new_tokens: int,
    tolerance: float,
    *,
    report: Callable[[str], None] = lambda _: None,
) -> GenerationComparison:
    """Generate every prompt in every mode and compare with the references.

    ``tolerance`` is the largest logit error of a tie, relative to the reference's largest magnitude (at least 1).
    """
    runner = GraphRunner(session.bundle, session.backend)
    compared = 0
    divergences = []
    results = generate_all(session, prompts, max_new_tokens, report=report)
    for mode, made in results.items():
        for index, (prompt, reference) in enumerate(zip(prompts, references, strict=True)):
            found = list(made[index].tokens)
            first = first_difference(found, reference.tokens)
            compared += len(reference.tokens) if first is None else first
            if first is not None:
                divergences.append(_divergence(runner, session, index, mode, first, prompt, found, reference, tolerance))
    return GenerationComparison(len(prompts), list(results), compared, divergences, results)


def generate_all(
    session: Session, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, report: Callable[[str], None] = lambda _: None
) -> dict[str, list[GenerationResult]]:
    """What each mode makes of each prompt; ``report`` hears each mode's name."""
    results = {}
    for mode, config in greedy_modes(session.bundle.manifest, max_new_tokens).items():
        report(f"generation {mode}")
        results[mode] = [session.generate(prompt, config) for prompt in prompts]
    return results


def _divergence(
    runner: GraphRunner,
    session: Session,
    prompt_index: int,
    mode: str,
    first: int,
    prompt: Sequence[int],
    found: Sequence[int],
    reference: ReferenceRun,
    tolerance: float,
) -> Divergence:
    if first < len(reference.logits):
        expected_logits = reference.logits[first]
        ours = target_logits(runner, session.bundle.manifest, [*prompt, *reference.tokens[:first]])[-1]
        margin, error = top_margin(expected_logits), float(np.abs(ours - expected_logits).max())
        allowed = tolerance * max(1.0, float(np.abs(expected_logits).max()))
    else:
        # The reference had stopped: no logits of it could explain a further token.
        margin, error, allowed = sys.float_info.max, 0.0, 0.0
    return Divergence(prompt_index, mode, first, _at(found, first), _at(reference.tokens, first), margin, error, allowed)


def _at(tokens: Sequence[int], index: int) -> int | None:
    return tokens[index] if index < len(tokens) else None
