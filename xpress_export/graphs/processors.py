"""From the target's logits [B, W, V] to a token: graphs ``penalise``, ``count``, ``filter-top-k``, ``filter-top-p`` and ``sample``."""

from __future__ import annotations

import torch

from xpress_export.graphs.spec import GraphSpec, TensorSpec
from xpress_export.models.accept import Sample
from xpress_export.models.processors import Count, Penalise, TopK, TopP


def sample_graph(vocab_size: int) -> GraphSpec:
    return GraphSpec(
        name="sample",
        module=Sample(vocab_size),
        inputs=(
            TensorSpec("logits", ("B", 1, vocab_size), torch.float32),
            TensorSpec("position", ("B",)),
            TensorSpec("noise_key", ("B", 4)),
            TensorSpec("inverse_temperature", ("B",), torch.float32),
            TensorSpec("sampled", ("B",)),
        ),
        outputs=(TensorSpec("token", ("B", 1)),),
    )


def top_k_graph(vocab_size: int) -> GraphSpec:
    return _filter_graph("filter-top-k", TopK(), vocab_size, TensorSpec("top_k", ("B",)))


def top_p_graph(vocab_size: int) -> GraphSpec:
    limits = (TensorSpec("top_p", ("B",), torch.float32), TensorSpec("min_p", ("B",), torch.float32))
    return _filter_graph("filter-top-p", TopP(), vocab_size, *limits)


def _filter_graph(name: str, module: TopK | TopP, vocab_size: int, *limits: TensorSpec) -> GraphSpec:
    logits = ("B", "W", vocab_size)
    return GraphSpec(
        name=name,
        module=module,
        inputs=(TensorSpec("logits", logits, torch.float32), TensorSpec("inverse_temperature", ("B",), torch.float32), *limits),
        outputs=(TensorSpec("filtered", logits, torch.float32),),
    )


def penalise_graph(vocab_size: int) -> GraphSpec:
    logits = ("B", "W", vocab_size)
    return GraphSpec(
        name="penalise",
        module=Penalise(),
        inputs=(
            TensorSpec("logits", logits, torch.float32),
            TensorSpec("verify_ids", ("B", "W")),
            TensorSpec("counts", ("B", vocab_size), torch.float32),
            TensorSpec("in_prompt", ("B", vocab_size), torch.float32),
            *(TensorSpec(name, ("B",), torch.float32) for name in ("repetition", "presence", "frequency")),
        ),
        outputs=(TensorSpec("penalised", logits, torch.float32),),
    )


def count_graph(vocab_size: int) -> GraphSpec:
    return GraphSpec(
        name="count",
        module=Count(),
        inputs=(
            TensorSpec("counts", ("B", vocab_size), torch.float32),
            TensorSpec("verify_ids", ("B", "W")),
            TensorSpec("num_emitted", ("B",)),
        ),
        outputs=(TensorSpec("next_counts", ("B", vocab_size), torch.float32),),
    )
