"""Acceptance: how much of a verified block is kept, and the state that the next round starts from.

Greedy against the target's best tokens, or sampled: rejection sampling of drafts that were drawn from q, against the target's p, so that
what is emitted is distributed as if the target alone had drawn it.

Sizes: B rows, P block size, W verified slots, V vocabulary, Q scored tokens of a slot.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from xpress_export.models.decoder import select_rows
from xpress_export.models.noise import ACCEPTANCE_SLOT, FINAL_SLOT, TokenNoise, uniform_of


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
        accepted = _prefix(verify_ids[:, 1:] == target_tokens[:, :-1]) * active
        final = target_tokens.gather(1, accepted[:, None])[:, 0]
        # Accepted drafts equal the target's tokens, so the target's tokens are the emitted ones.
        return self.advance(accepted, target_tokens, final, verify_ids, position, predecessor, active)

    def advance(
        self, accepted: Tensor, tokens: Tensor, final: Tensor, verify_ids: Tensor, position: Tensor, predecessor: Tensor, active: Tensor
    ) -> AcceptedBlock:
        """The state after ``accepted`` [B] drafts and the ``final`` [B] token behind them."""
        num_emitted = (accepted + 1) * active
        running = active == 1
        anchor = torch.where(running, final, verify_ids[:, 0])
        next_position = position + num_emitted
        masks = torch.full((1, self.block_size - 1), self.mask_token_id, dtype=torch.int64, device=anchor.device)
        return AcceptedBlock(
            accepted,
            tokens,
            num_emitted,
            torch.cat([anchor[:, None], masks.expand(anchor.shape[0], -1)], dim=1),
            anchor,
            torch.where(running, verify_ids.gather(1, accepted[:, None])[:, 0], predecessor),
            next_position,
            position.clone(),
            active * (next_position <= self.last_start).long(),
        )


class AcceptSampled(nn.Module):
    """Verify ids [B, W] (2 ≤ W ≤ P) against the target's logits [B, W, V] and what the drafts were drawn from, draft scores [B, P-1, Q].

    With ``candidates`` [B, P-1, Q] the scores are those tokens', without them Q = V. Rows of ``sampled`` [B] = 0 are greedy.
    """

    def __init__(self, accept: Accept, vocab_size: int) -> None:
        super().__init__()
        self.accept = accept
        self.noise = TokenNoise(vocab_size)

    def forward(
        self,
        verify_ids: Tensor,
        logits: Tensor,
        draft_scores: Tensor,
        position: Tensor,
        predecessor: Tensor,
        active: Tensor,
        noise_key: Tensor,
        inverse_temperature: Tensor,
        sampled: Tensor,
        candidates: Tensor | None = None,
    ) -> AcceptedBlock:
        num_slots = verify_ids.shape[1] - 1
        slots = torch.arange(num_slots, device=verify_ids.device)
        drafts = verify_ids[:, 1:]
        best = logits.argmax(dim=-1)
        scaled = logits * inverse_temperature[:, None, None]
        highest = scaled.amax(dim=-1, keepdim=True)
        total = torch.exp(scaled - highest).sum(dim=-1, keepdim=True)
        p = torch.exp(scaled[:, :-1].gather(2, drafts[..., None]) - highest[:, :-1])[..., 0] / total[:, :-1, 0]
        q = _drawn_probability(
            draft_scores.index_select(1, slots), drafts, None if candidates is None else candidates.index_select(1, slots)
        )
        # The final token's, then one for each draft.
        final_slot = torch.full((1,), FINAL_SLOT, dtype=torch.int64, device=verify_ids.device)
        coefficients = self.noise.coefficients(noise_key, position, torch.cat([final_slot, ACCEPTANCE_SLOT + 1 + slots]))
        uniform = uniform_of(coefficients[:, 1:])
        # Accepted with probability min(1, p / q).
        is_sampled = sampled[:, None] == 1
        kept = (is_sampled & (q > 0) & (uniform * q < p)) | (~is_sampled & (drafts == best[:, :-1]))
        accepted = _prefix(kept) * active

        # What follows: the rest of p that q did not cover where a draft was rejected, p where none was.
        last = accepted[:, None]
        p_row = torch.softmax(select_rows(scaled, last)[:, 0], dim=-1)
        rejected = (accepted < num_slots).float()[:, None]
        q_row = _spread(draft_scores, candidates, last.clamp(max=draft_scores.shape[1] - 1), p_row) * rejected
        rest = (p_row - q_row).clamp(min=0)
        rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, p_row)
        race = self.noise.exponential(coefficients[:, :1])[:, 0]
        final = torch.where(sampled == 1, (rest / race).argmax(dim=-1), best.gather(1, last)[:, 0])

        shifted = torch.cat([drafts, verify_ids[:, :1]], dim=1)
        place = torch.arange(num_slots + 1, device=verify_ids.device)[None, :]
        tokens = torch.where(place < last, shifted, final[:, None])
        return self.accept.advance(accepted, tokens, final, verify_ids, position, predecessor, active)


class Sample(nn.Module):
    """Logits [B, 1, V] → token [B, 1]: the best, or in rows of ``sampled`` [B] = 1 a draw. Plain decoding and the first token."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.noise = TokenNoise(vocab_size)

    def forward(self, logits: Tensor, position: Tensor, noise_key: Tensor, inverse_temperature: Tensor, sampled: Tensor) -> Tensor:
        final_slot = torch.full((1,), FINAL_SLOT, dtype=torch.int64, device=logits.device)
        return self.noise.draw(logits, final_slot, noise_key, position, inverse_temperature, sampled)


def _prefix(kept: Tensor) -> Tensor:
    """kept [B, n] bool → [B], how many are true before the first that is not."""
    return ((~kept).long().cumsum(dim=1) == 0).long().sum(dim=1)


def _drawn_probability(scores: Tensor, drafts: Tensor, candidates: Tensor | None) -> Tensor:
    """The probability [B, n] that softmax(scores [B, n, Q]) gives the drafts [B, n]; 0 for one that is no candidate."""
    weights = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
    if candidates is None:
        of_draft = weights.gather(2, drafts[..., None])[..., 0]
    else:
        of_draft = torch.where(candidates == drafts[..., None], weights, torch.zeros_like(weights)).sum(dim=-1)
    return of_draft / weights.sum(dim=-1)


def _spread(scores: Tensor, candidates: Tensor | None, slot: Tensor, like: Tensor) -> Tensor:
    """softmax of the scores of one ``slot`` [B, 1], over the whole vocabulary [B, V]."""
    row = torch.softmax(select_rows(scores, slot)[:, 0], dim=-1)
    if candidates is None:
        return row
    return torch.zeros_like(like).scatter(1, select_rows(candidates, slot)[:, 0], row)
