"""Every family and every switch against transformers: logits and taps of a random tiny model, fed in chunks on a static cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints.replay import TargetRun
from tests.tiny import TARGET_SIZES, edit_json, write_target
from xpress_export.checkpoints import open_target
from xpress_export.checkpoints.decoder_config import ACTIVATIONS
from xpress_export.checkpoints.families import FAMILIES
from xpress_export.models.rope import rotary_tables
from xpress_runtime.sets import AttentionForm

TOLERANCE = 1e-4
IDS = [5, 17, 60, 0, 33, 2, 2, 41, 9]
CHUNKS = (5, 3, 1)

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0]}
GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.0625, "logits_scaling": 8.0}
FULL, SLIDING = "full_attention", "sliding_attention"
GEMMA3_ROPES = {
    FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e3},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e4},
    "llama3": LLAMA3 | {"rope_theta": 5e5},
    "yarn": YARN | {"rope_theta": 1e6},
    "yarn-betas": YARN | {"rope_theta": 1e4, "beta_fast": 4.0, "beta_slow": 0.5},
    "yarn-untruncated": YARN | {"rope_theta": 1e4, "truncate": False, "beta_fast": 3.0},
    "yarn-attention-factor": YARN | {"rope_theta": 1e4, "attention_factor": 0.7},
    "yarn-mscale": YARN | {"rope_theta": 1e4, "mscale": 1.2, "mscale_all_dim": 0.6},
    "yarn-no-original": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4},
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1, "head_dim": 6}),
    "llama-derived-head-dim": ("llama", {"head_dim": None, "num_key_value_heads": None}),
    "llama-eps": ("llama", {"rms_norm_eps": 1e-3}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3-bias-tied": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-inactive-window": ("qwen3", {"use_sliding_window": False, "sliding_window": 4}),
    "qwen3-window": ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3-layer-types": ("qwen3", {"use_sliding_window": True, "sliding_window": 3, "layer_types": [SLIDING, FULL, SLIDING]}),
    "qwen2-window-of-one": ("qwen2", {"use_sliding_window": True, "sliding_window": 1, "max_window_layers": 0}),
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_window": 4}),
    "mistral-long-window": ("mistral", {"sliding_window": 1000}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "smollm3-untied": ("smollm3", {"tie_word_embeddings": False, "no_rope_layer_interval": 2, "attention_bias": True, "mlp_bias": True}),
    "smollm3-listed": ("smollm3", {"no_rope_layers": [0, 1, 0]}),
    "smollm3-window": ("smollm3", {"no_rope_layers": [0, 1, 1], "use_sliding_window": True, "sliding_window": 4}),
    "granite": ("granite", {}),
    "granite-factors": ("granite", GRANITE),
    "granite-biases": ("granite", GRANITE | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "phi3": ("phi3", {}),
    "phi3-window": ("phi3", {"sliding_window": 4, "num_key_value_heads": 4}),
    "phi3-partial": ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.8}}),
    "phi3-longrope": ("phi3", {"rope_parameters": LONGROPE | {"partial_rotary_factor": 0.4}, "original_max_position_embeddings": 64}),
    "gemma2": ("gemma2", {}),
    "gemma2-window": ("gemma2", {"sliding_window": 4, "query_pre_attn_scalar": 7, "attn_logit_softcapping": 0.5}),
    "gemma2-uncapped": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True}),
    "gemma2-low-cap": ("gemma2", {"final_logit_softcapping": 0.3}),
    "gemma3": ("gemma3_text", {}),
    "gemma3-window": ("gemma3_text", {"sliding_window": 3, "layer_types": [SLIDING, FULL, SLIDING], "rope_parameters": GEMMA3_ROPES}),
    "gemma3-all-full": ("gemma3_text", {"layer_types": [FULL] * 3, "head_dim": 10, "num_key_value_heads": 1}),
    "mistral-wide-queries": ("mistral", {"head_dim": 20}),
    **{f"llama-{name}": ("llama", {"rope_parameters": rope}) for name, rope in ROPES.items()},
}


@pytest.mark.parametrize("form", AttentionForm)
@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case: str, form: AttentionForm, tmp_path: Path) -> None:
    model_type, overrides = CASES[case]
    model = write_target(tmp_path, model_type, **overrides)
    assert_equals(tmp_path, model, form)


def assert_equals(folder: Path, model: Any, form: AttentionForm = AttentionForm.LENGTH) -> None:
    with torch.no_grad():
        expected = model(torch.tensor([IDS]), output_hidden_states=True)
    taps = tuple(range(model.config.num_hidden_layers))
    _, tapped, logits = TargetRun(open_target(str(folder)), taps, form).chunks(IDS, CHUNKS)
    assert (logits - expected.logits[0]).abs().max() < TOLERANCE
    # hidden_states starts with the embeddings and ends after the final norm.
    assert (tapped - torch.cat(expected.hidden_states[1:], dim=-1)[0]).abs().max() < TOLERANCE


LONG = {
    "llama": {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
    "qwen3": {"rope_parameters": YARN | {"rope_theta": 1e6}, "use_sliding_window": True, "sliding_window": 200, "max_window_layers": 1},
    "phi3": {"rope_parameters": LONGROPE | {"partial_rotary_factor": 0.4}, "original_max_position_embeddings": 512},
    "gemma3_text": {"sliding_window": 100, "layer_types": [SLIDING, FULL, SLIDING], "rope_parameters": GEMMA3_ROPES},
}


@pytest.mark.parametrize("model_type", LONG)
def test_long_texts(model_type: str, tmp_path: Path) -> None:
    """Far behind windows and original lengths, in chunks of other sizes than those."""
    model = write_target(tmp_path, model_type, max_position_embeddings=1024, **LONG[model_type])
    ids = torch.randint(0, 61, (460,), generator=torch.Generator().manual_seed(5)).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    _, _, logits = TargetRun(open_target(str(tmp_path)), (0,), num_positions=480).chunks(ids, (256, 128, 75, 1))
    assert (logits - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", ROPES)
def test_rotary_tables_are_transformers_own(name: str, tmp_path: Path) -> None:
    """The tables alone and far out, where a wrong frequency cannot hide behind small weights."""
    model = write_target(tmp_path, "qwen3", rope_parameters=ROPES[name])
    positions = torch.arange(128)
    cos, sin = model.model.rotary_emb(torch.zeros(1), positions[None])
    config = open_target(str(tmp_path)).config
    assert config.layers[0].rope is not None
    tables = rotary_tables(config.layers[0].rope, 128)
    half = config.head_dim // 2
    assert torch.allclose(tables.cos, cos[0, :, :half], atol=2e-5)
    assert torch.allclose(tables.sin, sin[0, :, :half], atol=2e-5)


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("name", ["linear", "llama3", "yarn", "yarn-no-original"])
def test_old_rope_layout(name: str, key: str, tmp_path: Path) -> None:
    """rope_theta beside rope_scaling, as configs were written before rope_parameters; transformers reads the same file."""
    from transformers import AutoModelForCausalLM

    write_target(tmp_path)
    scaling = {(key if field == "rope_type" else field): value for field, value in ROPES[name].items() if field != "rope_theta"}
    edit_json(tmp_path / "config.json", rope_parameters=..., rope_theta=ROPES[name]["rope_theta"], rope_scaling=scaling)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert model.config.rope_parameters["rope_type"] == ROPES[name]["rope_type"]
    assert_equals(tmp_path, model)


def test_outer_original_length_outranks_the_inner(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    write_target(tmp_path, rope_parameters=ROPES["yarn"])
    edit_json(tmp_path / "config.json", original_max_position_embeddings=16)
    assert_equals(tmp_path, AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval())
    rope = open_target(str(tmp_path)).config.layers[0].rope
    assert rope is not None
    assert dict(rope.scaling)["original_max_position_embeddings"] == 16


def test_sharded_is_the_same_checkpoint(tmp_path: Path) -> None:
    model = write_target(tmp_path / "sharded", max_shard_size="20KB")
    write_target(tmp_path / "single")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    assert_equals(tmp_path / "sharded", model)
    assert open_target(str(tmp_path / "sharded")).identity() == open_target(str(tmp_path / "single")).identity()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened_exactly(dtype: torch.dtype, tmp_path: Path) -> None:
    model = write_target(tmp_path / "wide").to(dtype)
    model.save_pretrained(tmp_path / "half")
    checkpoint = open_target(str(tmp_path / "half"))
    table = checkpoint.embedding().table
    assert table.dtype == torch.float32
    assert torch.equal(table, model.model.embed_tokens.weight.float())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_defaults_are_transformers(model_type: str) -> None:
    """Fields that a config may leave out mean what transformers' config class of that family assumes."""
    from transformers import AutoConfig

    family, theirs = FAMILIES[model_type], AutoConfig.for_model(model_type)
    derived = theirs.hidden_size // theirs.num_attention_heads
    assert (family.kv_heads or theirs.num_attention_heads) == theirs.num_key_value_heads
    assert (family.head_dim or derived) == getattr(theirs, "head_dim", derived)
    assert family.max_positions == theirs.max_position_embeddings
    ropes = theirs.rope_parameters
    assert family.theta == ropes.get(FULL, ropes)["rope_theta"]
    assert family.local_theta == ropes.get(SLIDING, {}).get("rope_theta")
    assert family.rms_norm_eps == theirs.rms_norm_eps
    assert ACTIVATIONS[getattr(theirs, "hidden_act", None) or theirs.hidden_activation] == family.activation
    assert family.tied == theirs.tie_word_embeddings
    assert not getattr(theirs, "attention_bias", False)
    assert not getattr(theirs, "mlp_bias", False)
    assert hasattr(theirs, "mlp_bias") == family.reads_mlp_bias
    assert hasattr(theirs, "attention_bias") == family.reads_attention_bias
    assert hasattr(theirs, "use_sliding_window") == (family.windows == "switched")
    if family.windows != "switched":
        assert getattr(theirs, "sliding_window", None) == family.window
    assert getattr(theirs, "max_window_layers", family.max_window_layers) == family.max_window_layers
    assert getattr(theirs, "no_rope_layer_interval", None) == family.no_rope_interval
    assert getattr(theirs, "query_pre_attn_scalar", None) == family.query_scalar
    assert getattr(theirs, "attn_logit_softcapping", None) == family.attention_cap
    assert getattr(theirs, "final_logit_softcapping", None) == family.logit_cap
    for name in family.own_fields:
        assert hasattr(theirs, name)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_layers_without_layer_types_are_transformers(model_type: str, tmp_path: Path) -> None:
    """Which layers have a window and which rotate, where a config says neither."""
    from transformers import AutoConfig

    write_target(tmp_path, model_type, num_hidden_layers=7, use_sliding_window=True, max_window_layers=4, sliding_window=5)
    if FAMILIES[model_type].windows == "never":
        edit_json(tmp_path / "config.json", sliding_window=...)
    edit_json(tmp_path / "config.json", layer_types=..., no_rope_layers=...)
    config, theirs = open_target(str(tmp_path)).config, AutoConfig.from_pretrained(tmp_path)
    everywhere = SLIDING if FAMILIES[model_type].windows == "all" else FULL
    kinds = getattr(theirs, "layer_types", None) or [everywhere] * 7
    assert [layer.window for layer in config.layers] == [5 if kind == SLIDING else None for kind in kinds]
    assert [layer.rope is not None for layer in config.layers] == [bool(flag) for flag in getattr(theirs, "no_rope_layers", [1] * 7)]


