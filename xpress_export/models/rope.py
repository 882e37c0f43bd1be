"""Rotary frequencies of a checkpoint, computed by transformers, so that every scaling kind means what it means there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from xpress_export.models.layers import RotaryTables

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one checkpoint: base, head dim and the scaling parameters of its kind."""

    head_dim: int
    theta: float
    max_positions: int
    rope_type: str = "default"
    scaling: Mapping[str, float | int | bool] = field(default_factory=dict)


def rotary_tables(rope: RopeConfig, num_positions: int) -> RotaryTables:
    """Tables [num_positions, head_dim / 2] in fp32. Only kinds whose frequencies do not depend on the length are supported."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=rope.head_dim,
        num_attention_heads=1,
        head_dim=rope.head_dim,
        max_position_embeddings=rope.max_positions,
        rope_parameters={"rope_type": rope.rope_type, "rope_theta": rope.theta, **rope.scaling},
    )
    embedding = LlamaRotaryEmbedding(config)
    return RotaryTables(embedding.inv_freq, float(embedding.attention_scaling), num_positions)
