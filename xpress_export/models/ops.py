"""The four operators that models are written on: attention on a static cache, cache update, rotary embedding, RMS norm.

Each is a PyTorch custom operator with a real eager body, so a module computes in PyTorch, and each becomes exactly one
standard ONNX operator on export (:mod:`xpress_export.graphs.translations`). Attention exists in two forms that compute the
same thing: bounded by valid lengths, and bounded by an explicit mask.

This module knows nothing about models, layers or checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("xpress::length_attention", mutates_args=())
def length_attention(query: Tensor, key: Tensor, value: Tensor, key_lengths: Tensor, scale: float, cap: float, causal: bool) -> Tensor:
    """Attention over the first ``key_lengths`` cache columns.

    query [B, heads, S, D]; key, value [B, kv heads, N, D] static caches; key_lengths [B] int64 → [B, heads, S, D].
    With ``causal``, the last query row sees every valid column and each earlier row one column less (bottom-right alignment).
    Scores are bounded to cap · tanh(score / cap); ``cap`` 0 leaves them.
    """
    columns = torch.arange(key.shape[2], device=query.device)
    last_visible = key_lengths[:, None] - 1
    if causal:
        rows = torch.arange(query.shape[2], device=query.device)
        last_visible = key_lengths[:, None] - query.shape[2] + rows[None, :]
    visible = columns[None, None, None, :] <= last_visible[:, None, :, None]
    return _attend(query, key, value, visible, scale, cap)


@length_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, key_lengths: Tensor, scale: float, cap: float, causal: bool) -> Tensor:
    return torch.empty_like(query)


@torch.library.custom_op("xpress::mask_attention", mutates_args=())
def mask_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, cap: float) -> Tensor:
    """Attention over the cache columns that ``mask`` ([B, 1, S, N] bool, true = visible) names; shapes as in
    :func:`length_attention`."""
    return _attend(query, key, value, mask, scale, cap)


@mask_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, cap: float) -> Tensor:
    return torch.empty_like(query)


def _attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float, cap: float) -> Tensor:
    group = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(group, dim=1)
    value = value.repeat_interleave(group, dim=1)
    scores = (query @ key.transpose(-1, -2)).float() * scale
    if cap:
        scores = torch.tanh(scores / cap) * cap
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return weights.to(query.dtype) @ value


@torch.library.custom_op("xpress::cache_update", mutates_args=())
def cache_update(cache: Tensor, update: Tensor, position: Tensor) -> Tensor:
    """The cache [B, kv heads, N, D] with ``update`` [B, kv heads, S, D] written at rows position[b] … position[b] + S - 1.

    The eager body returns a new tensor; in a graph the output is bound to the input's address, so nothing is copied.
    """
    updated = cache.clone()
    for row, start in enumerate(position.tolist()):
        if start < 0 or start + update.shape[2] > cache.shape[2]:
            raise IndexError(f"cache rows {start}…{start + update.shape[2] - 1} are outside a cache of {cache.shape[2]} rows")
        updated[row, :, start : start + update.shape[2]] = update[row]
    return updated


@cache_update.register_fake
def _(cache: Tensor, update: Tensor, position: Tensor) -> Tensor:
    return torch.empty_like(cache)


@torch.library.custom_op("xpress::rotary_embedding", mutates_args=())
def rotary_embedding(states: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    """Rotate halves of the first R dims of each head: states [B, heads, S, D], tables cos, sin [N, R/2], positions [B, S] int64 →
    [B, heads, S, D]."""
    half = cos.shape[1]
    first, second, rest = torch.split(states, [half, half, states.shape[-1] - 2 * half], dim=-1)
    cosine = cos[positions][:, None]
    sine = sin[positions][:, None]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine, rest], dim=-1)


@rotary_embedding.register_fake
def _(states: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    return torch.empty_like(states)


@torch.library.custom_op("xpress::rms_norm", mutates_args=())
def rms_norm(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMS normalisation over the last axis, statistics in fp32, scaled by ``weight`` [H]."""
    wide = states.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + epsilon)
    return normed.to(states.dtype) * weight


@rms_norm.register_fake
def _(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return torch.empty_like(states)
