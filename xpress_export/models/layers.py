"""Building blocks shared by the target decoder and the drafter.

Weights of a :class:`Linear` are stored [in, out], so that a product is one ONNX MatMul with its weight as it lies on disk. Query, key and
value projections are packed into one product, and so are gate and up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from xpress_export.models import ops

# Of a gated MLP: "gelu_tanh" is GELU in its tanh approximation.
Activation = Literal["silu", "gelu_tanh"]


class Linear(nn.Module):
    """states [..., in] → [..., out]; weight stored [in, out]."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, states: Tensor) -> Tensor:
        product: Tensor = states @ self.weight
        return product if self.bias is None else product + self.bias


class RmsNorm(nn.Module):
    """RMS norm over the last axis; weight [H]."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.epsilon = epsilon

    def forward(self, states: Tensor) -> Tensor:
        normed: Tensor = ops.rms_norm(states, self.weight, self.epsilon)
        return normed


class GatedMlp(nn.Module):
    """down(activation(gate) · up) with gate and up packed: states [..., H] → [..., H]."""

    def __init__(self, hidden_size: int, intermediate_size: int, activation: Activation = "silu", *, bias: bool = False) -> None:
        super().__init__()
        self.gate_up = Linear(hidden_size, 2 * intermediate_size, bias=bias)
        self.down = Linear(intermediate_size, hidden_size, bias=bias)
        self.activation = activation

    def forward(self, states: Tensor) -> Tensor:
        gate, up = self.gate_up(states).chunk(2, dim=-1)
        gate = nn.functional.silu(gate) if self.activation == "silu" else nn.functional.gelu(gate, approximate="tanh")
        product: Tensor = self.down(gate * up)
        return product


class RotaryTables(nn.Module):
    """Cosines and sines of every position below the cache size: two tables [N, R/2]. The first R of a head's dims are rotated."""

    cos: Tensor
    sin: Tensor

    def __init__(self, inverse_frequencies: Tensor, attention_scaling: float, num_positions: int) -> None:
        super().__init__()
        angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * inverse_frequencies.double()[None, :]
        self.register_buffer("cos", (angles.cos() * attention_scaling).float(), persistent=False)
        self.register_buffer("sin", (angles.sin() * attention_scaling).float(), persistent=False)

    def forward(self, states: Tensor, positions: Tensor) -> Tensor:
        rotated: Tensor = ops.rotary_embedding(states, self.cos, self.sin, positions)
        return rotated


@dataclass(frozen=True)
class AttentionBounds:
    """Which cache columns a query row sees: the first ``key_lengths`` [B], or exactly ``mask`` [B, 1, S, N].

    ONNX Runtime's CPU kernel takes the lengths; TensorRT drops them without a word and needs the mask. One of the two is set.
    """

    causal: bool
    key_lengths: Tensor | None = None
    mask: Tensor | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, cap: float | None) -> Tensor:
        """query [B, heads, S, D], caches [B, kv heads, N, D] → [B, heads, S, D]. ``cap`` None: scores are not bounded."""
        attended: Tensor
        if self.key_lengths is not None:
            attended = ops.length_attention(query, key, value, self.key_lengths, scale, cap or 0.0, self.causal)
        else:
            assert self.mask is not None, "one of key_lengths and mask is set"
            attended = ops.mask_attention(query, key, value, self.mask, scale, cap or 0.0)
        return attended


def split_heads(states: Tensor, num_heads: int, head_dim: int) -> Tensor:
    """[B, S, heads · D] → [B, heads, S, D]."""
    return states.reshape(states.shape[0], states.shape[1], num_heads, head_dim).transpose(1, 2)


def merge_heads(states: Tensor) -> Tensor:
    """[B, heads, S, D] → [B, S, heads · D]."""
    return states.transpose(1, 2).reshape(states.shape[0], states.shape[2], states.shape[1] * states.shape[3])
