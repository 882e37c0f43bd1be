"""τ of a half-precision set beside that of fp32: over the same text, within two percent or two rounds."""

from __future__ import annotations

from typing import Any

import pytest

from xpress_export.parity.acceptance import ModeAcceptance, compare_acceptance
from xpress_runtime.generation import GenerationResult
from xpress_runtime.stats import GenerationStats


def result(tokens: list[int], kept: list[int], num_proposals: int = 3) -> GenerationResult:
    assert len(tokens) == 1 + sum(kept)
    stats = GenerationStats(4, num_proposals, 1)
    stats.kept_lengths = kept
    return GenerationResult("", tuple(tokens), "length", stats)


def compare(found: list[GenerationResult], reference: list[GenerationResult]) -> ModeAcceptance:
    return compare_acceptance({"K=1": found}, {"K=1": reference})["K=1"]


def test_the_same_text() -> None:
    compared = compare([result([1, 2, 3, 4, 5], [2, 2])], [result([1, 2, 3, 4, 5], [1, 3])])
    assert (compared.tokens, compared.rounds, compared.reference_rounds) == (4, 2, 2)
    shown: Any = compared.to_json()
    assert (shown["passed"], shown["mean_acceptance_length"], shown["reference"], shown["whole"]) == (True, 2, 2, 2)


def test_rounds_behind_a_divergence_do_not_count() -> None:
    """Three common tokens: the first one is from the prompt, the others took one round here and two there."""
    compared = compare([result([1, 2, 3, 9, 9, 9], [2, 1, 1, 1])], [result([1, 2, 3, 4, 5, 6], [1, 1, 3])])
    assert (compared.tokens, compared.rounds, compared.reference_rounds) == (2, 1, 2)
    assert (compared.whole, compared.reference_whole) == (5 / 4, 5 / 3)


@pytest.mark.parametrize(("tokens", "rounds"), [([9, 9], 0), ([1, 9], 0)])
def test_texts_that_part_at_once(tokens: list[int], rounds: int) -> None:
    compared = compare([result(tokens, [1])], [result([1, 2], [1])])
    assert (compared.tokens, compared.rounds, compared.reference_rounds) == (0, rounds, rounds)
    assert compared.to_json()["mean_acceptance_length"] is None


def test_plain_decoding_has_no_acceptance() -> None:
    plain = [result([1, 2], [1], num_proposals=0)]
    assert compare_acceptance({"plain": plain}, {"plain": plain}) == {}


@pytest.mark.parametrize(
    ("rounds", "passed"),
    # Two percent of a thousand rounds, in either direction.
    [(1000, True), (1020, True), (980, True), (1021, False), (979, False)],
)
def test_two_percent(rounds: int, passed: bool) -> None:
    assert ModeAcceptance(1800, rounds, 1000, None, None).passed is passed


@pytest.mark.parametrize(("rounds", "passed"), [(40, True), (42, True), (38, True), (43, False), (70, False)])
def test_few_rounds_may_differ_by_two(rounds: int, passed: bool) -> None:
    """A drafter that no longer fits needs a round for each token; that shows on the shortest texts."""
    assert ModeAcceptance(70, rounds, 40, None, None).passed is passed
