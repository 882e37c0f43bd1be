"""A config.json of one of the target families (families.py) → :class:`DecoderConfig`.

Whatever the decoder does not compute is refused here, by field and value: a silently ignored switch would give wrong numbers, not an error.
This module knows nothing about tensors.
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Collection, Mapping
from typing import Any

from xpress_export.checkpoints.families import FAMILIES, REFUSED_TYPES, Family
from xpress_export.checkpoints.layer_config import read_layers
from xpress_export.checkpoints.locate import shown
from xpress_export.checkpoints.rope_config import MAX_POSITIONS
from xpress_export.models.decoder import DecoderConfig
from xpress_runtime.errors import CheckpointError
from xpress_runtime.fields import Fields

logger = logging.getLogger(__name__)

# Switches of other families, or of patched models under one of our names, with the values that change nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "quantization_config": (),
    "compression_config": (),
    "final_logit_softcapping": (),
    "attn_logit_softcapping": (),
    "logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "sliding_window_pattern": (),
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
    *("rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq"),
    *("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
}

MAX_WIDTH = 2**18
# Names of activations in configs. transformers' "gelu_pytorch_tanh" and "gelu_new" are the same function.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
MODEL_CLASSES = ("AutoConfig", "AutoModel", "AutoModelForCausalLM")


def read_decoder_config(fields: Fields) -> tuple[str, DecoderConfig]:
    """The model_type and the decoder that a target's config.json describes."""
    model_type = fields.text("model_type")
    if model_type not in FAMILIES:
        reason = f" ({REFUSED_TYPES[model_type]})" if model_type in REFUSED_TYPES else ""
        raise CheckpointError(f"{fields.origin}: model_type '{shown(model_type)}' is not supported{reason}; expected {', '.join(FAMILIES)}")
    refuse_remote_code(fields)
    refuse_misspelled(fields, READ_FIELDS)
    return model_type, read_family(fields, FAMILIES[model_type])


def read_family(fields: Fields, family: Family) -> DecoderConfig:
    """The decoder of a known family; every switch that we do not compute is refused."""
    own = _own_fields(family)
    for name in (name for name in NEUTRAL if name not in own):
        refuse_unless(fields, name, NEUTRAL[name])
    for name in ("hidden_act", "hidden_activation"):
        refuse_unless(fields, name, [name for name, function in ACTIVATIONS.items() if function == family.activation])
    num_layers = fields.integer("num_hidden_layers", 1, 1024)
    hidden_size = fields.integer("hidden_size", 1, MAX_WIDTH)
    num_heads = fields.integer("num_attention_heads", 1, 4096)
    num_kv_heads = _kv_heads(fields, family, num_heads)
    head_dim = _head_dim(fields, family, hidden_size, num_heads)
    max_positions = family.max_positions
    if "max_position_embeddings" in fields:
        max_positions = fields.integer("max_position_embeddings", 2, MAX_POSITIONS)
    layers = read_layers(fields, family, num_layers, head_dim, max_positions)
    attention_bias = family.reads_attention_bias and flag(fields, "attention_bias")
    # transformers would ignore a bias that the family has no switch for; such a checkpoint evidently comes from something else.
    if not family.reads_attention_bias:
        refuse_unless(fields, "attention_bias", (False, True) if family.fixed_qkv_bias else (False,))
    if not family.reads_mlp_bias:
        refuse_unless(fields, "mlp_bias", (False,))
    return DecoderConfig(
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", 1, 2**20),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size", 2, 2**22),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-12, 1e-2) if "rms_norm_eps" in fields else family.rms_norm_eps,
        layers=layers,
        activation=family.activation,
        qkv_bias=family.fixed_qkv_bias or attention_bias,
        output_bias=attention_bias,
        mlp_bias=family.reads_mlp_bias and flag(fields, "mlp_bias"),
        qk_norm=family.qk_norm,
        sandwich_norms=family.layout.sandwich_norms,
        attention_scale=_attention_scale(fields, family, head_dim),
        attention_cap=_cap(fields, family, "attn_logit_softcapping", family.attention_cap),
        residual_scale=_factor(fields, family, "residual_multiplier"),
        embedding_scale=hidden_size**0.5 if family.scales_embeddings else _factor(fields, family, "embedding_multiplier"),
        logit_scale=1 / _factor(fields, family, "logits_scaling"),
        logit_cap=_cap(fields, family, "final_logit_softcapping", family.logit_cap),
        tied_embeddings=flag(fields, "tie_word_embeddings", absent=family.tied),
        # LongRoPE changes all frequencies, and with them all cached keys, when a text outgrows the original length.
        max_positions=min([max_positions, *(layer.rope.usable_positions for layer in layers if layer.rope is not None)]),
    )


