"""A store for taps that no drafter has read yet: rounds without a block drafter leave theirs here."""

from __future__ import annotations

from torch import Tensor, nn

from xpress_export.models.ops import cache_update


class StoreTaps(nn.Module):
    """Store [B, 1, M, F] and taps [B, W, F] → the store with the taps at rows ``start`` [B] … ``start`` + W - 1."""

    def forward(self, store: Tensor, taps: Tensor, start: Tensor) -> Tensor:
        updated: Tensor = cache_update(store, taps[:, None], start)
        return updated
