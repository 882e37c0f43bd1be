"""Generation through the runtime against transformers' greedy continuation, token by token, plain and for every built number of passes.

A difference counts as a tie only when the reference's two best logits differ by at most twice the measured logit error at that step, and
that error is within the tolerance: a wrong target must not explain its own tokens. Each is listed with its margin. After a tie the two
texts go different ways, so the comparison of that prompt ends there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from xpress_export.parity.compare import top_margin
from xpress_export.parity.reference import ReferenceRun
from xpress_export.parity.runner import GraphRunner
from xpress_export.parity.target import target_logits
from xpress_runtime.generation import GenerationConfig
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
    """``tokens`` compared over all prompts and modes, and every divergence."""

    prompts: int
    modes: list[str]
    tokens: int
    divergences: list[Divergence]

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


def modes(session: Session, max_new_tokens: int) -> dict[str, GenerationConfig]:
    """Plain decoding and one mode per built number of passes."""
    configs = {"plain": GenerationConfig(max_new_tokens=max_new_tokens, speculation="off")}
    for passes in session.bundle.manifest.num_passes:
        configs[f"K={passes}"] = GenerationConfig(max_new_tokens=max_new_tokens, num_passes=passes)
    return configs


def compare_generation(
    session: Session,
    prompts: Sequence[Sequence[int]],
    references: Sequence[ReferenceRun],
    max_new_tokens: int,
    tolerance: float,
    *,
    report: Callable[[str], None] = lambda _: None,
) -> GenerationComparison:
    """Generate every prompt in every mode and compare with the references; ``report`` hears each mode's name.

    ``tolerance`` is the largest logit error of a tie, relative to the reference's largest magnitude (at least 1).
    """
    runner = GraphRunner(session.bundle, session.backend)
    configs = modes(session, max_new_tokens)
    compared = 0
    divergences = []
    for mode, config in configs.items():
        report(f"generation {mode}")
        for index, (prompt, reference) in enumerate(zip(prompts, references, strict=True)):
            found = list(session.generate(prompt, config).tokens)
            first = first_difference(found, reference.tokens)
            compared += len(reference.tokens) if first is None else first
            if first is not None:
                divergences.append(_divergence(runner, session, index, mode, first, prompt, found, reference, tolerance))
    return GenerationComparison(len(prompts), list(configs), compared, divergences)


def first_difference(found: Sequence[int], expected: Sequence[int]) -> int | None:
    """Index of the first differing token; where one sequence is a prefix of the other, the end of the shorter."""
    for index, (left, right) in enumerate(zip(found, expected, strict=False)):
        if left != right:
            return index
    return None if len(found) == len(expected) else min(len(found), len(expected))


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
