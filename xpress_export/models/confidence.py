"""How sure a drafter is of each slot: what a choice of width may rest on before any token is drawn."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Confidence(nn.Module):
    """Scores [B, P-1, Q] fp32 → the largest probability of their softmax [B, P-1]."""

    def forward(self, scores: Tensor) -> Tensor:
        return torch.softmax(scores, dim=-1).amax(dim=-1)
