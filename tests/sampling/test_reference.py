"""The reference against transformers' own processors, which define what the settings mean."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.sampling import reference
from xpress_runtime.generation import GenerationConfig

OFF = GenerationConfig(temperature=1.0)
VOCAB_SIZE = 50


@pytest.mark.parametrize(
    "config",
    [
        OFF,
        replace(OFF, temperature=0.4),
        replace(OFF, top_k=7),
        replace(OFF, top_p=0.8),
        replace(OFF, min_p=0.1),
        replace(OFF, repetition_penalty=1.4),
        replace(OFF, temperature=1.7, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=0.8),
    ],
)
def test_distribution_is_that_of_transformers(config: GenerationConfig) -> None:
    processors = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(config.repetition_penalty),
            TemperatureLogitsWarper(config.temperature),
            TopKLogitsWarper(config.top_k or VOCAB_SIZE),
            TopPLogitsWarper(config.top_p),
            MinPLogitsWarper(config.min_p),
        ]
    )
    rng = np.random.default_rng(0)
    for _ in range(20):
        logits, text = rng.normal(scale=2, size=VOCAB_SIZE), rng.integers(0, VOCAB_SIZE, 12).tolist()
        expected = processors(torch.tensor([text]), torch.tensor(logits[None])).softmax(dim=-1)[0].numpy()
        found = reference.distribution(reference.penalised(logits, text[:5], text[5:], config), config)
        np.testing.assert_allclose(found, expected, atol=1e-12)


def test_presence_and_frequency_count_the_output_alone() -> None:
    """As vLLM and OpenAI define them: once for a token that is there, and once for each time that it is."""
    config = replace(OFF, presence_penalty=0.5, frequency_penalty=0.25)
    found = reference.penalised(np.zeros(5), [0, 1, 1], [1, 2, 2, 2], config)
    assert found.tolist() == [0.0, -0.75, -1.25, 0.0, 0.0]
