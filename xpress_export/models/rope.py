"""Rotary frequencies of a checkpoint, computed by transformers, so that every scaling kind means what it means there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from xpress_export.models.layers import RotaryTables

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")

Parameter = float | int | bool | tuple[float, ...]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one checkpoint: base, the parameters of its kind, and how many dims of a head are rotated."""

    rotary_dim: int
    theta: float
    max_positions: int
    rope_type: str = "default"
    scaling: tuple[tuple[str, Parameter], ...] = ()

    @property
    def usable_positions(self) -> int:
        """Positions below which the frequencies do not depend on the length. LongRoPE has others for texts that grow beyond."""
        if self.rope_type != "longrope":
            return self.max_positions
        original = dict(self.scaling)["original_max_position_embeddings"]
        assert isinstance(original, int)
        return min(original, self.max_positions)


def distinct_ropes(ropes: Iterable[RopeConfig | None]) -> tuple[RopeConfig, ...]:
    """Each once, in the order of their first layer; layers without one left out."""
    return tuple(dict.fromkeys(rope for rope in ropes if rope is not None))


class RotaryModules(nn.ModuleList):
    """The tables of each distinct rotary embedding of a model."""

    def __init__(self, ropes: Iterable[RopeConfig | None], num_positions: int) -> None:
        distinct = distinct_ropes(ropes)
        super().__init__(rotary_tables(rope, num_positions) for rope in distinct)
        self.ropes = distinct

    def by_rope(self) -> dict[RopeConfig | None, nn.Module | None]:
        """Each module by its rope; a layer without one has none."""
        return {None: None, **dict(zip(self.ropes, self, strict=True))}


def rotary_tables(rope: RopeConfig, num_positions: int) -> RotaryTables:
    """Tables [num_positions, rotary_dim / 2] in fp32. Only kinds whose frequencies do not depend on the length are supported."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = {name: list(value) if isinstance(value, tuple) else value for name, value in rope.scaling}
    config = LlamaConfig(
        hidden_size=rope.rotary_dim,
        num_attention_heads=1,
        head_dim=rope.rotary_dim,
        max_position_embeddings=rope.max_positions,
        rope_parameters={"rope_type": rope.rope_type, "rope_theta": rope.theta, **scaling},
    )
    embedding = LlamaRotaryEmbedding(config)
    return RotaryTables(embedding.inv_freq, float(embedding.attention_scaling), num_positions)
