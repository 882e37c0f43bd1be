"""How each custom operator of :mod:`xpress_export.models.ops` becomes one ONNX operator (opset 24)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnxscript.onnx_opset import opset24 as op

OPSET = 24


# The exporter drops outputs that nothing reads, but only when a translation unpacks every output of the operator:
# present outputs beside nonpad_kv_seqlen would make an invalid node.
def _length_attention(query: Any, key: Any, value: Any, key_lengths: Any, scale: float, cap: float, causal: bool) -> Any:
    output, _present_key, _present_value, _scores = op.Attention(
        query, key, value, None, None, None, key_lengths, is_causal=int(causal), scale=scale, softcap=cap
    )
    return output


def _mask_attention(query: Any, key: Any, value: Any, mask: Any, scale: float, cap: float) -> Any:
    output, _present_key, _present_value, _scores = op.Attention(query, key, value, mask, scale=scale, softcap=cap)
    return output


def _cache_update(cache: Any, update: Any, position: Any) -> Any:
    return op.TensorScatter(cache, update, position, axis=2, mode="linear")


def _rotary_embedding(states: Any, cos: Any, sin: Any, positions: Any) -> Any:
    rotated, head_dim = 2 * cos.shape[1], states.shape[3]
    # 0 stands for the whole head.
    return op.RotaryEmbedding(states, cos, sin, positions, interleaved=0, rotary_embedding_dim=0 if rotated == head_dim else rotated)


def _rms_norm(states: Any, weight: Any, epsilon: float) -> Any:
    return op.RMSNormalization(states, weight, axis=-1, epsilon=epsilon, stash_type=1)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.xpress.length_attention.default: _length_attention,
    torch.ops.xpress.mask_attention.default: _mask_attention,
    torch.ops.xpress.cache_update.default: _cache_update,
    torch.ops.xpress.rotary_embedding.default: _rotary_embedding,
    torch.ops.xpress.rms_norm.default: _rms_norm,
}
