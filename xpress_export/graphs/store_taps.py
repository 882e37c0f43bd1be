"""Graph ``store-taps``: store [B, 1, M, F], taps [B, W, F] and the row to start at [B] → the store, in place."""

from __future__ import annotations

import torch

from xpress_export.graphs.spec import GraphSpec, TensorSpec
from xpress_export.models.store_taps import StoreTaps


def store_taps_graph(*, num_rows: int, taps_size: int, dtype: torch.dtype) -> GraphSpec:
    """``num_rows`` is M, ``taps_size`` is F, taps · hidden size."""
    return GraphSpec(
        name="store-taps",
        module=StoreTaps(),
        inputs=(
            TensorSpec("store", ("B", 1, num_rows, taps_size), dtype),
            TensorSpec("taps", ("B", "W", taps_size), dtype),
            TensorSpec("start", ("B",)),
        ),
        outputs=(TensorSpec("store_out", ("B", 1, num_rows, taps_size), dtype),),
    )
