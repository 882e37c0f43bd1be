"""Graph ``draft-start``: anchor, predecessor, position [B] → ids [B, 2], their position [B], positions of the drafts [B] each."""

from __future__ import annotations

from xpress_export.graphs.spec import GraphSpec, TensorSpec
from xpress_export.models.draft_start import DraftStart


def draft_start_graph(block_size: int) -> GraphSpec:
    return GraphSpec(
        name="draft-start",
        module=DraftStart(block_size),
        inputs=tuple(TensorSpec(name, ("B",)) for name in ("anchor", "predecessor", "position")),
        outputs=(
            TensorSpec("ids", ("B", 2)),
            TensorSpec("start", ("B",)),
            *(TensorSpec(f"position.{slot}", ("B",)) for slot in range(1, block_size - 1)),
        ),
    )
