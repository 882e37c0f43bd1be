"""Greedy acceptance: how much of a verified block is kept, and the state that the next round starts from."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn


class AcceptedBlock(NamedTuple):
    """What a round leaves behind: counts [B], emitted tokens [B, W] (the first ``num_emitted`` of a row), and the next round's state."""

    accepted: Tensor
    tokens: Tensor
    num_emitted: Tensor
    block_ids: Tensor
    anchor: Tensor
    predecessor: Tensor
    position: Tensor
    context_position: Tensor
    active: Tensor


class Accept(nn.Module):
    """Verify ids [B, W] (anchor and W-1 drafts, W ≤ P; W = 1 is plain decoding) against the target's tokens [B, W].

    The longest prefix of drafts that the target would have produced is kept, then the target's own next token. A row that is not active, or
    whose next round could write past the caches, is frozen: it emits nothing more and its position stays.
    """

    def __init__(self, block_size: int, mask_token_id: int, last_start: int) -> None:
        super().__init__()
        self.block_size = block_size
        self.mask_token_id = mask_token_id
        # The highest position at which a round may still start.
        self.last_start = last_start

    def forward(self, verify_ids: Tensor, target_tokens: Tensor, position: Tensor, predecessor: Tensor, active: Tensor) -> AcceptedBlock:
        mismatches = (verify_ids[:, 1:] != target_tokens[:, :-1]).long()
        accepted = (mismatches.cumsum(dim=1) == 0).long().sum(dim=1) * active
        num_emitted = (accepted + 1) * active
        last = accepted[:, None]
        running = active == 1
        anchor = torch.where(running, target_tokens.gather(1, last)[:, 0], verify_ids[:, 0])
        next_position = position + num_emitted
        masks = torch.full((1, self.block_size - 1), self.mask_token_id, dtype=torch.int64, device=anchor.device)
        return AcceptedBlock(
            accepted,
            # Accepted drafts equal the target's tokens, so the target's tokens are the emitted ones.
            target_tokens,
            num_emitted,
            torch.cat([anchor[:, None], masks.expand(anchor.shape[0], -1)], dim=1),
            anchor,
            torch.where(running, verify_ids.gather(1, last)[:, 0], predecessor),
            next_position,
            position.clone(),
            active * (next_position <= self.last_start).long(),
        )
