"""Prompt lookup: the last tokens were written before, so what followed them then is proposed again. A drafter without weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

# Trailing tokens that are compared. Longer matches are rarer and hardly surer.
MAX_MATCH = 3
# Confidence of one matched token: even the longest match is no certainty.
_CONFIDENCE = 1 / (MAX_MATCH + 1)


class FoundBlock(NamedTuple):
    """The history [B, N], the block to verify [B, P], and its proposals as a distribution with one candidate a slot, [B, P-1, 1]."""

    history: Tensor
    verify_ids: Tensor
    draft_scores: Tensor
    candidates: Tensor
    confidence: Tensor


class Lookup(nn.Module):
    """History [B, N] (the token at each position) and the round's tokens [B, P] → the history up to ``position`` [B], and proposals.

    Of ``tokens`` the first ``position - context_position`` are new, from ``context_position`` + 1 on; the anchor is the token at
    ``position``. Proposals follow the latest of the longest earlier matches with the last tokens, and where they would pass the anchor
    repeat from the match on. Without a match they are arbitrary and their ``confidence`` [B, P-1] is 0.
    """

    def forward(self, history: Tensor, tokens: Tensor, context_position: Tensor, position: Tensor) -> FoundBlock:
        place = torch.arange(history.shape[1], device=history.device)[None, :]
        start, anchor_place = context_position[:, None], position[:, None]
        source = (place - start - 1).clamp(0, tokens.shape[1] - 1)
        is_new = (place > start) & (place <= anchor_place)
        # Everything below reads the updated history. Written twice it stays the same, so both may have one address.
        history = torch.where(is_new, tokens.gather(1, source), history)

        length = _match_length(history, anchor_place) * (place < anchor_place).long()
        longest = length.amax(dim=1, keepdim=True)
        # The place before the text is found where no other is: position 0.
        match = torch.where((length == longest) & (place < anchor_place), place, -1).amax(dim=1, keepdim=True)
        steps = torch.arange(tokens.shape[1] - 1, device=history.device)[None, :]
        proposals = history.gather(1, match + 1 + steps % (anchor_place - match))
        return FoundBlock(
            history,
            torch.cat([history.gather(1, anchor_place), proposals], dim=1),
            torch.zeros_like(proposals, dtype=torch.float32)[..., None],
            proposals[..., None],
            (longest.float() * _CONFIDENCE).expand(-1, tokens.shape[1] - 1),
        )


def _match_length(history: Tensor, anchor_place: Tensor) -> Tensor:
    """For each place j, how many of history[j], history[j-1], … equal the anchor and the tokens before it: [B, N], at most MAX_MATCH."""
    equal = (history == history.gather(1, anchor_place)).long()
    length = equal
    for back in range(1, MAX_MATCH):
        # No token is -1: a match ends where the text begins.
        earlier = torch.cat([torch.full_like(history[:, :back], -1), history[:, :-back]], dim=1)
        equal = equal * (earlier == history.gather(1, (anchor_place - back).clamp(min=0))).long()
        length = length + equal
    return length
