"""A config.json of the Llama, Qwen2, Qwen3 or Mistral family → :class:`DecoderConfig`.

Whatever the decoder does not compute is refused here, by field and value: a silently ignored switch would give wrong numbers, not an error.
This module knows nothing about tensors.
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from xpress_export.checkpoints.locate import shown
from xpress_export.checkpoints.rope_config import MAX_POSITIONS, read_rope
from xpress_export.models.decoder import DecoderConfig
from xpress_runtime.errors import CheckpointError
from xpress_runtime.fields import Fields

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Family:
    """What a model_type fixes, and what transformers' config class of that family assumes for absent fields (a test compares them)."""

    # None: as many as query heads.
    default_kv_heads: int | None
    # None: hidden_size / num_attention_heads.
    default_head_dim: int | None
    default_max_positions: int
    default_sliding_window: int | None
    # The window counts only where use_sliding_window says so.
    optional_window: bool
    # Query, key and value have biases whatever the config says.
    fixed_qkv_bias: bool
    reads_attention_bias: bool
    reads_mlp_bias: bool
    qk_norm: bool


FAMILIES: Mapping[str, Family] = {
    "llama": Family(None, None, 2048, None, False, False, True, True, False),
    "qwen2": Family(32, None, 32768, 4096, True, True, False, False, False),
    "qwen3": Family(32, 128, 32768, 4096, True, False, True, False, True),
    "mistral": Family(8, None, 131072, 4096, False, False, False, False, False),
}
DEFAULT_RMS_NORM_EPS = 1e-6

# Families that are asked for often, and why they are not here.
REFUSED_TYPES: Mapping[str, str] = {
    "mixtral": "a mixture of experts",
    "qwen2_moe": "a mixture of experts",
    "qwen3_moe": "a mixture of experts",
    "gpt_oss": "a mixture of experts with attention sinks",
    "deepseek_v2": "latent attention and a mixture of experts",
    "deepseek_v3": "latent attention and a mixture of experts",
    "olmoe": "a mixture of experts",
    "llama4": "a mixture of experts with chunked attention",
    "llama4_text": "a mixture of experts with chunked attention",
    "qwen3_next": "linear attention",
    "qwen3_5": "linear attention",
    "qwen3_5_text": "linear attention",
    "kimi_linear": "linear attention",
    "mamba": "a state-space model",
    "mamba2": "a state-space model",
    "falcon_h1": "state-space layers",
    "jamba": "state-space layers and a mixture of experts",
    "gemma2": "logit soft-capping and sliding windows",
    "gemma3": "sliding windows and scaled embeddings",
    "gemma3_text": "sliding windows and scaled embeddings",
    "phi3": "packed projections and partial rotary embeddings",
    "gpt2": "learned positions",
    "qwen2_vl": "multimodal rotary embeddings",
    "qwen2_5_vl": "multimodal rotary embeddings",
    "qwen3_vl": "multimodal rotary embeddings",
}

# Switches of other families, or of patched models under one of our names, with the values that change nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "quantization_config": (),
    "compression_config": (),
    "final_logit_softcapping": (),
    "attn_logit_softcapping": (),
    "logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "moe_intermediate_size": (0,),
    "num_experts_per_tok": (0,),
    "kv_lora_rank": (),
    "partial_rotary_factor": (1,),
    "rotary_pct": (1,),
    "rotary_dim": (),
    "no_rope_layers": ([],),
    "no_rope_layer_interval": (0,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "attention_multiplier": (),
    "scale_emb": (1,),
    "scale_depth": (),
    "use_parallel_residual": (False,),
    "parallel_attn": (False,),
    "parallel_residual": (False,),
    "qk_layernorm": (False,),
    "use_qk_norm": (False,),
    "attention_chunk_size": (),
    "attn_temperature_tuning": (False,),
    "attention_sinks": (False,),
    "alibi": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "use_bidirectional_attention": (False,),
    "is_causal": (True,),
    "rope_interleaved": (False,),
    "layer_overrides": ({}, []),
    "per_layer_config": ({}, []),
}

