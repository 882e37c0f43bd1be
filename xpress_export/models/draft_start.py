"""Where an autoregressive drafter begins a block: with the two last tokens, and at which positions its own drafts are read again."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class DraftStart(nn.Module):
    """Anchor, predecessor, position [B] → ids [B, 2], their position [B], and the positions [B] of the drafts 1 … P-2."""

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self.block_size = block_size

    def forward(self, anchor: Tensor, predecessor: Tensor, position: Tensor) -> tuple[Tensor, ...]:
        ids = torch.stack([predecessor, anchor], dim=1)
        # A row that is not active stands at 0; what it computes is not used.
        start = (position - 1).clamp(min=0)
        return (ids, start, *(position + slot for slot in range(1, self.block_size - 1)))
