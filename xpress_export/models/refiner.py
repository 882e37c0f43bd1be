"""The xPress refiner: K parallel Jacobi passes that add a causal logit bias to the drafter's block.

Parameter names follow the paper's head: ``w1`` looks up the previous token, ``w2`` reads the bias out, ``mix`` is the causal mixer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from xpress_export.models.layers import GatedMlp, Linear
from xpress_export.models.noise import BlockNoise

AnchorPredecessor = Literal["previous", "anchor"]


@dataclass(frozen=True)
class RefinerConfig:
    """Sizes of a refiner; ``num_passes`` and ``shortlist`` are the checkpoint's own defaults (0 = full vocabulary).

    ``anchor_predecessor``: which token stands before the anchor, the real "previous" one or the "anchor" itself once more. It depends on
    how the refiner was trained.
    """

    hidden_size: int
    vocab_size: int
    rank: int
    mlp_hidden: int
    block_size: int
    num_passes: int
    shortlist: int
    anchor_predecessor: AnchorPredecessor = "previous"


class Refiner(nn.Module):
    """Hidden [B, P, H], base logits [B, P-1, V] fp32, anchor [B], predecessor [B] → refined drafts and scores after ``num_passes``."""

    def __init__(self, config: RefinerConfig) -> None:
        super().__init__()
        rank = config.rank
        self.config = config
        self.w1 = nn.Parameter(torch.empty(config.vocab_size, rank), requires_grad=False)
        self.w2 = nn.Parameter(torch.empty(config.vocab_size, rank), requires_grad=False)
        self.down_h = Linear(config.hidden_size, rank)
        self.down_g = Linear(config.hidden_size, rank)
        # in_proj of the paper, split by what it reads: only the previous token's third changes between passes.
        self.in_hidden = Linear(2 * rank, rank)
        self.in_token = Linear(rank, rank)
        # tril(L) + I, folded once: [r, P, P].
        self.mix = nn.Parameter(torch.empty(rank, config.block_size, config.block_size), requires_grad=False)
        self.mlp = GatedMlp(rank, config.mlp_hidden)

    def forward(
        self,
        hidden: Tensor,
        base_logits: Tensor,
        anchor: Tensor,
        predecessor: Tensor,
        num_passes: int,
        shortlist: int,
        noise: BlockNoise | None = None,
    ) -> RefinedBlock:
        static = self._static_half(hidden)
        known = torch.stack([predecessor, anchor], dim=1)
        readout = ShortlistReadout(base_logits, self.w2, shortlist, noise) if shortlist else FullReadout(base_logits, self.w2, noise)
        scores = readout.base
        drafts = readout.pick(scores)
        passes = [drafts]
        for _ in range(num_passes):
            previous = torch.cat([known, drafts[:, :-1]], dim=1)
            scores = readout.refine(self._update(static, previous)[:, 1:])
            drafts = readout.pick(scores)
            passes.append(drafts)
        return RefinedBlock(drafts=drafts, scores=scores, candidates=readout.candidates, passes=passes)

    def _static_half(self, hidden: Tensor) -> Tensor:
        mean = hidden.mean(dim=1, keepdim=True).expand(-1, hidden.shape[1], -1)
        projected: Tensor = self.in_hidden(torch.cat([self.down_h(hidden), self.down_g(mean)], dim=-1))
        return projected

    def _update(self, static: Tensor, previous: Tensor) -> Tensor:
        z = static + self.in_token(nn.functional.embedding(previous, self.w1))
        mixed = (self.mix[None] * z.transpose(1, 2)[:, :, None, :]).sum(dim=-1).transpose(1, 2)
        updated: Tensor = mixed + self.mlp(mixed)
        return updated


@dataclass(frozen=True)
class RefinedBlock:
    """``drafts`` [B, P-1], ``scores`` [B, P-1, V] (or [B, P-1, C] over ``candidates``), the drafts after the seed and after each pass."""

    drafts: Tensor
    scores: Tensor
    candidates: Tensor | None
    passes: list[Tensor]


class FullReadout:
    """Scores every token of the vocabulary."""

    candidates: Tensor | None = None

    def __init__(self, base: Tensor, w2: Tensor, noise: BlockNoise | None) -> None:
        self.base = base
        self.w2 = w2
        self.noise = noise

    def refine(self, update: Tensor) -> Tensor:
        """update [B, P-1, r] → refined logits [B, P-1, V]."""
        flat = nn.functional.linear(update.reshape(-1, update.shape[2]), self.w2)
        return self.base + flat.reshape(self.base.shape).float()

    def pick(self, scores: Tensor) -> Tensor:
        """scores [B, P-1, V] → the best token of each slot, or the drawn one."""
        return draw(scores, self.noise)


class ShortlistReadout:
    """Scores only the base logits' best C candidates of each slot; their w2 rows are gathered once per block."""

    def __init__(self, base: Tensor, w2: Tensor, size: int, noise: BlockNoise | None) -> None:
        top = base.topk(size, dim=-1)
        self.base = top.values
        self.candidates: Tensor | None = top.indices
        self.noise = noise
        self.rows = nn.functional.embedding(top.indices, w2)

    def refine(self, update: Tensor) -> Tensor:
        """update [B, P-1, r] → refined logits of the candidates [B, P-1, C]."""
        return self.base + (self.rows @ update[..., None])[..., 0].float()

    def pick(self, scores: Tensor) -> Tensor:
        """scores [B, P-1, C] → the best token of each slot, or the drawn one."""
        assert self.candidates is not None
        best = draw(scores, self.noise, self.candidates)
        return self.candidates.gather(-1, best[..., None])[..., 0]


def draw(scores: Tensor, noise: BlockNoise | None, candidates: Tensor | None = None) -> Tensor:
    """scores [B, P-1, V or C] → [B, P-1], the index of the best; with noise a draw from each slot's softmax."""
    if noise is not None:
        scores = noise.perturb(scores, slice(0, scores.shape[1]), candidates)
    return scores.argmax(dim=-1)
