"""The target decoder, its embedding table and its head. Every family (checkpoints/families.py) is a mapping onto it.

Everything a family may vary is a field of :class:`DecoderConfig`. The module works on static caches and positions; it knows nothing about
checkpoints or tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from xpress_export.models.layers import (
    Activation,
    AttentionBounds,
    GatedMlp,
    Linear,
    RmsNorm,
    RotaryTables,
    merge_heads,
    split_heads,
)
from xpress_export.models.ops import cache_update
from xpress_export.models.rope import RopeConfig, RotaryModules
from xpress_runtime.sets import AttentionForm


@dataclass(frozen=True)
class LayerConfig:
    """What one layer's attention sees. ``window``: that many latest positions, its own among them; None: all. ``rope`` None: no rotation.

    ``causal`` False: a drafter's block, whose rows see each other.
    """

    rope: RopeConfig | None
    window: int | None = None
    causal: bool = True


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and switches of a decoder. ``q_width`` may differ from ``hidden_size``.

    ``attention_scale`` multiplies scores, which ``attention_cap`` then bounds (cap · tanh(score / cap)); ``logit_scale`` and ``logit_cap``
    do the same to logits. ``residual_scale`` multiplies what a layer adds. With ``sandwich_norms`` that is normed too.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    layers: tuple[LayerConfig, ...]
    activation: Activation
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sandwich_norms: bool
    attention_scale: float
    attention_cap: float | None
    residual_scale: float
    embedding_scale: float
    logit_scale: float
    logit_cap: float | None
    tied_embeddings: bool
    max_positions: int

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim


class DecoderAttention(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.qkv = Linear(config.hidden_size, config.q_width + 2 * config.kv_width, bias=config.qkv_bias)
        self.output = Linear(config.q_width, config.hidden_size, bias=config.output_bias)
        self.q_norm = RmsNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RmsNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(
        self,
        states: Tensor,
        rotary: RotaryTables | None,
        position: Tensor,
        positions: Tensor,
        bounds: AttentionBounds,
        key_cache: Tensor,
        value_cache: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        # One reshape and one transpose for all heads; the split along heads is then of whole blocks.
        heads = split_heads(self.qkv(states), config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        query, key, value = torch.split(heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if rotary is not None:
            query, key = rotary(query, positions), rotary(key, positions)
        key_cache = cache_update(key_cache, key, position)
        value_cache = cache_update(value_cache, value, position)
        attended = bounds.attend(query, key_cache, value_cache, config.attention_scale, config.attention_cap)
        return self.output(merge_heads(attended)), key_cache, value_cache


class DecoderLayer(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.residual_scale = config.residual_scale
        self.attention_norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = DecoderAttention(config)
        self.attention_out_norm = RmsNorm(config.hidden_size, config.rms_norm_eps) if config.sandwich_norms else None
        self.mlp_norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMlp(config.hidden_size, config.intermediate_size, config.activation, bias=config.mlp_bias)
        self.mlp_out_norm = RmsNorm(config.hidden_size, config.rms_norm_eps) if config.sandwich_norms else None

    def forward(
        self,
        hidden: Tensor,
        rotary: RotaryTables | None,
        position: Tensor,
        positions: Tensor,
        bounds: AttentionBounds,
        key_cache: Tensor,
        value_cache: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        attended, key_cache, value_cache = self.attention(
            self.attention_norm(hidden), rotary, position, positions, bounds, key_cache, value_cache
        )
        hidden = hidden + self._added(attended, self.attention_out_norm)
        return hidden + self._added(self.mlp(self.mlp_norm(hidden)), self.mlp_out_norm), key_cache, value_cache

    def _added(self, states: Tensor, norm: RmsNorm | None) -> Tensor:
        if norm is not None:
            states = norm(states)
        return states if self.residual_scale == 1 else states * self.residual_scale


class Decoder(nn.Module):
    """Embeddings [B, S, H] at position [B] on caches [B, kv heads, N, D] → hidden after the final norm, taps, updated caches.

    ``tap_layers`` are 0-based; the tap of the last layer is read after the final norm, as the reference implementations read it.
    """

    def __init__(self, config: DecoderConfig, tap_layers: tuple[int, ...], num_positions: int, attention_form: AttentionForm) -> None:
        super().__init__()
        self.config = config
        self.tap_layers = tap_layers
        self.num_positions = num_positions
        self.attention_form = attention_form
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = RotaryModules((layer.rope for layer in config.layers), num_positions)

    def forward(
        self, embeddings: Tensor, position: Tensor, key_caches: list[Tensor], value_caches: list[Tensor]
    ) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
        positions = position[:, None] + torch.arange(embeddings.shape[1], device=position.device)[None, :]
        kinds = [(layer.rope, bounding_window(layer.window, self.num_positions)) for layer in self.config.layers]
        bounds = {window: self._bounds(window, position, positions, key_caches[0].shape[2]) for _, window in kinds}
        rotary = self.rotary.by_rope()

        hidden = embeddings
        after_layer: list[Tensor] = []
        new_keys: list[Tensor] = []
        new_values: list[Tensor] = []
        for layer, (rope, window), old_keys, old_values in zip(self.layers, kinds, key_caches, value_caches, strict=True):
            hidden, keys, values = layer(hidden, rotary[rope], position, positions, bounds[window], old_keys, old_values)
            after_layer.append(hidden)
            new_keys.append(keys)
            new_values.append(values)
        hidden = self.norm(hidden)
        after_layer[-1] = hidden
        taps = torch.cat([after_layer[index] for index in self.tap_layers], dim=-1)
        return hidden, taps, new_keys, new_values

    def _bounds(self, window: int | None, position: Tensor, positions: Tensor, cache_rows: int) -> AttentionBounds:
        # The operator that is bounded by lengths has no window.
        if self.attention_form is AttentionForm.LENGTH and window is None:
            return AttentionBounds(causal=True, key_lengths=position + positions.shape[1])
        columns = torch.arange(cache_rows, device=position.device)[None, None, None, :]
        rows = positions[:, None, :, None]
        mask = columns <= rows
        return AttentionBounds(causal=True, mask=mask if window is None else mask & (columns > rows - window))


def bounding_window(window: int | None, num_positions: int) -> int | None:
    """The window where it hides anything among ``num_positions`` positions."""
    return None if window is None or window >= num_positions else window


class Embedding(nn.Module):
    """Token ids [B, S] → embeddings [B, S, H], times the family's ``scale``; table [V, H]."""

    def __init__(self, vocab_size: int, hidden_size: int, scale: float) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)
        self.scale = scale

    def forward(self, ids: Tensor) -> Tensor:
        rows = nn.functional.embedding(ids, self.table)
        return rows if self.scale == 1 else rows * self.scale


