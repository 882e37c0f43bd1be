"""Graphs ``draft-step`` and ``draft-step-sampled``: logits [B, 1, Vd], the block's so far [B, P-1, V] → token [B, 1], the block's."""

from __future__ import annotations

import torch

from xpress_export.graphs.spec import GraphSpec, TensorSpec
from xpress_export.models.draft_step import DraftStep, DraftStepSampled


def draft_step_graph(*, sampled: bool, draft_vocab_size: int, vocab_size: int, block_size: int) -> GraphSpec:
    """``draft_vocab_size`` is Vd, the rows of the drafter's table."""
    collected = ("B", block_size - 1, vocab_size)
    noise = (
        TensorSpec("slot", (1,)),
        TensorSpec("noise_key", ("B", 4)),
        TensorSpec("position", ("B",)),
        TensorSpec("inverse_temperature", ("B",), torch.float32),
        TensorSpec("sampled", ("B",)),
    )
    return GraphSpec(
        name="draft-step-sampled" if sampled else "draft-step",
        module=DraftStepSampled(vocab_size) if sampled else DraftStep(vocab_size),
        inputs=(
            TensorSpec("logits", ("B", 1, draft_vocab_size), torch.float32),
            TensorSpec("collected", collected, torch.float32),
            *(noise if sampled else ()),
        ),
        outputs=(TensorSpec("token", ("B", 1)), TensorSpec("collected_out", collected, torch.float32)),
    )
