"""What only some families have, spoilt: each is refused in one line that names the field; families that are not described, by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints.spoil import Change, assert_refused, fields, open_any, rope, tensors
from xpress_export.checkpoints.families import FAMILIES, REFUSED_TYPES

FULL, SLIDING = "full_attention", "sliding_attention"
# Phi-3's heads are 10 dims here; 0.4 of them are two pairs.
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0], "partial_rotary_factor": 0.4}
GRANITE_FIELDS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
GEMMA_FIELDS = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")
NO_NUMBERS = ("8", True, [8.0], {}, float("nan"), float("inf"))


def longrope(**changes: Any) -> Change:
    values = LONGROPE | changes
    outer = {"original_max_position_embeddings": values.pop("outer", 64)}
    return fields(rope_parameters={name: value for name, value in values.items() if value is not ...}, **outer)


def layer_types(*kinds: Any, **others: Any) -> Change:
    return fields(layer_types=list(kinds), **others)


# (checkpoint, what is spoilt, what the message names)
CASES: list[tuple[str, Change, tuple[str, ...]]] = [
    # Windows.
    *[("qwen3", layer_types(FULL, kind, FULL), ("layer_types[1]", str(kind))) for kind in ("linear_attention", "chunked_attention", "", 3)],
    ("gemma3_text", layer_types(FULL, None, SLIDING), ("layer_types[1]", "None", SLIDING)),
    ("gemma2", layer_types([SLIDING], FULL, SLIDING), ("layer_types[0]", SLIDING)),
    *[
        (name, fields(layer_types=value), ("layer_types", "num_hidden_layers (3)"))
        for name in ("qwen3", "mistral", "gemma3_text")
        for value in ([], [FULL] * 2, [FULL] * 4, FULL, {"0": FULL}, 3)
    ],
    ("llama", layer_types(FULL, SLIDING, FULL), ("layer_types[1]", SLIDING, "sliding_window")),
    ("qwen3", layer_types(FULL, SLIDING, FULL), ("layer_types[1]", SLIDING, "sliding_window")),
    ("qwen3", layer_types(FULL, SLIDING, FULL, use_sliding_window=False, sliding_window=4), ("layer_types[1]", "switched on")),
    ("mistral", layer_types(FULL, SLIDING, FULL, sliding_window=None), ("layer_types[1]", SLIDING, "sliding_window")),
    ("gemma2", layer_types(SLIDING, FULL, SLIDING, sliding_window=None), ("layer_types[0]", SLIDING, "sliding_window")),
    ("mistral", layer_types(SLIDING, FULL, SLIDING, sliding_window=4), ("layer_types[1]", FULL, "sliding_window (4)", "stale")),
    ("mistral", layer_types(FULL, FULL, FULL, sliding_window=...), ("layer_types[0]", FULL, "4096")),
    ("phi3", layer_types(FULL, FULL, FULL, sliding_window=4), ("layer_types[0]", FULL, "sliding_window (4)")),
    *[(name, fields(sliding_window=4096), ("sliding_window", "4096", "no windows", "null")) for name in ("llama", "granite")],
    *[
        (name, fields(sliding_window=value, use_sliding_window=True), ("sliding_window", json.dumps(value)))
        for name in ("mistral", "qwen3", "gemma2", "smollm3")
        for value in (0, -1, 4.0, "4", True, 2**27, [4])
    ],
    *[("qwen2", fields(use_sliding_window=value), ("use_sliding_window", json.dumps(value), "true or false")) for value in (1, "yes", {})],
    *[
        ("qwen3", fields(use_sliding_window=True, sliding_window=4, layer_types=..., max_window_layers=value), ("max_window_layers",))
        for value in (-1, 1.0, "2", 2000)
    ],
    *[("gemma3_text", fields(layer_types=..., sliding_window_pattern=value), ("sliding_window_pattern",)) for value in (0, -1, "6", 2.0)],
    ("gemma2", fields(sliding_window_pattern=2), ("sliding_window_pattern", "2", "not supported")),
    # Layers that do not rotate.
    *[("smollm3", fields(no_rope_layers=[1] * count), ("no_rope_layers", str(count), "num_hidden_layers (3)")) for count in (0, 1, 2)],
    *[("smollm3", fields(no_rope_layers=value), ("no_rope_layers",)) for value in ([1, 2, 1], [1, True, 1], [1, 0.0, 1], "101", 3, {})],
    *[("smollm3", fields(no_rope_layers=..., no_rope_layer_interval=value), ("no_rope_layer_interval",)) for value in (0, -4, 4.0, "4")],
    *[
        (name, fields(**{field: value}), (field, "not supported"))
        for name in ("llama", "gemma3_text")
        for field, value in (("no_rope_layers", [1, 1, 0]), ("no_rope_layer_interval", 4))
    ],
    # Rotary embeddings of a part of a head.
    *[
        ("phi3", fields(rope_parameters=..., partial_rotary_factor=factor), ("partial_rotary_factor", f"{dims} of 10", "even"))
        for factor, dims in ((0.1, 1), (0.3, 3), (0.99, 9), (0.001, 0))
    ],
    *[("phi3", fields(partial_rotary_factor=value), ("partial_rotary_factor",)) for value in (0, -0.4, 1.5, *NO_NUMBERS)],
    ("phi3", fields(partial_rotary_factor=0.8, rope_parameters={"partial_rotary_factor": 0.4}), ("partial_rotary_factor", "0.4", "0.8")),
    *[(name, fields(partial_rotary_factor=0.4), ("partial_rotary_factor", "0.4", "not supported")) for name in FAMILIES if name != "phi3"],
    ("smollm3", rope(rope_type="default", partial_rotary_factor=0.4), ("partial_rotary_factor", "0.4")),
    # LongRoPE.
    *[
        ("phi3", longrope(**{name: [1.0] * count}), (name, str(count), "expected 2"))
        for name in ("short_factor", "long_factor")
        for count in (0, 1, 3)
    ],
    *[("phi3", longrope(**{name: ...}), (name, "missing")) for name in ("short_factor", "long_factor")],
    *[
        ("phi3", longrope(short_factor=value), ("short_factor",))
        for value in (2.0, "12", {}, [1.0, "2"], [1.0, None], [0.0, 1.0], [1.0, True])
    ],
    ("phi3", longrope(outer=None), ("original_max_position_embeddings", "missing")),
    *[("phi3", longrope(outer=value), ("original_max_position_embeddings",)) for value in (1, 0, -64, 64.0, "64")],
    ("phi3", longrope(partial_rotary_factor=...), ("long_factor", "2", "expected 5")),
    ("phi3", longrope(rope_type="su", short_factor=...), ("short_factor", "missing")),
    ("phi3", longrope(short_mscale=1.0), ("short_mscale", "longrope")),
    *[("phi3", longrope(attention_factor=value), ("attention_factor",)) for value in ("1", 0, -1.0)],
    # Gemma 3's two bases.
    ("gemma3_text", rope(rope_type="default", rope_theta=1e6), ("rope_type", FULL, SLIDING)),
    ("gemma3_text", rope(**{FULL: {"rope_theta": 1e6}, "chunked_attention": {}}), ("chunked_attention", FULL, SLIDING)),
    *[("gemma3_text", rope(**{name: 1e6}), (name, "an object")) for name in (FULL, SLIDING)],
    ("gemma3_text", rope(**{FULL: {"rope_type": "dynamic"}}), (FULL, "dynamic")),
    ("gemma3_text", rope(**{FULL: {"rope_type": "linear"}}), (FULL, "factor", "missing")),
    ("gemma3_text", rope(**{SLIDING: {"rope_type": "linear", "factor": 8.0}}), (SLIDING, "rope_type", "linear")),
    ("gemma3_text", rope(**{SLIDING: {"factor": 8.0}}), (SLIDING, "factor", "8.0")),
    ("gemma3_text", rope(**{SLIDING: {"rope_theta": "1e4"}}), (SLIDING, "rope_theta")),
    ("gemma3_text", fields(rope_local_base_freq=2e4), ("rope_local_base_freq", "10000", "20000")),
    ("gemma3_text", fields(rope_theta=2e4), ("rope_theta", "20000")),
    *[
        ("gemma3_text", fields(rope_parameters=..., rope_local_base_freq=value), ("rope_local_base_freq",))
        for value in (0, -1.0, *NO_NUMBERS)
    ],
    # Factors and caps: of the wrong type or range, and where a family has none.
    *[("granite", fields(**{name: value}), (name,)) for name in GRANITE_FIELDS for value in (0, -1.0, 1e9, *NO_NUMBERS)],
    *[("gemma2", fields(**{name: value}), (name,)) for name in GEMMA_FIELDS for value in (0, -50.0, 1e9, *NO_NUMBERS)],
    *[
        (family, fields(**{name: 8.0}), (name, "8.0", "not supported"))
        for family in FAMILIES
        for name in GRANITE_FIELDS + GEMMA_FIELDS
        if name not in FAMILIES[family].own_fields
    ],
    ("granite", fields(logit_scale=0.5), ("logit_scale", "0.5")),
    # Activations and biases.
    ("gemma2", fields(hidden_activation="silu"), ("hidden_activation", "silu", "gelu_pytorch_tanh")),
    ("gemma3_text", fields(hidden_act="gelu"), ("hidden_act", "gelu", "gelu_pytorch_tanh")),
    ("phi3", fields(hidden_act="gelu_new"), ("hidden_act", "gelu_new", "silu")),
    *[(name, fields(attention_bias=value), ("attention_bias",)) for name in ("granite", "gemma2", "smollm3") for value in (1, "true", [])],
    *[(name, fields(mlp_bias=True), ("mlp_bias", "true")) for name in ("mistral", "qwen3", "phi3", "gemma2", "gemma3_text")],
    ("phi3", fields(attention_bias=True), ("attention_bias", "true")),
    # Tensors of another family's layout.
    ("llama", fields(model_type="phi3"), ("self_attn.qkv_proj.weight", "missing")),
    ("phi3", fields(model_type="mistral"), ("self_attn.q_proj.weight", "missing")),
    ("llama", fields(model_type="gemma2", hidden_act="gelu_new"), ("pre_feedforward_layernorm", "missing")),
    ("gemma2", fields(model_type="gemma3_text", attn_logit_softcapping=None, rope_parameters=...), ("q_norm.weight", "missing")),
    ("qwen3", fields(model_type="llama"), ("q_norm.weight", "not part")),
    ("phi3", fields(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}), ("yarn", "default, longrope")),
    ("llama", fields(rope_scaling={"type": "su", "factor": 2.0}, rope_parameters=...), ("'su'",)),
    # transformers reads one of the two, and would assume another base.
    (
        "llama",
        fields(
            rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}, rope_scaling={"rope_type": "linear", "factor": 2.0}
        ),
        ("rope_theta", "stale"),
    ),
    ("phi3", tensors(model__layers__0__mlp__gate_up_proj__weight=lambda t: t[:-1]), ("gate_up_proj", "[111, 40]", "[112, 40]")),
    ("phi3", tensors(model__layers__0__self_attn__q_proj__weight=torch.ones(40, 40)), ("q_proj", "not part")),
    ("gemma2", tensors(model__layers__2__post_feedforward_layernorm__weight=...), ("post_feedforward_layernorm", "missing")),
]


def test_every_family_is_spoilt() -> None:
    assert {name for name, *_ in CASES} == set(FAMILIES)


@pytest.mark.parametrize(("name", "change", "named"), CASES)
def test_spoilt_family(name: str, change: Change, named: tuple[str, ...], copy: Callable[[str], Path]) -> None:
    folder = copy(name)
    open_any(folder)
    change(folder)
    assert_refused(lambda: open_any(folder), *named)


REASONS = {
    "mixture of experts": ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "olmoe", "granitemoe", "llama4"),
    "linear attention": ("qwen3_next", "qwen3_5", "kimi_linear", "mamba2", "falcon_h1", "granitemoehybrid", "minimax"),
    "latent attention": ("deepseek_v2", "deepseek_v3"),
    "reads images": ("gemma3", "gemma3n", "mistral3", "mllama", "qwen2_5_vl", "qwen3_vl"),
    "one norm less": ("gemma",),
    "learned positions": ("gpt2",),
}


@pytest.mark.parametrize(("reason", "model_type"), [(reason, name) for reason, names in REASONS.items() for name in names])
def test_refused_family_has_its_reason(reason: str, model_type: str, copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    fields(model_type=model_type)(folder)
    assert_refused(lambda: open_any(folder), f"'{model_type}'", reason, ", ".join(FAMILIES))


def test_refused_families_are_none_of_ours_and_say_why() -> None:
    assert not set(REFUSED_TYPES) & set(FAMILIES)
    assert all(len(reason) > 20 and reason.isprintable() for reason in REFUSED_TYPES.values())


# What looks like a contradiction and is none.
HARMLESS: list[tuple[str, Change]] = [
    ("qwen3", fields(sliding_window=4, use_sliding_window=False)),
    ("qwen3", fields(sliding_window=4)),
    ("mistral", fields(sliding_window=4096, layer_types=None)),
    ("mistral", layer_types(SLIDING, SLIDING, SLIDING, sliding_window=4)),
    ("mistral", layer_types(FULL, FULL, FULL, sliding_window=None)),
    ("gemma2", fields(attn_logit_softcapping=None, final_logit_softcapping=None)),
    ("llama", fields(partial_rotary_factor=1.0, logits_scaling=1.0, no_rope_layers=[])),
    ("phi3", longrope()),
    ("phi3", longrope(rope_type="su")),
    ("smollm3", fields(no_rope_layers=[1, 0, 1, 0])),
    ("gemma3_text", rope(**{FULL: {"rope_type": "default", "rope_theta": 1e6}})),
]


@pytest.mark.parametrize(("name", "change"), HARMLESS)
def test_what_changes_nothing_is_no_error(name: str, change: Change, copy: Callable[[str], Path]) -> None:
    folder = copy(name)
    change(folder)
    open_any(folder)