class Head(nn.Module):
    """Hidden [B, S, H] and the wanted rows [B, R] → logits [B, R, V] in fp32 and their argmax [B, R].

    The table stays [V, H] as it lies in the checkpoint, so that a tied embedding is stored once. The product is an fp32 product in every
    precision: a half-precision one would put logits on a grid so coarse that they tie. Logits are ``scale`` times the product, and with
    ``cap`` bounded to cap · tanh(logit / cap).
    """

    def __init__(self, vocab_size: int, hidden_size: int, scale: float, cap: float | None) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)
        self.scale = scale
        self.cap = cap

    def forward(self, hidden: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        wanted = select_rows(hidden, rows).reshape(-1, hidden.shape[2])
        logits = nn.functional.linear(wanted.float(), self.table.float())
        logits = logits.reshape(rows.shape[0], rows.shape[1], self.table.shape[0])
        if self.scale != 1:
            logits = logits * self.scale
        if self.cap is not None:
            logits = torch.tanh(logits / self.cap) * self.cap
        return logits, logits.argmax(dim=-1)


def select_rows(states: Tensor, rows: Tensor) -> Tensor:
    """states [B, S, H], rows [B, R] → [B, R, H]: one Gather over the flattened rows."""
    batch, num_rows, width = states.shape
    offsets = torch.arange(batch, device=rows.device)[:, None] * num_rows
    flat = states.reshape(batch * num_rows, width).index_select(0, (rows + offsets).reshape(-1))
    return flat.reshape(batch, rows.shape[1], width)
