"""Graph ``lookup``: history [B, N], tokens of the last round [B, P], its position and the next → history, a block to verify, confidence."""

from __future__ import annotations

import torch

from xpress_export.graphs.spec import Dim, GraphSpec, TensorSpec
from xpress_export.models.lookup import Lookup


def lookup_graph(block_size: int, num_positions: Dim) -> GraphSpec:
    """``num_positions`` is N: a number, or the dynamic dim "N" where caches have one."""
    num_proposals = block_size - 1
    return GraphSpec(
        name="lookup",
        module=Lookup(),
        inputs=(
            TensorSpec("history", ("B", num_positions)),
            TensorSpec("tokens", ("B", block_size)),
            TensorSpec("context_position", ("B",)),
            TensorSpec("position", ("B",)),
        ),
        outputs=(
            TensorSpec("history_out", ("B", num_positions)),
            TensorSpec("verify_ids", ("B", block_size)),
            TensorSpec("draft_scores", ("B", num_proposals, 1), torch.float32),
            TensorSpec("candidates", ("B", num_proposals, 1)),
            TensorSpec("confidence", ("B", num_proposals), torch.float32),
        ),
    )
