"""Graph ``denoise``: hidden [B, P, H] and base logits [B, P-1, V] of this step and as kept, slots, block ids → the same after the step."""

from __future__ import annotations

import torch

from xpress_export.graphs.spec import GraphSpec, TensorSpec
from xpress_export.models.denoise import Denoise


def denoise_graph(*, hidden_size: int, vocab_size: int, block_size: int, dtype: torch.dtype) -> GraphSpec:
    hidden, logits, slots = ("B", block_size, hidden_size), ("B", block_size - 1, vocab_size), ("B", block_size - 1)
    return GraphSpec(
        name="denoise",
        module=Denoise(),
        inputs=(
            TensorSpec("hidden", hidden, dtype),
            TensorSpec("base_logits", logits, torch.float32),
            TensorSpec("kept_hidden", hidden, dtype),
            TensorSpec("kept_logits", logits, torch.float32),
            TensorSpec("filled", slots),
            TensorSpec("block_ids", ("B", block_size)),
            TensorSpec("num_filled", ("B",)),
        ),
        outputs=(
            TensorSpec("out_hidden", hidden, dtype),
            TensorSpec("out_logits", logits, torch.float32),
            TensorSpec("out_filled", slots),
            TensorSpec("out_ids", ("B", block_size)),
        ),
    )
