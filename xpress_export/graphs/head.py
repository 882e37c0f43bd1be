"""Graph ``head``: hidden [B, S, H] and the rows wanted [B, R] → logits [B, R, V] fp32 and token [B, R] (argmax)."""

from __future__ import annotations

import torch

from xpress_export.graphs.spec import GraphSpec, TensorSpec
from xpress_export.models.decoder import Head


def head_graph(module: Head) -> GraphSpec:
    vocab_size, hidden_size = module.table.shape
    return GraphSpec(
        name="head",
        module=module,
        inputs=(TensorSpec("hidden", ("B", "S", hidden_size), module.table.dtype), TensorSpec("rows", ("B", "R"))),
        outputs=(TensorSpec("logits", ("B", "R", vocab_size), torch.float32), TensorSpec("token", ("B", "R"))),
    )
