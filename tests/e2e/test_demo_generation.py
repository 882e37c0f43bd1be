"""The real bundle: its output is transformers' greedy output in every mode, and its acceptance is that of an independent PyTorch loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.e2e.conftest import Demo
from tests.reference import ReferenceDrafter, greedy_rounds
from xpress_export.demo.target import demo_drafter, demo_prompts
from xpress_export.parity.compare import tolerance
from xpress_export.parity.generation import GenerationComparison, compare_generation
from xpress_export.parity.reference import TransformersReference
from xpress_runtime.generation import GenerationConfig
from xpress_runtime.session import Session
from xpress_runtime.sets import Precision

MAX_NEW_TOKENS = 128
EVERY_TENTH = range(0, 50, 10)
SOME = range(0, 50, 25)


def _compare(session: Session, reference: TransformersReference, indices: range, max_new_tokens: int) -> GenerationComparison:
    prompts = [session.encode([{"role": "user", "content": demo_prompts()[index]}]) for index in indices]
    runs = [reference.generate(prompt, max_new_tokens) for prompt in prompts]
    return compare_generation(session, prompts, runs, max_new_tokens, tolerance(Precision.FP32))


def test_some_prompts_equal_transformers(demo_session: Session, transformers_reference: TransformersReference) -> None:
    comparison = _compare(demo_session, transformers_reference, SOME, MAX_NEW_TOKENS // 4)
    assert comparison.modes == ["plain", "K=2", "K=4", "K=1", "K=0", "2 draft steps", "lookup", "autoregressive"]
    assert comparison.passed, comparison.divergences


@pytest.mark.slow
def test_every_prompt_equals_transformers(demo_session: Session, transformers_reference: TransformersReference) -> None:
    comparison = _compare(demo_session, transformers_reference, range(50), MAX_NEW_TOKENS)
    assert comparison.passed, comparison.divergences


@pytest.mark.parametrize("num_passes", [0, 4])
def test_acceptance_equals_an_independent_loop(
    demo: Demo, demo_session: Session, transformers_reference: TransformersReference, num_passes: int
) -> None:
    _check_acceptance(demo, demo_session, transformers_reference, num_passes, SOME)


@pytest.mark.slow
@pytest.mark.parametrize("num_passes", [0, 1, 2, 4])
def test_acceptance_equals_an_independent_loop_on_more_prompts(
    demo: Demo, demo_session: Session, transformers_reference: TransformersReference, num_passes: int
) -> None:
    _check_acceptance(demo, demo_session, transformers_reference, num_passes, EVERY_TENTH)


def _check_acceptance(
    demo: Demo, demo_session: Session, transformers_reference: TransformersReference, num_passes: int, indices: range
) -> None:
    embedding = demo.target.embedding().table
    drafter = ReferenceDrafter(demo_drafter(), embedding, embedding)
    for index in indices:
        prompt = demo_session.encode([{"role": "user", "content": demo_prompts()[index]}])
        result = demo_session.generate(prompt, GenerationConfig(MAX_NEW_TOKENS, num_passes=num_passes))
        taps = transformers_reference.hidden_states([*prompt, *result.tokens], drafter.taps)
        with torch.inference_mode():
            expected = greedy_rounds(drafter, taps, prompt, result.tokens, num_passes)
        assert result.stats.kept_lengths == expected


# Beside those that parity compares.
MORE_MODES: tuple[dict[str, Any], ...] = (
    {"draft_steps": 10, "num_passes": 0},
    {"speculation": "auto"},
    {"speculation": "auto", "drafter": "lookup"},
    {"speculation": "auto", "drafter": "autoregressive"},
)


def test_many_steps_and_auto_give_plain_output(demo_session: Session) -> None:
    _check_more_modes(demo_session, range(0, 50, 17), 32)


@pytest.mark.slow
def test_many_steps_and_auto_give_plain_output_on_every_prompt(demo_session: Session) -> None:
    _check_more_modes(demo_session, range(50), 64)


def _check_more_modes(session: Session, indices: range, max_new_tokens: int) -> None:
    for index in indices:
        prompt = session.encode([{"role": "user", "content": demo_prompts()[index]}])
        plain = session.generate(prompt, GenerationConfig(max_new_tokens, speculation="off"))
        for mode in MORE_MODES:
            assert session.generate(prompt, GenerationConfig(max_new_tokens, **mode)).tokens == plain.tokens, (index, mode)


def test_speculation_off_and_on_stream_the_same_text(demo_session: Session) -> None:
    messages = [{"role": "user", "content": "Write a haiku about the sea, with an emoji."}]
    texts = []
    for config in (GenerationConfig(40), GenerationConfig(40, speculation="off"), GenerationConfig(40, num_passes=0)):
        stream = demo_session.stream(messages, config)
        texts.append("".join(piece.text for piece in stream))
        assert texts[-1] == stream.result.text
    assert texts[0] == texts[1] == texts[2]
    assert demo_session.tokenizer is not None
    assert texts[0] == demo_session.tokenizer.decode(list(stream.result.tokens))


def test_long_prompt_in_chunks(demo_session: Session, transformers_reference: TransformersReference) -> None:
    prompt = demo_session.encode([{"role": "user", "content": "The quick brown fox jumps over the lazy dog. " * 40}])
    assert len(prompt) > 3 * demo_session.bundle.manifest.prefill_chunk
    run = transformers_reference.generate(prompt, 12)
    comparison = compare_generation(demo_session, [prompt], [run], 12, tolerance(Precision.FP32))
    assert comparison.passed, comparison.divergences
