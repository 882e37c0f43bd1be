"""Graphs ``refiner-k<K>``: hidden [B, P, H], base logits [B, P-1, V], anchor [B], predecessor [B] → verify ids [B, P].

One graph per built number of passes, shortlist and form, the passes unrolled. K = 0 is the bare drafter: the seed alone, no refiner
weights. Greedy graphs with K ≥ 1 also give the refined logits of the last pass, over the vocabulary or over the shortlist's candidates. The
sampled form draws with frozen noise and always gives what it drew from, the refined logits over the temperature.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from xpress_export.graphs.spec import GraphSpec, TensorSpec
from xpress_export.models.noise import BlockNoise, TokenNoise
from xpress_export.models.refiner import RefinedBlock, Refiner, draw
from xpress_runtime.graph_names import refiner_name

if TYPE_CHECKING:
    from xpress_export.models.markov import MarkovHead


class SeedGraph(nn.Module):
    """K = 0: the base logits' argmax, or a draw from them. ``hidden`` and ``predecessor`` are part of the contract and not read."""

    def forward(
        self, hidden: Tensor, base_logits: Tensor, anchor: Tensor, predecessor: Tensor, noise: BlockNoise | None = None
    ) -> RefinedBlock:
        drafts = draw(base_logits, noise)
        return RefinedBlock(drafts=drafts, scores=base_logits, candidates=None, passes=[drafts])


class RefinerGraph(nn.Module):
    """K ≥ 1 passes over the whole vocabulary (``shortlist`` = 0) or over the best candidates."""

    def __init__(self, refiner: Refiner | MarkovHead, num_passes: int, shortlist: int) -> None:
        super().__init__()
        self.refiner = refiner
        self.num_passes = num_passes
        self.shortlist = shortlist

    def forward(
        self, hidden: Tensor, base_logits: Tensor, anchor: Tensor, predecessor: Tensor, noise: BlockNoise | None = None
    ) -> RefinedBlock:
        block: RefinedBlock = self.refiner(hidden, base_logits, anchor, predecessor, self.num_passes, self.shortlist, noise)
        return block


class GreedyForm(nn.Module):
    """Verify ids; with passes also the refined logits and, with a shortlist, its candidates."""

    def __init__(self, drafted: SeedGraph | RefinerGraph) -> None:
        super().__init__()
        self.drafted = drafted

    def forward(self, hidden: Tensor, base_logits: Tensor, anchor: Tensor, predecessor: Tensor) -> tuple[Tensor, ...]:
        block: RefinedBlock = self.drafted(hidden, base_logits, anchor, predecessor)
        scores = () if isinstance(self.drafted, SeedGraph) else (block.scores,)
        return _outputs(block, anchor, scores)


class SampledForm(nn.Module):
    """Verify ids, what the drafts were drawn from and, with a shortlist, its candidates."""

    def __init__(self, drafted: SeedGraph | RefinerGraph, vocab_size: int) -> None:
        super().__init__()
        self.drafted = drafted
        self.noise = TokenNoise(vocab_size)

    def forward(
        self,
        hidden: Tensor,
        base_logits: Tensor,
        anchor: Tensor,
        predecessor: Tensor,
        position: Tensor,
        noise_key: Tensor,
        inverse_temperature: Tensor,
        sampled: Tensor,
    ) -> tuple[Tensor, ...]:
        noise = BlockNoise(self.noise, noise_key, position, inverse_temperature, sampled, block_size=hidden.shape[1])
        block: RefinedBlock = self.drafted(hidden, base_logits, anchor, predecessor, noise)
        return _outputs(block, anchor, (noise.scale(block.scores),))


def refiner_graph(
    refiner: Refiner | MarkovHead | None,
    num_passes: int,
    shortlist: int,
    *,
    sampled: bool = False,
    hidden_size: int,
    vocab_size: int,
    block_size: int,
    dtype: torch.dtype,
) -> GraphSpec:
    """The graph of ``num_passes`` passes; ``refiner`` may be None only for 0 passes, which have no shortlist."""
    graph: SeedGraph | RefinerGraph
    if num_passes == 0:
        graph, shortlist = SeedGraph(), 0
    else:
        assert refiner is not None, "passes need a refiner"
        graph = RefinerGraph(refiner, num_passes, shortlist)
    scored = shortlist or vocab_size
    outputs = [TensorSpec("verify_ids", ("B", block_size))]
    if sampled or num_passes:
        name = "draft_scores" if sampled else "refined_logits"
        outputs.append(TensorSpec(name, ("B", block_size - 1, scored), torch.float32))
    if shortlist:
        outputs.append(TensorSpec("candidates", ("B", block_size - 1, shortlist)))
    inputs = [
        TensorSpec("hidden", ("B", block_size, hidden_size), dtype),
        TensorSpec("base_logits", ("B", block_size - 1, vocab_size), torch.float32),
        TensorSpec("anchor", ("B",)),
        TensorSpec("predecessor", ("B",)),
    ]
    if sampled:
        inputs += [
            TensorSpec("position", ("B",)),
            TensorSpec("noise_key", ("B", 4)),
            TensorSpec("inverse_temperature", ("B",), torch.float32),
            TensorSpec("sampled", ("B",)),
        ]
    return GraphSpec(
        name=refiner_name(num_passes, shortlist, sampled=sampled),
        module=SampledForm(graph, vocab_size) if sampled else GreedyForm(graph),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
    )


def _outputs(block: RefinedBlock, anchor: Tensor, scores: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    verify_ids = torch.cat([anchor[:, None], block.drafts], dim=1)
    return (verify_ids, *scores, *(() if block.candidates is None else (block.candidates,)))
