"""The Markov head (DSpark "vanilla"): a logit bias that follows from the token before, so the block is drafted from left to right.

It stands in the place of the xPress refiner: same inputs, same result. Its P-1 steps wait for each other and are still one graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from xpress_export.models.noise import BlockNoise
from xpress_export.models.refiner import RefinedBlock


@dataclass(frozen=True)
class MarkovConfig:
    """Sizes of a Markov head."""

    vocab_size: int
    rank: int
    block_size: int

    @property
    def num_passes(self) -> int:
        """Every slot once."""
        return self.block_size - 1


class MarkovHead(nn.Module):
    """Base logits [B, P-1, V] fp32 and anchor [B] → drafts and their scores: base + w2(w1[token before]), slot by slot.

    ``hidden`` and ``predecessor`` are part of the refiner's contract and not read. ``num_passes`` is P-1, or 0 for the bare drafter.
    """

    def __init__(self, config: MarkovConfig) -> None:
        super().__init__()
        self.config = config
        self.w1 = nn.Parameter(torch.empty(config.vocab_size, config.rank), requires_grad=False)
        self.w2 = nn.Parameter(torch.empty(config.vocab_size, config.rank), requires_grad=False)

    def forward(
        self,
        hidden: Tensor,  # noqa: ARG002
        base_logits: Tensor,
        anchor: Tensor,
        predecessor: Tensor,  # noqa: ARG002
        num_passes: int,
        shortlist: int,
        noise: BlockNoise | None = None,
    ) -> RefinedBlock:
        if num_passes not in (0, self.config.num_passes):
            raise ValueError(f"a Markov head settles a block in {self.config.num_passes} passes, not in {num_passes}")
        base, candidates, rows = base_logits, None, None
        if shortlist:
            base, candidates = base_logits.topk(shortlist, dim=-1)
            rows = nn.functional.embedding(candidates, self.w2)
        drafts: list[Tensor] = []
        scores: list[Tensor] = []
        for slot in range(self.config.block_size - 1):
            this = slice(slot, slot + 1)
            slot_scores = base[:, this]
            if num_passes:
                before = nn.functional.embedding(drafts[-1][:, 0] if drafts else anchor, self.w1)
                slot_scores = slot_scores + self._bias(before, None if rows is None else rows[:, slot])[:, None]
            slot_candidates = None if candidates is None else candidates[:, this]
            perturbed = slot_scores if noise is None else noise.perturb(slot_scores, this, slot_candidates)
            best = perturbed.argmax(dim=-1)
            drafts.append(best if slot_candidates is None else slot_candidates.gather(-1, best[..., None])[..., 0])
            scores.append(slot_scores)
        block = torch.cat(drafts, dim=1)
        return RefinedBlock(drafts=block, scores=torch.cat(scores, dim=1), candidates=candidates, passes=[block])

    def _bias(self, before: Tensor, rows: Tensor | None) -> Tensor:
        """before [B, r] → [B, V] fp32, or [B, C] of the candidates' ``rows`` of w2 [B, C, r]."""
        if rows is None:
            return nn.functional.linear(before, self.w2).float()
        return (rows @ before[..., None])[..., 0].float()
