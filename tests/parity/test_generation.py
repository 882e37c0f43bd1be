"""Token by token: a tie passes and is listed, every other difference fails."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from xpress_export.parity import generation
from xpress_export.parity.acceptance import ModeAcceptance
from xpress_export.parity.compare import first_difference
from xpress_export.parity.generation import Divergence, GenerationComparison, compare_generation
from xpress_export.parity.modes import greedy_modes
from xpress_export.parity.reference import ReferenceRun
from xpress_export.parity.report import failures, require_passed
from xpress_runtime.errors import CheckFailed
from xpress_runtime.generation import GenerationConfig

NAN, INFINITE = float("nan"), float("inf")
TIE = Divergence(prompt=0, mode="K=2", index=3, found=5, expected=6, margin=1e-6, logit_error=1e-6, allowed_error=1e-4)


@pytest.mark.parametrize(
    ("change", "tie"),
    [
        ({}, True),
        ({"margin": 2e-6}, True),
        ({"margin": 2.1e-6}, False),
        ({"margin": 1e-6, "logit_error": 0.0}, False),
        ({"margin": 0.0, "logit_error": 0.0}, True),
        # An error beyond the tolerance is a fault, and explains nothing.
        ({"margin": 1e-6, "logit_error": 2e-4}, False),
        ({"margin": 5.0, "logit_error": 3.0}, False),
        ({"logit_error": NAN}, False),
        ({"logit_error": INFINITE}, False),
        ({"margin": INFINITE}, False),
    ],
)
def test_tie(change: dict[str, float], tie: bool) -> None:
    assert replace(TIE, **change).tie is tie  # type: ignore[arg-type]


def test_ties_pass_and_other_differences_fail() -> None:
    assert GenerationComparison(1, ["plain"], 9, []).passed
    assert GenerationComparison(1, ["plain"], 9, [TIE, TIE]).passed
    assert not GenerationComparison(1, ["plain"], 9, [TIE, replace(TIE, margin=1.0)]).passed


def test_nothing_compared_is_a_failure() -> None:
    assert not GenerationComparison(1, ["plain"], 0, []).passed


@pytest.mark.parametrize(
    ("found", "expected", "index"),
    [([], [], None), ([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([4, 2], [1, 2], 0), ([1], [1, 2], 1), ([1, 2, 3], [1, 2], 2)],
)
def test_first_difference(found: list[int], expected: list[int], index: int | None) -> None:
    assert first_difference(found, expected) == index


# The whole comparison, on a session that says what it is told to.

PROMPTS = [[7, 8], [9]]
MODES = ["plain", "K=2", "K=0", "2 draft steps", "lookup"]
TOLERANCE = 1e-4


@dataclass
class ScriptedSession:
    """Answers each mode with ``tokens[mode]``, the same for every prompt; modes without an entry answer as the reference."""

    tokens: dict[str, list[int]]
    reference: list[int]
    backend: Any = None

    def __post_init__(self) -> None:
        drafter = SimpleNamespace(num_proposals=3)
        self.bundle = SimpleNamespace(manifest=SimpleNamespace(num_passes=(2, 0), shortlists=(0,), drafter=drafter, draft_model=None))

    def generate(self, prompt: list[int], config: GenerationConfig) -> Any:
        assert prompt in PROMPTS
        mode = next(mode for mode, own in greedy_modes(self.bundle.manifest, config.max_new_tokens).items() if own == config)
        return SimpleNamespace(tokens=tuple(self.tokens.get(mode, self.reference)[: config.max_new_tokens]))


# Steps choose token 1, 2, 3; at the second one token 0 is as good but for 1e-5.
LOGITS = np.array([[0, 4, 1, 2], [3.99999, 1, 4, 1], [0, 0, 1, 5]], np.float32)
REFERENCE = ReferenceRun([1, 2, 3], LOGITS)


def compare(tokens: dict[str, list[int]], ours: NDArray[np.float32], monkeypatch: pytest.MonkeyPatch) -> GenerationComparison:
    """``ours``: the bundle's logits after every step of the reference."""

    def target_logits(_runner: Any, _manifest: Any, text: list[int]) -> NDArray[np.float32]:
        prompt = next(prompt for prompt in PROMPTS if text[: len(prompt)] == prompt)
        assert text[len(prompt) :] == REFERENCE.tokens[: len(text) - len(prompt)]
        return ours[: len(text) - len(prompt) + 1]

    monkeypatch.setattr(generation, "target_logits", target_logits)
    session: Any = ScriptedSession(tokens, REFERENCE.tokens)
    return compare_generation(session, PROMPTS, [REFERENCE, REFERENCE], 5, TOLERANCE)


