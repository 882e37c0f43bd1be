"""What an autoregressive drafter does beside its decoder: takes a token from its logits and collects the logits of the block.

Its vocabulary has the target's token ids and may have fewer or more rows than the target's, which only pad.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from xpress_export.models.decoder import Embedding
from xpress_export.models.noise import TokenNoise

# The logit of a token that the drafter has no row for. Over any temperature it stays finite, and its probability is 0.
UNKNOWN = -1e30


class DraftEmbedding(Embedding):
    """Token ids [B, S] → embeddings [B, S, H]. Ids behind the table, which only a target's padding has, read its last row."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids.clamp(max=self.table.shape[0] - 1))


class DraftStep(nn.Module):
    """Logits [B, 1, Vd] fp32 → the best token [B, 1], and ``collected`` [B, P-1, V] moved on by one slot with these logits as the last.

    After P-1 steps ``collected`` holds the logits of the block's proposals in order.
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size

    def forward(self, logits: Tensor, collected: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.in_vocabulary(logits)
        return logits.argmax(dim=-1), self.collect(logits, collected)

    def in_vocabulary(self, logits: Tensor) -> Tensor:
        """[B, 1, Vd] → [B, 1, V]."""
        num_missing = self.vocab_size - logits.shape[2]
        if num_missing <= 0:
            return logits[..., : self.vocab_size]
        return torch.cat([logits, torch.full_like(logits[..., :1], UNKNOWN).expand(-1, -1, num_missing)], dim=-1)

    def collect(self, logits: Tensor, collected: Tensor) -> Tensor:
        if collected.shape[1] == 1:
            return logits
        return torch.cat([collected[:, 1:], logits], dim=1)


class DraftStepSampled(nn.Module):
    """As :class:`DraftStep`, with a draw in rows of ``sampled`` [B] = 1. What is collected is the logits, without temperature and noise.

    ``slot`` [1] is the proposal's, 1 … P-1, and ``position`` [B] the anchor's: the noise is that of a block drafter's slot.
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.step = DraftStep(vocab_size)
        self.noise = TokenNoise(vocab_size)

    def forward(
        self,
        logits: Tensor,
        collected: Tensor,
        slot: Tensor,
        noise_key: Tensor,
        position: Tensor,
        inverse_temperature: Tensor,
        sampled: Tensor,
    ) -> tuple[Tensor, Tensor]:
        logits = self.step.in_vocabulary(logits)
        token = self.noise.draw(logits, slot, noise_key, position, inverse_temperature, sampled)
        return token, self.step.collect(logits, collected)
