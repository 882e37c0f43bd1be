"""Graphs ``refiner-k<K>``: hidden [B, P, H], base logits [B, P-1, V], anchor [B], predecessor [B] → verify ids [B, P].

One graph per built number of passes, the passes unrolled. K = 0 is the bare drafter: the seed alone, no refiner weights. Graphs with K ≥ 1
also give the refined logits of the last pass, over the vocabulary or over the shortlist's candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from xpress_export.graphs.spec import GraphSpec, TensorSpec
from xpress_export.models.refiner import Refiner


class SeedGraph(nn.Module):
    """K = 0: the base logits' argmax. ``hidden`` and ``predecessor`` are part of the contract and not read."""

    def forward(self, hidden: Tensor, base_logits: Tensor, anchor: Tensor, predecessor: Tensor) -> Tensor:
        return torch.cat([anchor[:, None], base_logits.argmax(dim=-1)], dim=1)


class RefinerGraph(nn.Module):
    """K ≥ 1 passes over the whole vocabulary (``shortlist`` = 0) or over the best candidates."""

    def __init__(self, refiner: Refiner, num_passes: int, shortlist: int) -> None:
        super().__init__()
        self.refiner = refiner
        self.num_passes = num_passes
        self.shortlist = shortlist

    def forward(self, hidden: Tensor, base_logits: Tensor, anchor: Tensor, predecessor: Tensor) -> tuple[Tensor, ...]:
        block = self.refiner(hidden, base_logits, anchor, predecessor, self.num_passes, self.shortlist)
        verify_ids = torch.cat([anchor[:, None], block.drafts], dim=1)
        if block.candidates is None:
            return verify_ids, block.scores
        return verify_ids, block.scores, block.candidates


def refiner_graph(
    refiner: Refiner | None, num_passes: int, shortlist: int, *, hidden_size: int, vocab_size: int, block_size: int, dtype: torch.dtype
) -> GraphSpec:
    """The graph of ``num_passes`` passes; ``refiner`` may be None only for 0 passes."""
    scored = shortlist or vocab_size
    outputs = [TensorSpec("verify_ids", ("B", block_size))]
    module: nn.Module
    if num_passes == 0:
        module = SeedGraph()
    else:
        assert refiner is not None, "passes need a refiner"
        module = RefinerGraph(refiner, num_passes, shortlist)
        outputs.append(TensorSpec("refined_logits", ("B", block_size - 1, scored), torch.float32))
        if shortlist:
            outputs.append(TensorSpec("candidates", ("B", block_size - 1, shortlist)))
    return GraphSpec(
        name=f"refiner-k{num_passes}",
        module=module,
        inputs=(
            TensorSpec("hidden", ("B", block_size, hidden_size), dtype),
            TensorSpec("base_logits", ("B", block_size - 1, vocab_size), torch.float32),
            TensorSpec("anchor", ("B",)),
            TensorSpec("predecessor", ("B",)),
        ),
        outputs=tuple(outputs),
    )
