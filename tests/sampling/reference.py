"""What the target alone would write, in numpy: penalties and filters as transformers and vLLM define them, and exact probabilities.

Independent of the package on purpose: filters sort, one row at a time, in double precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from xpress_runtime.generation import GenerationConfig

Array = NDArray[np.float64]


def penalised(logits: Array, prompt: Sequence[int], output: Sequence[int], config: GenerationConfig) -> Array:
    """Logits [V] after transformers' repetition penalty (of prompt and output) and vLLM's frequency and presence penalties (of output)."""
    result = np.array(logits, np.float64)
    for token in {*prompt, *output}:
        result[token] = result[token] / config.repetition_penalty if result[token] > 0 else result[token] * config.repetition_penalty
    for token in output:
        result[token] -= config.frequency_penalty
    for token in set(output):
        result[token] -= config.presence_penalty
    return result


def kept(logits: Array, config: GenerationConfig) -> NDArray[np.bool_]:
    """Which tokens of logits [V] the filters leave: top-k, then top-p, then min-p, on logits over the temperature."""
    scores = logits / config.temperature
    stays = np.ones(len(scores), bool)
    if config.top_k is not None:
        stays &= scores >= np.sort(scores)[::-1][min(config.top_k, len(scores)) - 1]
    ascending = np.argsort(np.where(stays, scores, -np.inf), kind="stable")
    if config.top_p < 1:
        cumulative = np.cumsum(softmax(np.where(stays, scores, -np.inf))[ascending])
        # The best token is never removed.
        stays[ascending[:-1][cumulative[:-1] <= 1 - config.top_p]] = False
    probabilities = softmax(np.where(stays, scores, -np.inf))
    return stays & (probabilities >= config.min_p * probabilities.max())


def distribution(logits: Array, config: GenerationConfig) -> Array:
    """Probabilities [V] of the next token, from logits [V] after penalties."""
    return softmax(np.where(kept(logits, config), logits / config.temperature, -np.inf))


def softmax(scores: Array) -> Array:
    weights = np.exp(scores - scores.max())
    probabilities: Array = weights / weights.sum()
    return probabilities


class Continuations:
    """Exact probabilities of what a transformers model writes after ``prompt`` and ``output``, which penalties tell apart."""

    def __init__(self, model: Any, prompt: Sequence[int], output: Sequence[int] = ()) -> None:
        self._model = model
        self._prompt, self._output = list(prompt), list(output)
        # By number of further tokens: logits behind each of the V^n ways to go on, in order.
        self._logits: dict[int, Array] = {}

    def probabilities(self, config: GenerationConfig, length: int = 2) -> Array:
        """[V, …, V], one axis for each of the next ``length`` tokens."""
        vocab_size = self._model.config.vocab_size
        result = np.ones(1)
        for num_written in range(length):
            written = product(range(vocab_size), repeat=num_written)
            rows = [
                distribution(penalised(logits, self._prompt, [*self._output, *tokens], config), config)
                for logits, tokens in zip(self._behind(num_written), written, strict=True)
            ]
            result = (result[:, None] * np.stack(rows)).ravel()
        return result.reshape((vocab_size,) * length)

    def _behind(self, num_written: int) -> Array:
        if num_written not in self._logits:
            written = product(range(self._model.config.vocab_size), repeat=num_written)
            texts = torch.tensor([[*self._prompt, *self._output, *tokens] for tokens in written])
            with torch.no_grad():
                self._logits[num_written] = self._model(texts).logits[:, -1].double().numpy()
        return self._logits[num_written]