def test_equal_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    result = compare({}, LOGITS, monkeypatch)
    assert (result.prompts, result.modes, result.tokens, result.divergences) == (2, MODES, 30, [])
    assert result.passed


def test_constructed_tie_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = LOGITS.copy()
    ours[1, 0] = 4.00001
    result = compare({"K=2": [1, 0, 0]}, ours, monkeypatch)
    assert result.passed
    assert [(entry.mode, entry.prompt, entry.index, entry.found, entry.expected) for entry in result.divergences] == [
        ("K=2", 0, 1, 0, 2),
        ("K=2", 1, 1, 0, 2),
    ]
    # Behind the tie nothing is compared.
    assert result.tokens == 30 - 2 * 2
    assert result.to_json()["divergences"][0]["tie"] is True


def test_difference_without_an_error_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits are right and the token is not: a fault of the loop, even where two tokens are nearly as good."""
    assert not compare({"K=2": [1, 0, 3]}, LOGITS, monkeypatch).passed


def test_difference_by_a_wrong_target_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own error is as large as the margin, as it always is when a token differs because of it."""
    ours = LOGITS.copy()
    ours[0, 3] = 4.5
    result = compare({"plain": [3, 2, 3]}, ours, monkeypatch)
    assert not result.passed
    assert all(entry.margin <= 2 * entry.logit_error for entry in result.divergences)


@pytest.mark.parametrize("tokens", [[1, 2], [1, 2, 3, 3], []])
def test_another_length_fails(tokens: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop token that was missed, or seen too early."""
    result = compare(dict.fromkeys(MODES, tokens), LOGITS, monkeypatch)
    assert not result.passed
    assert len(result.divergences) == 2 * len(MODES)


def parity(**changes: Any) -> dict[str, Any]:
    graph = {"passed": True, "scaled_error": 1e-7, "tolerance": 1e-4, "range": None}
    return {
        "passed": True,
        "tolerance": 1e-4,
        "graphs": {"embed": graph, "target": graph},
        "target": graph,
        "generation": GenerationComparison(1, ["plain"], 9, []).to_json(),
    } | changes


def test_report_names_everything_that_failed() -> None:
    wrong = {"passed": False, "scaled_error": 0.25, "worst_output": "embeddings", "tolerance": 1e-4, "range": None}
    different = GenerationComparison(1, ["plain"], 9, [TIE, replace(TIE, margin=1.0, index=8)]).to_json()
    result = parity(passed=False, graphs={"embed": wrong, "target": {**wrong, "passed": True}}, target=wrong, generation=different)
    assert failures(result) == [
        "graph embed (output embeddings: 2.5e-01, tolerance 1e-04)",
        "target logits (2.5e-01)",
        "generation K=2, prompt 0, token 8: 5 instead of 6",
    ]
    with pytest.raises(CheckFailed, match=r"parity failed: fp32-length: graph embed .*; target logits .*; generation K=2"):
        require_passed({"fp32-length": result})


def test_report_of_a_pass_is_empty() -> None:
    assert failures(parity()) == []
    require_passed({"fp32-length": parity()})
    require_passed({})


def test_report_names_an_empty_generation() -> None:
    empty = GenerationComparison(0, [], 0, []).to_json()
    assert failures(parity(passed=False, generation=empty)) == ["generation (no token was compared)"]


def test_report_names_the_sets_that_failed() -> None:
    empty = parity(passed=False, generation=GenerationComparison(0, [], 0, []).to_json())
    with pytest.raises(CheckFailed) as caught:
        require_passed({"fp32-length": parity(), "fp16-mask": empty, "bf16-mask": empty})
    assert str(caught.value) == (
        "parity failed: fp16-mask: generation (no token was compared); bf16-mask: generation (no token was compared)"
    )


def test_report_names_an_acceptance_that_is_off() -> None:
    modes = {"K=2": ModeAcceptance(70, 70, 40, None, None).to_json(), "K=0": ModeAcceptance(70, 41, 40, None, None).to_json()}
    assert failures(parity(passed=False, acceptance={"passed": False, "modes": modes})) == [
        "acceptance K=2: 1.000 tokens a round instead of 1.750 in fp32"
    ]
