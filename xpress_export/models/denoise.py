"""One denoising step: which slots of a block the drafter has made up its mind about, and what it thought of them.

The drafter fills the most confident slots, reads its own choice and goes on with the rest. Knows nothing about the drafter itself.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Denoise(nn.Module):
    """Hidden [B, P, H] and base logits [B, P-1, V] fp32 of this step and as kept, ``filled`` [B, P-1], block ids [B, P] → the latter four.

    Of the slots that are still open (``filled`` 0) the most confident are filled with their best token, until ``num_filled`` [B] slots are
    filled in all; of equals the first. A filled slot keeps the hidden state and the base logits of the step that filled it, and the
    anchor's hidden state is the first step's, in which no slot was filled. What is kept of an open slot means nothing.
    """

    def forward(
        self,
        hidden: Tensor,
        base_logits: Tensor,
        kept_hidden: Tensor,
        kept_logits: Tensor,
        filled: Tensor,
        block_ids: Tensor,
        num_filled: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        was_open = filled == 0
        confidence = torch.softmax(base_logits, dim=-1).amax(dim=-1)
        num_before = _num_more_confident(confidence, 1 - filled)
        fills = was_open & (num_before < num_filled[:, None] - filled.sum(dim=1, keepdim=True))
        is_first = filled.sum(dim=1, keepdim=True) == 0
        is_new = torch.cat([is_first, was_open], dim=1)
        return (
            torch.where(is_new[..., None], hidden, kept_hidden),
            torch.where(was_open[..., None], base_logits, kept_logits),
            filled + fills.long(),
            torch.cat([block_ids[:, :1], torch.where(fills, base_logits.argmax(dim=-1), block_ids[:, 1:])], dim=1),
        )


def _num_more_confident(confidence: Tensor, is_open: Tensor) -> Tensor:
    """For each slot of confidence [B, n], how many of the open ones ([B, n] int64) come before it: a rank without a sort."""
    num_slots = confidence.shape[1]
    other, own = confidence[:, None, :], confidence[:, :, None]
    stands_before = torch.ones(num_slots, num_slots, dtype=torch.bool, device=confidence.device).tril(-1)
    comes_before = (other > own) | ((other == own) & stands_before)
    return (comes_before.long() * is_open[:, None, :]).sum(dim=-1)
