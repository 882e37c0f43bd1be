"""Penalties over many rounds: what was accepted, what was drafted and rejected, and what a round before counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.sampling.conftest import Models
from tests.sampling.reference import penalised
from xpress_runtime.backends.ort_cpu import OrtCpuBackend
from xpress_runtime.bundle import Bundle
from xpress_runtime.generation import GenerationConfig
from xpress_runtime.session import Session

PROMPT = [3, 1, 4, 1, 5]
NUM_TOKENS = 30

DRAFTERS: dict[str, dict[str, Any]] = {
    "no pass": {"num_passes": 0},
    "one pass, shortlist, two steps": {"num_passes": 1, "draft_steps": 2},
    "autoregressive": {"drafter": "autoregressive"},
    "lookup": {"drafter": "lookup"},
    "plain": {"speculation": "off"},
    "auto": {"speculation": "auto"},
}
PENALTIES = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8, "presence_penalty": 0.5},
    {"frequency_penalty": 0.15},
    {"repetition_penalty": 1.1, "presence_penalty": -0.4, "frequency_penalty": 0.3},
]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_best_token_after_penalties_is_written(models: Models, exported: Bundle, drafter: str) -> None:
    """At temperature 0, where one wrong count shows in every token after it."""
    with Session(exported, OrtCpuBackend(threads=1)) as session:
        for penalties in PENALTIES:
            config = GenerationConfig(NUM_TOKENS, **DRAFTERS[drafter], **penalties)
            assert list(session.generate(PROMPT, config).tokens) == best_tokens(models.target, config)


def test_each_penalty_changes_what_is_written(models: Models) -> None:
    texts = {tuple(best_tokens(models.target, GenerationConfig(**penalties))) for penalties in ({}, *PENALTIES)}
    assert len(texts) == 1 + len(PENALTIES)


def best_tokens(model: Any, config: GenerationConfig) -> list[int]:
    output: list[int] = []
    with torch.no_grad():
        while len(output) < NUM_TOKENS:
            logits = model(torch.tensor([[*PROMPT, *output]])).logits[0, -1].double().numpy()
            output.append(int(penalised(logits, PROMPT, output, config).argmax()))
    return output
