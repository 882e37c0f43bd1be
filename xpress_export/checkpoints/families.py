"""The target families: what a model_type fixes, what it assumes for absent fields, and how its tensors are named and stored.

A family is a mapping onto one decoder (models/decoder.py). What it assumes is what transformers' config class of that family assumes; a
test compares them. Knows nothing about values of a config; decoder_config.py reads those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from xpress_export.models.layers import Activation

# Which layers have a sliding window where the config has no layer_types. "all": wherever sliding_window is set. "switched": where
# use_sliding_window says so, from max_window_layers on. "alternating": every other one, the first has it. "pattern": all but every
# sliding_window_pattern-th (or 6th). "never": such a field is refused.
Windows = Literal["never", "all", "switched", "alternating", "pattern"]


@dataclass(frozen=True)
class TensorLayout:
    """How a family's tensors differ from Llama's: fused projections, norm weights stored less ``norm_offset``, four norms a layer."""

    fused_projections: bool = False
    norm_offset: float = 0.0
    sandwich_norms: bool = False


@dataclass(frozen=True)
class Family:
    """A model_type. None stands for: ``kv_heads`` as many as query heads; ``head_dim`` hidden_size / num_attention_heads; no ``window``."""

    kv_heads: int | None = None
    head_dim: int | None = None
    max_positions: int = 2048
    theta: float = 10_000.0
    # Gemma 3: layers with a window rotate with a base of their own.
    local_theta: float | None = None
    rms_norm_eps: float = 1e-6
    tied: bool = False
    activation: Activation = "silu"
    windows: Windows = "never"
    window: int | None = None
    max_window_layers: int = 28
    # SmolLM3: every so many layers one does not rotate.
    no_rope_interval: int | None = None
    # Query, key and value have biases whatever the config says.
    fixed_qkv_bias: bool = False
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    reads_partial_rotary: bool = False
    qk_norm: bool = False
    # Gemma: embeddings are multiplied with the square root of the hidden size.
    scales_embeddings: bool = False
    # Attention scores are multiplied with this to the power of -1/2, where that is not the head dim.
    query_scalar: float | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None
    # Granite's factors and Gemma's caps by their names in a config; a family without them refuses every value that changes something.
    own_fields: frozenset[str] = frozenset()
    layout: TensorLayout = field(default_factory=TensorLayout)
    # Why hidden states do not fit fp16, where they do not.
    beyond_fp16: str | None = None


_GRANITE = frozenset({"embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"})
_GEMMA3 = frozenset({"query_pre_attn_scalar", "final_logit_softcapping"})
_GEMMA2 = _GEMMA3 | {"attn_logit_softcapping"}
_GEMMA: Mapping[str, Any] = {
    "head_dim": 256,
    "kv_heads": 4,
    "tied": True,
    "activation": "gelu_tanh",
    "window": 4096,
    "reads_attention_bias": True,
    "scales_embeddings": True,
    "query_scalar": 256.0,
    "layout": TensorLayout(norm_offset=1.0, sandwich_norms=True),
    "beyond_fp16": "its hidden states leave the range of fp16",
}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(reads_attention_bias=True, reads_mlp_bias=True),
    "qwen2": Family(kv_heads=32, max_positions=32768, windows="switched", window=4096, fixed_qkv_bias=True),
    "qwen3": Family(
        kv_heads=32, head_dim=128, max_positions=32768, windows="switched", window=4096, reads_attention_bias=True, qk_norm=True
    ),
    "mistral": Family(kv_heads=8, max_positions=131072, windows="all", window=4096),
    "smollm3": Family(
        kv_heads=4,
        max_positions=32768,
        theta=2_000_000.0,
        tied=True,
        windows="switched",
        no_rope_interval=4,
        reads_attention_bias=True,
        reads_mlp_bias=True,
    ),
    "granite": Family(reads_attention_bias=True, reads_mlp_bias=True, own_fields=_GRANITE),
    "phi3": Family(
        max_positions=4096, rms_norm_eps=1e-5, windows="all", reads_partial_rotary=True, layout=TensorLayout(fused_projections=True)
    ),
    "gemma2": Family(max_positions=8192, windows="alternating", attention_cap=50.0, logit_cap=30.0, own_fields=_GEMMA2, **_GEMMA),
    "gemma3_text": Family(
        max_positions=131072, theta=1_000_000.0, local_theta=10_000.0, windows="pattern", qk_norm=True, own_fields=_GEMMA3, **_GEMMA
    ),
}

_EXPERTS = "a mixture of experts: which weights a token needs is decided while it runs, and a static graph would compute all of them"
_RECURRENT = "has linear attention or state-space layers, whose state cannot be rolled back to an accepted prefix by a smaller length"
_IMAGES = "reads images too; give a checkpoint of its text model"
_LATENT = "has latent attention, whose cache holds no keys and values"

# Families that are asked for often, and why they are not here.
REFUSED_TYPES: Mapping[str, str] = {
    **dict.fromkeys(
        ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "olmoe", "phimoe", "granitemoe", "granitemoeshared", "glm4_moe", "exaone_moe"),
        _EXPERTS,
    ),
    **dict.fromkeys(("llama4", "llama4_text"), _EXPERTS),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _LATENT),
    **dict.fromkeys(
        (
            *("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "kimi_linear", "mamba", "mamba2", "falcon_h1", "jamba"),
            *("granitemoehybrid", "olmo_hybrid", "bamba", "zamba2", "nemotron_h", "lfm2", "recurrent_gemma", "minimax"),
        ),
        _RECURRENT,
    ),
    **dict.fromkeys(
        ("gemma3", "gemma3n", "gemma4", "llava", "mistral3", "mllama", "phi4_multimodal", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"), _IMAGES
    ),
    "gemma": "has one norm less a layer than Gemma 2; it is not described yet",
    "phi": "computes attention and MLP side by side, with layer norms",
    "gpt2": "has learned positions",
    "gpt_neox": "computes attention and MLP side by side, with layer norms",
}
