"""Rounds on the modules alone: a target whose logits follow from the last token, so that rows may verify different numbers of slots.

Base logits follow from the anchor, and a Markov head makes every slot's distribution depend on the token drawn before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.sampling.continuations import noise_keys
from tests.sampling.reference import distribution
from xpress_export.graphs.refiner import RefinerGraph, SampledForm
from xpress_export.models.accept import Accept, AcceptSampled, Sample
from xpress_export.models.confidence import Confidence
from xpress_export.models.markov import MarkovConfig, MarkovHead
from xpress_runtime.generation import GenerationConfig

VOCAB_SIZE, BLOCK_SIZE = 8, 4
ANCHOR = 3
_CHUNK = 25_000

# Confidences [B, P-1] and verify ids [B, P] → how many slots each row verifies, 1 … P [B].
WidthRule = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Texts:
    """Where rows stand: noise keys [B, 4], anchors [B], positions [B]."""

    keys: Tensor
    anchor: Tensor
    position: Tensor


class Chain:
    """Target, drafter and acceptance of one random world, at one temperature."""

    def __init__(self, temperature: float, shortlist: int = 0) -> None:
        generator = torch.Generator().manual_seed(11)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.config = GenerationConfig(temperature=temperature)
        self.target = 1.3 * random(VOCAB_SIZE, VOCAB_SIZE)
        self._base = self.target[:, None] * 0.5 + 0.6 * random(VOCAB_SIZE, BLOCK_SIZE - 1, VOCAB_SIZE)
        head = MarkovHead(MarkovConfig(VOCAB_SIZE, 4, BLOCK_SIZE))
        for table in (head.w1, head.w2):
            table.copy_(0.8 * random(*table.shape))
        self._draft = SampledForm(RefinerGraph(head, BLOCK_SIZE - 1, shortlist), VOCAB_SIZE)
        self._accept = AcceptSampled(Accept(BLOCK_SIZE, mask_token_id=0, last_start=1000), VOCAB_SIZE)
        self._sample = Sample(VOCAB_SIZE)

    def probabilities(self) -> NDArray[np.float64]:
        """Exact probabilities [V, V] of the two tokens after :data:`ANCHOR`."""
        rows = np.stack([distribution(row, self.config) for row in self.target.double().numpy()])
        exact: NDArray[np.float64] = rows[ANCHOR][:, None] * rows
        return exact

    @torch.inference_mode()
    def sampled(self, rule: WidthRule, num_samples: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Counts of pairs [V, V] with the seeds 0, 1, 2, …, and how often each width was chosen in the two rounds [P + 1]."""
        counts, widths = np.zeros(VOCAB_SIZE**2, np.int64), np.zeros(BLOCK_SIZE + 1, np.int64)
        for keys in torch.from_numpy(noise_keys(num_samples)).split(_CHUNK):
            texts = Texts(keys, torch.full((len(keys),), ANCHOR), torch.full((len(keys),), 5))
            chosen, tokens, num_emitted = self._round(texts, rule)
            chosen_later, later, _ = self._round(Texts(keys, tokens[:, 0], texts.position + 1), rule)
            second = torch.where(num_emitted > 1, tokens[:, 1], later[:, 0])
            counts += torch.bincount(VOCAB_SIZE * tokens[:, 0] + second, minlength=VOCAB_SIZE**2).numpy()
            widths += torch.bincount(torch.cat([chosen, chosen_later]), minlength=BLOCK_SIZE + 1).numpy()
        return counts.reshape(VOCAB_SIZE, VOCAB_SIZE), widths

    def _round(self, texts: Texts, rule: WidthRule) -> tuple[Tensor, Tensor, Tensor]:
        """Width [B], tokens [B, P] and how many of them count [B]."""
        num_rows = len(texts.anchor)
        sampled = torch.ones(num_rows, dtype=torch.int64)
        drawn = (texts.keys, torch.full((num_rows,), 1 / self.config.temperature), sampled)
        hidden, predecessor = torch.zeros(num_rows, BLOCK_SIZE, 1), texts.anchor
        ids, scores, *candidates = self._draft(hidden, self._base[texts.anchor], texts.anchor, predecessor, texts.position, *drawn)
        widths = rule(Confidence()(scores), ids)
        logits = self.target[ids]
        tokens = self._sample(logits[:, :1], texts.position, *drawn).repeat(1, BLOCK_SIZE)
        num_emitted = torch.ones_like(widths)
        for width in range(2, BLOCK_SIZE + 1):
            state = (texts.position, predecessor, sampled)
            block = self._accept(ids[:, :width], logits[:, :width], scores, *state, *drawn, *candidates)
            these = widths == width
            tokens[:, :width] = torch.where(these[:, None], block.tokens, tokens[:, :width])
            num_emitted = torch.where(these, block.num_emitted, num_emitted)
        return widths, tokens, num_emitted
