"""Graph ``confidence``: scores [B, P-1, Q] over a vocabulary or over candidates → the largest probability of each slot [B, P-1]."""

from __future__ import annotations

import torch

from xpress_export.graphs.spec import GraphSpec, TensorSpec
from xpress_export.models.confidence import Confidence


def confidence_graph(block_size: int) -> GraphSpec:
    return GraphSpec(
        name="confidence",
        module=Confidence(),
        inputs=(TensorSpec("scores", ("B", block_size - 1, "Q"), torch.float32),),
        outputs=(TensorSpec("confidence", ("B", block_size - 1), torch.float32),),
    )
