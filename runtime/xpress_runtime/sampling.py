"""How rows are sampled: which graphs that takes, and the numbers that the graphs read, one set per row.

Knows settings and buffers; knows nothing about steps. What is computed from the numbers stands in the graphs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xpress_runtime.backends.base import Backend, Buffer
from xpress_runtime.generation import GenerationConfig

# Noise is arithmetic modulo this prime, the largest below 2^30, and a request's key is four numbers below it.
NOISE_PRIME = 1_073_741_789
KEY_NUMBERS = 4

_INT64, _FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)


@dataclass(frozen=True)
class SamplingForm:
    """The graphs that rounds run: those that any of their rows needs. Greedy rows in a sampled round stay greedy, to the last bit."""

    sampled: bool = False
    penalised: bool = False
    top_k: bool = False
    top_p: bool = False

    @classmethod
    def of(cls, configs: Iterable[GenerationConfig]) -> SamplingForm:
        form = cls()
        for config in configs:
            penalised = config.repetition_penalty != 1 or config.presence_penalty != 0 or config.frequency_penalty != 0
            drawn = config.temperature > 0
            form = cls(
                # Penalties move the best token too, so the greedy graphs, which take the head's, do not serve.
                sampled=form.sampled or drawn or penalised,
                penalised=form.penalised or penalised,
                # Filters never remove the best token, which is all that a greedy row looks at.
                top_k=form.top_k or (drawn and config.top_k is not None),
                top_p=form.top_p or (drawn and (config.top_p < 1 or config.min_p > 0)),
            )
        return form


def noise_key(seed: int) -> list[int]:
    """A request's seed as four numbers below NOISE_PRIME."""
    digest = hashlib.sha256(f"xpress noise {seed}".encode()).digest()
    return [int.from_bytes(digest[8 * index : 8 * index + 8], "little") % NOISE_PRIME for index in range(KEY_NUMBERS)]


class RowNumbers:
    """Of ``num_rows`` rows, what the graphs of sampling read. Greedy until written."""

    def __init__(self, backend: Backend, vocab_size: int, num_rows: int) -> None:
        self._vocab_size = vocab_size
        self.noise_key = backend.allocate((num_rows, KEY_NUMBERS), _INT64)
        self.sampled = backend.allocate((num_rows,), _INT64)
        self.top_k = backend.allocate((num_rows,), _INT64)
        floats = [backend.allocate((num_rows,), _FLOAT32) for _ in range(6)]
        self.inverse_temperature, self.top_p, self.min_p, self.repetition, self.presence, self.frequency = floats
        # Of each token: how often it stands in the output before the anchor, and whether the prompt has it.
        self.counts = backend.allocate((num_rows, vocab_size), _FLOAT32)
        self.next_counts = backend.allocate((num_rows, vocab_size), _FLOAT32)
        self.in_prompt = backend.allocate((num_rows, vocab_size), _FLOAT32)
        for row in range(num_rows):
            self.write(row, GenerationConfig(seed=0), ())

    def write(self, row: int, config: GenerationConfig, prompt: Sequence[int]) -> None:
        """A request's numbers. Its ``seed`` must be set."""
        assert config.seed is not None, "a session draws a seed where none was given"
        drawn = config.temperature > 0
        integers: list[tuple[Buffer, Any]] = [
            (self.noise_key, [noise_key(config.seed)]),
            (self.sampled, [int(drawn)]),
            (self.top_k, [config.top_k if drawn and config.top_k is not None else self._vocab_size]),
        ]
        floats: list[tuple[Buffer, Any]] = [
            (self.inverse_temperature, [1 / config.temperature if drawn else 1.0]),
            (self.top_p, [config.top_p if drawn else 1.0]),
            (self.min_p, [config.min_p if drawn else 0.0]),
            (self.repetition, [config.repetition_penalty]),
            (self.presence, [config.presence_penalty]),
            (self.frequency, [config.frequency_penalty]),
            (self.counts, np.zeros((1, self._vocab_size))),
            (self.in_prompt, self._marked(prompt)),
        ]
        for buffers, dtype in ((integers, np.int64), (floats, np.float32)):
            for buffer, values in buffers:
                buffer.row(row).write(np.asarray(values, dtype))

    def _marked(self, prompt: Sequence[int]) -> NDArray[Any]:
        marks = np.zeros((1, self._vocab_size))
        marks[0, np.asarray(prompt, np.int64)] = 1
        return marks
