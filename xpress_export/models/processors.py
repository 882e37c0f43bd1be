"""What changes the target's distribution before a token is taken from it: penalties, and the filters top-k, top-p and min-p.

Both work at every verified position at once, each with its own prefix: the text so far and the drafts before it. Removed tokens get logits
of :data:`REMOVED`; the best token is never removed, so filters change nothing for greedy rows.

Sizes: B rows, W verified positions, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Finite, so that what is computed with it stays a number.
REMOVED = -1e30
# Tokens less likely than exp(-30) times the best weigh nothing, and 24 halvings of 30 tell apart what fp32 logits of that size do.
_RANGE = 30.0
_HALVINGS = 24


class TopK(nn.Module):
    """Logits [B, W, V] → the same, with all but the ``top_k`` [B] int64 best set to REMOVED; off where top_k ≥ V.

    Here and in :class:`TopP` a limit is a threshold that is found by halving, since TensorRT sorts no whole vocabulary: tokens that are
    equal to within 2e-6 (in logits over the temperature) at the limit stay together.
    """

    def forward(self, logits: Tensor, inverse_temperature: Tensor, top_k: Tensor) -> Tensor:
        below = _below_best(logits, inverse_temperature)
        kept = below >= _threshold(below, torch.ones_like(below), top_k[:, None, None].float())
        return torch.where(kept, logits, torch.full_like(logits, REMOVED))


class TopP(nn.Module):
    """Logits [B, W, V] → the same, with all but the fewest best tokens that have ``top_p`` [B] fp32 of the probability, and then those less
    likely than ``min_p`` [B] fp32 times the best, set to REMOVED. Off: top_p = 1, min_p = 0.
    """

    def forward(self, logits: Tensor, inverse_temperature: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        below = _below_best(logits, inverse_temperature)
        weights = torch.exp(below)
        wanted = weights.sum(dim=-1, keepdim=True) * top_p[:, None, None]
        in_top_p = (below >= _threshold(below, weights, wanted)) | (top_p[:, None, None] >= 1)
        kept = in_top_p & (weights >= min_p[:, None, None])
        return torch.where(kept, logits, torch.full_like(logits, REMOVED))


def _below_best(logits: Tensor, inverse_temperature: Tensor) -> Tensor:
    """How far each token is below the best, in logits over the temperature."""
    scaled = logits * inverse_temperature[:, None, None]
    return scaled - scaled.amax(dim=-1, keepdim=True)


def _threshold(below: Tensor, weights: Tensor, wanted: Tensor) -> Tensor:
    """The highest threshold above which the weights [B, W, V] still sum up to ``wanted`` [B, 1 or W, 1]; everything where none does."""

    def suffices(threshold: Tensor) -> Tensor:
        return torch.where(below >= threshold, weights, torch.zeros_like(weights)).sum(dim=-1, keepdim=True) >= wanted

    low = torch.full_like(below[..., :1], -_RANGE)
    any_does = suffices(low)
    step = _RANGE
    for _ in range(_HALVINGS):
        step /= 2
        # One value goes from step to step: with two, or with two searches in one graph, TensorRT's build time doubles with every halving.
        low = low + step * suffices(low + step).float()
    return torch.where(any_does, low, torch.full_like(low, REMOVED))


class Penalise(nn.Module):
    """Logits [B, W, V] behind verify ids [B, W] → with penalties, as transformers and vLLM define them.

    ``counts`` [B, V] fp32: how often each token stands in the output before the anchor; ``in_prompt`` [B, V] fp32: 1 for those of the
    prompt. The prefix at position w also holds verify ids 0 … w; an id of -1 is none. ``repetition``, ``presence``, ``frequency`` [B] fp32.
    """

    def forward(
        self, logits: Tensor, verify_ids: Tensor, counts: Tensor, in_prompt: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
    ) -> Tensor:
        occurrences = counts[:, None, :] + _one_hot(verify_ids, logits.shape[2]).cumsum(dim=1)
        seen = (occurrences + in_prompt[:, None, :]) > 0
        rate = repetition[:, None, None]
        repeated = torch.where(logits > 0, logits / rate, logits * rate)
        penalised = torch.where(seen, repeated, logits)
        in_output = (occurrences > 0).float()
        return penalised - frequency[:, None, None] * occurrences - presence[:, None, None] * in_output


class Count(nn.Module):
    """Counts [B, V] → with a round's verified tokens: the first ``num_emitted`` [B] of verify ids [B, W] now stand before the anchor."""

    def forward(self, counts: Tensor, verify_ids: Tensor, num_emitted: Tensor) -> Tensor:
        place = torch.arange(verify_ids.shape[1], device=verify_ids.device)[None, :]
        kept = (place < num_emitted[:, None]).float()
        return counts + (_one_hot(verify_ids, counts.shape[1]) * kept[..., None]).sum(dim=1)


def _one_hot(ids: Tensor, vocab_size: int) -> Tensor:
    return (ids[..., None] == torch.arange(vocab_size, device=ids.device)).float()
