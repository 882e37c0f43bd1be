"""Graphs ``accept``, ``accept-sampled``, ``accept-candidates``: a verified block and the state → what is emitted and the next state.

``accept`` is greedy: verify ids and target tokens [B, W], W ≤ P; W = 1 is plain decoding. The other two take the target's logits [B, W, V],
W ≥ 2, and what the drafts were drawn from: scores over the vocabulary [B, P-1, V], or over candidates [B, P-1, Q].
"""

from __future__ import annotations

import torch

from xpress_export.graphs.spec import GraphSpec, TensorSpec
from xpress_export.models.accept import Accept, AcceptSampled

_STATE = (TensorSpec("position", ("B",)), TensorSpec("predecessor", ("B",)), TensorSpec("active", ("B",)))


def accept_graph(module: Accept) -> GraphSpec:
    return GraphSpec(
        name="accept",
        module=module,
        inputs=(TensorSpec("verify_ids", ("B", "W")), TensorSpec("target_tokens", ("B", "W")), *_STATE),
        outputs=_outputs(module.block_size),
    )


def accept_sampled_graph(module: Accept, vocab_size: int, *, with_candidates: bool) -> GraphSpec:
    num_proposals = module.block_size - 1
    scored = "Q" if with_candidates else vocab_size
    return GraphSpec(
        name="accept-candidates" if with_candidates else "accept-sampled",
        module=AcceptSampled(module, vocab_size),
        inputs=(
            TensorSpec("verify_ids", ("B", "W")),
            TensorSpec("logits", ("B", "W", vocab_size), torch.float32),
            TensorSpec("draft_scores", ("B", num_proposals, scored), torch.float32),
            *_STATE,
            TensorSpec("noise_key", ("B", 4)),
            TensorSpec("inverse_temperature", ("B",), torch.float32),
            TensorSpec("sampled", ("B",)),
            *((TensorSpec("candidates", ("B", num_proposals, scored)),) if with_candidates else ()),
        ),
        outputs=_outputs(module.block_size),
    )


def _outputs(block_size: int) -> tuple[TensorSpec, ...]:
    return (
        TensorSpec("accepted", ("B",)),
        TensorSpec("tokens", ("B", "W")),
        TensorSpec("num_emitted", ("B",)),
        TensorSpec("block_ids", ("B", block_size)),
        TensorSpec("next_anchor", ("B",)),
        TensorSpec("next_predecessor", ("B",)),
        TensorSpec("next_position", ("B",)),
        TensorSpec("context_position", ("B",)),
        TensorSpec("next_active", ("B",)),
    )
