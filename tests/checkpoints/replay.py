"""Runs loaded modules the way the loop does: chunks on a static cache, one call after another."""

from __future__ import annotations

import torch
from torch import Tensor

from xpress_export.checkpoints import TargetCheckpoint
from xpress_export.models.decoder import DecoderConfig
from xpress_runtime.sets import AttentionForm

NUM_POSITIONS = 96


def empty_caches(config: DecoderConfig, num_positions: int = NUM_POSITIONS) -> list[Tensor]:
    """One cache a layer, filled with garbage: what is not written yet must not matter."""
    return [torch.full((1, config.num_kv_heads, num_positions, config.head_dim), 7.0) for _ in range(config.num_layers)]


class TargetRun:
    """Embedding → decoder → head of a checkpoint on its own caches, from any position."""

    def __init__(
        self,
        checkpoint: TargetCheckpoint,
        tap_layers: tuple[int, ...],
        form: AttentionForm = AttentionForm.LENGTH,
        num_positions: int = NUM_POSITIONS,
    ) -> None:
        self.embedding = checkpoint.embedding()
        self.head = checkpoint.head()
        self.decoder = checkpoint.decoder(tap_layers, num_positions, form)
        self.keys = empty_caches(checkpoint.config, num_positions)
        self.values = empty_caches(checkpoint.config, num_positions)

    def step(self, ids: list[int], position: int) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden [S, H], taps [S, T·H] and logits [S, V] of ``ids`` at ``position``."""
        embeddings = self.embedding(torch.tensor([ids]))
        hidden, taps, self.keys, self.values = self.decoder(embeddings, torch.tensor([position]), self.keys, self.values)
        logits, token = self.head(hidden, torch.arange(len(ids))[None])
        assert torch.equal(token, logits.argmax(dim=-1))
        return hidden[0], taps[0], logits[0]

    def chunks(self, ids: list[int], sizes: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """The same for consecutive chunks of ``ids``, put together again."""
        assert sum(sizes) == len(ids)
        parts, position = [], 0
        for size in sizes:
            parts.append(self.step(ids[position : position + size], position))
            position += size
        hidden, taps, logits = (torch.cat(columns) for columns in zip(*parts, strict=True))
        return hidden, taps, logits
