"""Graph ``accept`` (greedy): verify ids and target tokens [B, W], state → accepted count, emitted tokens, the next round's state.

W ≤ P is the number of verified slots; W = 1 is plain decoding.
"""

from __future__ import annotations

from xpress_export.graphs.spec import GraphSpec, TensorSpec
from xpress_export.models.accept import Accept


def accept_graph(module: Accept) -> GraphSpec:
    return GraphSpec(
        name="accept",
        module=module,
        inputs=(
            TensorSpec("verify_ids", ("B", "W")),
            TensorSpec("target_tokens", ("B", "W")),
            TensorSpec("position", ("B",)),
            TensorSpec("predecessor", ("B",)),
            TensorSpec("active", ("B",)),
        ),
        outputs=(
            TensorSpec("accepted", ("B",)),
            TensorSpec("tokens", ("B", "W")),
            TensorSpec("num_emitted", ("B",)),
            TensorSpec("block_ids", ("B", module.block_size)),
            TensorSpec("next_anchor", ("B",)),
            TensorSpec("next_predecessor", ("B",)),
            TensorSpec("next_position", ("B",)),
            TensorSpec("context_position", ("B",)),
            TensorSpec("next_active", ("B",)),
        ),
    )
