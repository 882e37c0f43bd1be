"""The DFlash drafter: fills a whole block in one forward pass, from the target's taps and the block's embeddings.

Its cache holds, per layer, the keys and values of verified context rows and behind them the block's own, which the next round overwrites.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from xpress_export.models.decoder import DecoderConfig, LayerConfig, bounding_window, select_rows
from xpress_export.models.layers import (
    AttentionBounds,
    GatedMlp,
    Linear,
    RmsNorm,
    RotaryTables,
    merge_heads,
    split_heads,
)
from xpress_export.models.ops import cache_update
from xpress_export.models.rope import RotaryModules
from xpress_runtime.sets import AttentionForm


@dataclass(frozen=True)
class DrafterConfig:
    """A drafter's backbone and what ties it to its target.

    ``tap_layers`` are 0-based target layers; ``num_target_layers`` is None where the checkpoint does not say. The block's embeddings are
    rows of the target's table times the backbone's ``embedding_scale``, whatever the target itself multiplies them with; base logits are
    the product of the target's head, times the backbone's ``logit_scale`` and bounded by its ``logit_cap``, whatever the target's are.
    ``draft_vocab_size`` tokens can be drafted: the backbone's ``vocab_size``, or fewer.
    """

    backbone: DecoderConfig
    block_size: int
    mask_token_id: int
    tap_layers: tuple[int, ...]
    num_target_layers: int | None
    draft_vocab_size: int


@dataclass(frozen=True)
class CacheRun:
    """The one contiguous run of rows that a call writes into every cache.

    ``source`` [B, S + P] picks, from context rows followed by block rows, the new context rows and then the block's; rows behind them are
    garbage that the next call overwrites. ``positions`` [B, S + P] are their rotary positions.
    """

    start: Tensor
    source: Tensor
    positions: Tensor
    block_positions: Tensor


class DrafterAttention(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.query = Linear(config.hidden_size, config.q_width, bias=config.qkv_bias)
        self.key_value = Linear(config.hidden_size, 2 * config.kv_width, bias=config.qkv_bias)
        self.output = Linear(config.q_width, config.hidden_size, bias=config.output_bias)
        self.q_norm = RmsNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RmsNorm(config.head_dim, config.rms_norm_eps)

    def forward(
        self,
        states: Tensor,
        context: Tensor,
        rotary: RotaryTables | None,
        run: CacheRun,
        bounds: AttentionBounds,
        key_cache: Tensor,
        value_cache: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        rows = select_rows(torch.cat([context, states], dim=1), run.source)
        heads = split_heads(self.key_value(rows), 2 * config.num_kv_heads, config.head_dim)
        key, value = torch.split(heads, [config.num_kv_heads, config.num_kv_heads], dim=1)
        query = self.q_norm(split_heads(self.query(states), config.num_heads, config.head_dim))
        key = self.k_norm(key)
        if rotary is not None:
            query, key = rotary(query, run.block_positions), rotary(key, run.positions)
        key_cache = cache_update(key_cache, key, run.start)
        value_cache = cache_update(value_cache, value, run.start)
        attended = bounds.attend(query, key_cache, value_cache, config.attention_scale, config.attention_cap)
        return self.output(merge_heads(attended)), key_cache, value_cache


class DrafterLayer(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = DrafterAttention(config)
        self.mlp_norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMlp(config.hidden_size, config.intermediate_size, config.activation, bias=config.mlp_bias)

    def forward(
        self,
        hidden: Tensor,
        context: Tensor,
        rotary: RotaryTables | None,
        run: CacheRun,
        bounds: AttentionBounds,
        key_cache: Tensor,
        value_cache: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        attended, key_cache, value_cache = self.attention(self.attention_norm(hidden), context, rotary, run, bounds, key_cache, value_cache)
        hidden = hidden + attended
        return hidden + self.mlp(self.mlp_norm(hidden)), key_cache, value_cache


class Drafter(nn.Module):
    """Block embeddings [B, P, H] and taps [B, S, T·H] → drafted hidden [B, P, H] (after the norm) and updated caches.

    The first ``block_position - context_position`` (≤ S) tap rows are new context and are stored from ``context_position`` on; the block
    stands right behind them at ``block_position``. Block rows see every context column and each other, unless their layer has a window or
    is causal. Embeddings arrive as the target has them and are multiplied with ``embedding_ratio`` first.
    """

    # Taps of real models exceed 2e4, and a sum over all of them the range of fp16.
    fp32_parts = ("fc", "hidden_norm")

    def __init__(self, config: DrafterConfig, num_positions: int, attention_form: AttentionForm, embedding_ratio: float) -> None:
        super().__init__()
        backbone = config.backbone
        self.config = config
        self.embedding_ratio = embedding_ratio
        self.num_positions = num_positions
        self.attention_form = attention_form
        self.fc = Linear(len(config.tap_layers) * backbone.hidden_size, backbone.hidden_size)
        self.hidden_norm = RmsNorm(backbone.hidden_size, backbone.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(backbone) for _ in range(backbone.num_layers))
        self.norm = RmsNorm(backbone.hidden_size, backbone.rms_norm_eps)
        self.rotary = RotaryModules((layer.rope for layer in backbone.layers), num_positions)

    def forward(
        self,
        embeddings: Tensor,
        taps: Tensor,
        context_position: Tensor,
        block_position: Tensor,
        key_caches: list[Tensor],
        value_caches: list[Tensor],
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        context = self.hidden_norm(self.fc(taps.float())).to(embeddings.dtype)
        run = self._cache_run(taps.shape[1], context_position, block_position)
        kinds = [self._bounding(layer) for layer in self.config.backbone.layers]
        bounds = {kind: self._bounds(*kind, run.block_positions, key_caches[0].shape[2]) for kind in kinds}
        rotary = self.rotary.by_rope()

        hidden = embeddings if self.embedding_ratio == 1 else embeddings * self.embedding_ratio
        new_keys: list[Tensor] = []
        new_values: list[Tensor] = []
        layers = zip(self.layers, self.config.backbone.layers, kinds, key_caches, value_caches, strict=True)
        for layer, config, kind, old_keys, old_values in layers:
            hidden, keys, values = layer(hidden, context, rotary[config.rope], run, bounds[kind], old_keys, old_values)
            new_keys.append(keys)
            new_values.append(values)
        return self.norm(hidden), new_keys, new_values

    def _cache_run(self, num_tap_rows: int, context_position: Tensor, block_position: Tensor) -> CacheRun:
        block_size = self.config.block_size
        index = torch.arange(num_tap_rows + block_size, device=block_position.device)[None, :]
        num_context = (block_position - context_position)[:, None]
        block_row = (index - num_context).clamp(0, block_size - 1)
        return CacheRun(
            start=context_position,
            source=torch.where(index < num_context, index, num_tap_rows + block_row),
            positions=context_position[:, None] + index,
            block_positions=block_position[:, None] + torch.arange(block_size, device=block_position.device)[None, :],
        )

    def _bounding(self, layer: LayerConfig) -> tuple[int | None, bool]:
        """Window and causality of a layer, as far as they hide anything."""
        return bounding_window(layer.window, self.num_positions), layer.causal

    def _bounds(self, window: int | None, causal: bool, positions: Tensor, cache_rows: int) -> AttentionBounds:
        """``positions`` [B, P] of the block's rows."""
        lengths = positions[:, 0] + self.config.block_size
        if self.attention_form is AttentionForm.LENGTH and window is None:
            return AttentionBounds(causal=causal, key_lengths=lengths)
        columns = torch.arange(cache_rows, device=lengths.device)[None, None, None, :]
        rows = positions[:, None, :, None]
        visible = columns <= rows if causal else (columns < lengths[:, None, None, None]).expand(-1, -1, self.config.block_size, -1)
        if window is not None:
            visible = visible & (columns > rows - window)
            # As far ahead as back. Only rows of the block lie ahead.
            if not causal and window < self.config.block_size:
                visible = visible & (columns < rows + window)
        return AttentionBounds(causal=causal, mask=visible)