def test_old_layout_of_gemma3(tmp_path: Path) -> None:
    """Bases side by side, scaling for the layers without a window alone, and a pattern in the place of layer types."""
    from transformers import AutoModelForCausalLM

    write_target(tmp_path, "gemma3_text", sliding_window=3)
    changes = {"rope_theta": 5e5, "rope_local_base_freq": 2e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    edit_json(tmp_path / "config.json", rope_parameters=..., layer_types=..., sliding_window_pattern=2, **changes)
    assert_equals(tmp_path, AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval())
    config = open_target(str(tmp_path)).config
    assert [layer.rope.theta if layer.rope else None for layer in config.layers] == [2e3, 5e5, 2e3]


def test_longrope_ends_where_its_frequencies_change(tmp_path: Path) -> None:
    rope = LONGROPE | {"partial_rotary_factor": 0.4}
    write_target(tmp_path, "phi3", rope_parameters=rope, original_max_position_embeddings=64, max_position_embeddings=256)
    assert open_target(str(tmp_path)).config.max_positions == 64


def test_bare_config_is_read_like_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    write_target(tmp_path, num_key_value_heads=4, head_dim=10, max_position_embeddings=2048)
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "eos_token_id")
    path = tmp_path / "config.json"
    path.write_text("{}")
    edit_json(path, model_type="llama", **{name: TARGET_SIZES[name] for name in required})
    assert_equals(tmp_path, AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval())