# Everything that bears on the numbers: what an unknown field may be a misspelling of. Not token ids, whose names differ by one letter.
READ_FIELDS = frozenset(NEUTRAL) | {
    *("model_type", "architectures", "auto_map", "attention_bias", "mlp_bias", "tie_word_embeddings"),
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("max_position_embeddings", "original_max_position_embeddings", "rms_norm_eps", "hidden_act", "hidden_activation"),
    *("rope_theta", "rope_scaling", "rope_parameters", "sliding_window", "use_sliding_window", "layer_types"),
}

MAX_WIDTH = 2**18
MODEL_CLASSES = ("AutoConfig", "AutoModel", "AutoModelForCausalLM")


def read_decoder_config(fields: Fields) -> tuple[str, DecoderConfig]:
    """The model_type and the decoder that a target's config.json describes."""
    model_type = fields.text("model_type")
    if model_type not in FAMILIES:
        reason = f" ({REFUSED_TYPES[model_type]})" if model_type in REFUSED_TYPES else ""
        raise CheckpointError(f"{fields.origin}: model_type '{shown(model_type)}'{reason} is not supported, expected {', '.join(FAMILIES)}")
    refuse_remote_code(fields)
    refuse_misspelled(fields, READ_FIELDS)
    return model_type, read_family(fields, FAMILIES[model_type])


def read_family(fields: Fields, family: Family) -> DecoderConfig:
    """The decoder of a known family; every switch that we do not compute is refused."""
    for name, neutral in NEUTRAL.items():
        refuse_unless(fields, name, neutral)
    for name in ("hidden_act", "hidden_activation"):
        refuse_unless(fields, name, ("silu", "swish"))
    num_layers = fields.integer("num_hidden_layers", 1, 1024)
    _refuse_windows(fields, family, num_layers)

    hidden_size = fields.integer("hidden_size", 1, MAX_WIDTH)
    num_heads = fields.integer("num_attention_heads", 1, 4096)
    num_kv_heads = _kv_heads(fields, family, num_heads)
    head_dim = _head_dim(fields, family, hidden_size, num_heads)
    max_positions = family.default_max_positions
    if "max_position_embeddings" in fields:
        max_positions = fields.integer("max_position_embeddings", 2, MAX_POSITIONS)
    attention_bias = family.reads_attention_bias and flag(fields, "attention_bias")
    # transformers would ignore a bias that the family has no switch for; such a checkpoint evidently comes from something else.
    if not family.reads_attention_bias:
        refuse_unless(fields, "attention_bias", (False, True) if family.fixed_qkv_bias else (False,))
    if not family.reads_mlp_bias:
        refuse_unless(fields, "mlp_bias", (False,))
    return DecoderConfig(
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", 1, 2**20),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size", 2, 2**22),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-12, 1e-2) if "rms_norm_eps" in fields else DEFAULT_RMS_NORM_EPS,
        rope=read_rope(fields, head_dim, max_positions),
        qkv_bias=family.fixed_qkv_bias or attention_bias,
        output_bias=attention_bias,
        mlp_bias=family.reads_mlp_bias and flag(fields, "mlp_bias"),
        qk_norm=family.qk_norm,
        tied_embeddings=flag(fields, "tie_word_embeddings"),
        max_positions=max_positions,
    )


def flag(fields: Fields, name: str) -> bool:
    """A switch that is off when absent, as in all four families."""
    return fields.boolean(name) if name in fields else False


def refuse_unless(fields: Fields, name: str, neutral: Collection[Any]) -> None:
    """A field may be absent, null or one of the values that change nothing."""
    if name in fields and not any(fields.values[name] == value for value in neutral):
        value = shown(json.dumps(fields.values[name]))
        raise CheckpointError(
            f"{fields.origin}: field '{name}' is {value}, which is not supported"
            + (f"; expected {' or '.join(json.dumps(other) for other in neutral)}" if neutral else "")
        )