def _own_fields(family: Family) -> set[str]:
    """Fields of :data:`NEUTRAL` that mean something in this family."""
    own = set(family.own_fields)
    if family.reads_partial_rotary:
        own.add("partial_rotary_factor")
    if family.no_rope_interval is not None:
        own |= {"no_rope_layers", "no_rope_layer_interval"}
    if family.windows == "pattern":
        own.add("sliding_window_pattern")
    return own


def _attention_scale(fields: Fields, family: Family, head_dim: int) -> float:
    if "attention_multiplier" in family.own_fields:
        return _factor(fields, family, "attention_multiplier")
    if family.query_scalar is None:
        return float(head_dim**-0.5)
    name = "query_pre_attn_scalar"
    scalar = fields.number(name, 1e-3, 1e6) if name in fields else family.query_scalar
    return float(scalar**-0.5)


def _factor(fields: Fields, family: Family, name: str) -> float:
    """One of Granite's factors; 1 in every other family and where it is absent."""
    return fields.number(name, 1e-6, 1e6) if name in family.own_fields and name in fields else 1.0


def _cap(fields: Fields, family: Family, name: str, absent: float | None) -> float | None:
    """One of Gemma's caps; an explicit null means none."""
    if name in family.own_fields and name in fields.values:
        return fields.number(name, 1e-3, 1e6) if name in fields else None
    return absent


def flag(fields: Fields, name: str, *, absent: bool = False) -> bool:
    """A switch, and what its absence means."""
    return fields.boolean(name) if name in fields else absent


def refuse_unless(fields: Fields, name: str, neutral: Collection[Any]) -> None:
    """A field may be absent, null or one of the values that change nothing."""
    if name in fields and not any(_is(fields.values[name], value) for value in neutral):
        value = shown(json.dumps(fields.values[name]))
        raise CheckpointError(
            f"{fields.origin}: field '{name}' is {value}, which is not supported"
            + (f"; expected {' or '.join(json.dumps(other) for other in neutral)}" if neutral else "")
        )


def _is(value: Any, neutral: Any) -> bool:
    """Equal, and a switch only to a switch: Python calls 0 and false the same."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


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
        # transformers writes attributes of its own with an underscore in front, and does not read them.
        if name in known or name.startswith("_") or fields.values[name] is None:
            continue
        if close := difflib.get_close_matches(name, absent, n=1, cutoff=0.87):
            raise CheckpointError(f"{fields.origin}: field '{shown(name)}' is not known; did you mean '{close[0]}'?")
        logger.debug("%s: field '%s' is ignored", fields.origin, shown(name))


def _kv_heads(fields: Fields, family: Family, num_heads: int) -> int:
    name = "num_key_value_heads"
    if name in fields:
        count = fields.integer(name, 1, 4096)
    elif family.kv_heads is None or name in fields.values:
        # An explicit null means one for each query head in every family.
        count = num_heads
    else:
        count = family.kv_heads
    if num_heads % count:
        raise CheckpointError(f"{fields.origin}: field '{name}' is {count}, expected a divisor of num_attention_heads ({num_heads})")
    return count


def _head_dim(fields: Fields, family: Family, hidden_size: int, num_heads: int) -> int:
    if "head_dim" in fields:
        head_dim = fields.integer("head_dim", 2, 1024)
    elif family.head_dim is not None:
        head_dim = family.head_dim
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