def refuse_remote_code(fields: Fields) -> None:
    """A model that brings its own code may compute anything under a known name; only tokenizers may have code (never run)."""
    if "auto_map" not in fields:
        return
    auto_map = fields.nested("auto_map")
    if classes := [name for name in MODEL_CLASSES if name in auto_map]:
        raise CheckpointError(
            f"{fields.origin}: auto_map names remote code for {', '.join(classes)}, which is never run; "
            "remove it if the model is a plain one of its model_type"
        )


def refuse_misspelled(fields: Fields, known: Collection[str]) -> None:
    """An unknown field that looks like an absent known one; other unknown fields are ignored."""
    absent = sorted(set(known) - set(fields))
    for name in fields:
        if name in known or fields.values[name] is None:
            continue
        if close := difflib.get_close_matches(name, absent, n=1, cutoff=0.87):
            raise CheckpointError(f"{fields.origin}: field '{shown(name)}' is not known; did you mean '{close[0]}'?")
        logger.debug("%s: field '%s' is ignored", fields.origin, shown(name))


def _refuse_windows(fields: Fields, family: Family, num_layers: int) -> None:
    if family.optional_window:
        if flag(fields, "use_sliding_window"):
            raise CheckpointError(f"{fields.origin}: field 'use_sliding_window' is true; sliding windows are not supported")
    elif "sliding_window" not in fields.values and family.default_sliding_window is not None:
        raise CheckpointError(
            f"{fields.origin}: field 'sliding_window' is absent, which means {family.default_sliding_window} in this family; "
            "sliding windows are not supported, set it to null if the model has none"
        )
    elif "sliding_window" in fields:
        raise CheckpointError(
            f"{fields.origin}: field 'sliding_window' is {shown(fields.values['sliding_window'])}; sliding windows are not supported"
        )
    if "layer_types" in fields:
        layer_types = fields.required("layer_types")
        if not isinstance(layer_types, list) or len(layer_types) != num_layers:
            raise CheckpointError(f"{fields.origin}: field 'layer_types' must be a list of num_hidden_layers ({num_layers}) kinds")
        for layer, kind in enumerate(layer_types):
            if kind != "full_attention":
                raise CheckpointError(f"{fields.origin}: layer_types[{layer}] is '{shown(kind)}'; only full_attention is supported")


def _kv_heads(fields: Fields, family: Family, num_heads: int) -> int:
    name = "num_key_value_heads"
    if name in fields:
        count = fields.integer(name, 1, 4096)
    elif family.default_kv_heads is None or name in fields.values:
        # An explicit null means one for each query head in every family.
        count = num_heads
    else:
        count = family.default_kv_heads
    if num_heads % count:
        raise CheckpointError(f"{fields.origin}: field '{name}' is {count}, expected a divisor of num_attention_heads ({num_heads})")
    return count


def _head_dim(fields: Fields, family: Family, hidden_size: int, num_heads: int) -> int:
    if "head_dim" in fields:
        head_dim = fields.integer("head_dim", 2, 1024)
    elif family.default_head_dim is not None:
        head_dim = family.default_head_dim
    elif hidden_size % num_heads:
        raise CheckpointError(
            f"{fields.origin}: head_dim is missing and hidden_size ({hidden_size}) is no multiple of num_attention_heads ({num_heads})"
        )
    else:
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise CheckpointError(f"{fields.origin}: head_dim is {head_dim}, expected an even number (rotary embeddings rotate halves)")
    if head_dim * num_heads > MAX_WIDTH:
        raise CheckpointError(f"{fields.origin}: num_attention_heads × head_dim is {head_dim * num_heads}, expected at most {MAX_WIDTH}")
    return head_dim
