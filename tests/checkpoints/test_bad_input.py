"""Malformed folders: each is refused with the right class, in one line that names the culprit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints.spoil import Change, assert_refused, edit_index, fields, generation, nested, open_any, rope, tensors
from tests.tiny import write_drafter, write_target
from xpress_export.checkpoints import check_pairing, open_drafter, open_target
from xpress_runtime.errors import CheckpointError, PairingError

BIG = 10**9
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0}

# (checkpoint, what is spoilt, what the message names)
CONFIG_CASES: list[tuple[str, Change, tuple[str, ...]]] = [
    # Kind of model.
    ("llama", fields(model_type=...), ("config.json", "model_type", "missing")),
    ("llama", fields(model_type=3), ("model_type", "3")),
    ("llama", fields(model_type="gpt9"), ("gpt9", "llama, qwen2, qwen3, mistral", "gemma3_text")),
    # Sizes: missing, absurd, of the wrong type.
    *[
        ("qwen3", fields(**{name: value}), (name, "missing" if value is ... else json.dumps(value)))
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        for value in (..., 0, -1, BIG, "64", 64.0, True, [64], {})
    ],
    *[
        ("llama", fields(**{name: value}), (name, json.dumps(value)))
        for name in ("num_key_value_heads", "head_dim", "max_position_embeddings")
        for value in (0, -2, BIG, "8", 8.5, False)
    ],
    ("llama", fields(num_key_value_heads=3), ("num_key_value_heads", "3", "num_attention_heads (4)")),
    ("llama", fields(num_key_value_heads=8), ("num_key_value_heads", "8")),
    ("llama", fields(head_dim=7), ("head_dim", "7", "even")),
    ("llama", fields(head_dim=None, num_attention_heads=6, num_key_value_heads=2), ("head_dim", "40", "6")),
    ("llama", fields(head_dim=1024, num_attention_heads=1024), ("num_attention_heads × head_dim", str(2**20))),
    *[("llama", fields(rms_norm_eps=value), ("rms_norm_eps",)) for value in (0, -1e-6, 1.0, "1e-6", float("nan"))],
    *[("llama", fields(tie_word_embeddings=value), ("tie_word_embeddings", json.dumps(value))) for value in (1, "true", [])],
    ("llama", generation(eos_token_id="</s>"), ("generation_config.json", "eos_token_id", "</s>")),
    ("llama", generation(eos_token_id=[1, 61]), ("generation_config.json", "eos_token_id", "61")),
    # Misspelled.
    ("llama", fields(rope_tetha=1e6), ("rope_tetha", "did you mean 'rope_theta'")),
    ("llama", fields(hidden_size=..., hiden_size=40), ("hiden_size", "did you mean 'hidden_size'")),
    ("llama", fields(tie_word_embeddings=..., tie_word_embedding=True), ("tie_word_embedding", "did you mean 'tie_word_embeddings'")),
    ("xpress", fields(xpress_block_size=..., xpres_block_size=4), ("xpres_block_size", "did you mean 'xpress_block_size'")),
    (
        "dflash",
        nested("dflash_config", target_layer_ids=..., target_layers_ids=[0]),
        ("target_layers_ids", "did you mean"),
    ),
    # Switches that the decoder does not compute.
    *[
        ("llama", fields(**{name: value}), (name, json.dumps(value)))
        for name, value in (
            ("quantization_config", {"quant_method": "gptq"}),
            ("final_logit_softcapping", 30.0),
            ("attn_logit_softcapping", 50.0),
            ("num_experts", 8),
            ("num_experts", False),
            ("use_parallel_residual", 0),
            ("partial_rotary_factor", True),
            ("num_local_experts", 8),
            ("n_routed_experts", 64),
            ("partial_rotary_factor", 0.5),
            ("no_rope_layers", [1, 0, 1]),
            ("logit_scale", 0.0625),
            ("logits_scaling", 8.0),
            ("residual_multiplier", 0.22),
            ("use_parallel_residual", True),
            ("hidden_act", "gelu"),
            ("hidden_activation", "gelu_pytorch_tanh"),
            ("sliding_window", 4096),
            ("attention_chunk_size", 8192),
            ("is_encoder_decoder", True),
        )
    ],
    ("llama", fields(auto_map={"AutoModelForCausalLM": "modeling_x.Model"}), ("auto_map", "AutoModelForCausalLM")),
    ("mistral", fields(attention_bias=True), ("attention_bias", "true")),
    ("qwen3", fields(layer_types=["full_attention"] * 2), ("layer_types", "3")),
    ("qwen3", fields(layer_types="full_attention"), ("layer_types",)),
    ("qwen2", fields(mlp_bias=True), ("mlp_bias", "true")),
    # Rotary embedding.
    *[
        ("llama", rope(rope_type=kind, factor=2.0), (kind, "default, linear, llama3, yarn, longrope"))
        for kind in ("dynamic", "mrope", "proportional", "")
    ],
    ("llama", rope(rope_type=3), ("rope_type", "3")),
    ("llama", rope(rope_type="linear"), ("factor", "missing")),
    ("llama", rope(rope_type="linear", factor=0.5), ("factor", "0.5")),
    ("llama", rope(rope_type="linear", factor="2"), ("factor", '"2"')),
    ("llama", rope(rope_type="default", factor=2.0), ("factor", "default")),
    ("llama", rope(rope_type="default", partial_rotary_factor=0.25), ("partial_rotary_factor", "0.25")),
    ("llama", rope(rope_type="default", mrope_section=[2, 2, 2]), ("mrope_section",)),
    ("llama", rope(rope_type="default", rope_theta=0), ("rope_theta", "0")),
    ("llama", rope(full_attention={"rope_type": "default"}), ("full_attention",)),
    ("llama", rope(rope_type="linear", type="yarn", factor=2.0), ("linear", "yarn")),
    *[("llama", rope(**{k: v for k, v in LLAMA3.items() if k != name}), (name, "missing")) for name in LLAMA3 if name.endswith("factor")],
    ("llama", rope(**LLAMA3 | {"low_freq_factor": 4.0}), ("low_freq_factor", "high_freq_factor")),
    ("llama", rope(**LLAMA3, original_max_position_embeddings=0), ("original_max_position_embeddings", "0")),
    ("llama", rope(**YARN, beta_fast=1.0, beta_slow=2.0), ("beta_slow", "beta_fast")),
    ("llama", rope(**YARN, attention_factor=-1.0), ("attention_factor", "-1")),
    ("llama", rope(**YARN, attention_factor=0), ("attention_factor", "0")),
    ("llama", rope(**YARN, truncate="no"), ("truncate", "no")),
    ("llama", rope(**YARN, mscale=[1]), ("mscale",)),
    ("llama", fields(rope_parameters=[1e4]), ("rope_parameters",)),
    ("llama", fields(rope_scaling={"type": "linear", "factor": 2.0}), ("rope_scaling", "rope_parameters")),
    ("llama", fields(rope_theta=3e4), ("rope_theta", "10000", "30000")),
    # The drafter's own fields.
    ("xpress", fields(architectures=["Qwen3ForCausalLM"]), ("Qwen3ForCausalLM", "Qwen3XPressModel", "DFlashDraftModel")),
    ("xpress", fields(architectures=...), ("architectures", "missing")),
    ("xpress", fields(architectures=3), ("architecture", "3")),
    ("xpress", fields(model_type="llama"), ("model_type", "llama", "qwen3")),
    ("xpress", fields(speculators_model_type="xpress"), ("speculators",)),
    ("xpress", fields(sample_from_anchor=True), ("sample_from_anchor", "true")),
    ("xpress", fields(block_size=...), ("block_size", "missing")),
    ("xpress", fields(block_size=1), ("block_size", "1")),
    ("xpress", fields(block_size=8), ("xpress_block_size is 4", "block_size is 8")),
    ("xpress", fields(xpress_block_size=8), ("xpress_block_size is 8", "block_size is 4")),
    ("xpress", fields(xpress_num_passes=4), ("xpress_num_passes is 4", "at most 3")),
    ("xpress", fields(xpress_num_passes=0), ("xpress_num_passes", "0")),
    *[
        ("xpress", fields(**{name: ...}), (name, "missing"))
        for name in ("xpress_rank", "xpress_mlp_hidden", "xpress_block_size", "xpress_num_passes", "dflash_config")
    ],
    ("xpress", fields(xpress_topc=62), ("xpress_topc", "62")),
    ("xpress", fields(xpress_topc=16, xpress_candidate_topc=32), ("xpress_topc", "16", "32")),
    ("xpress", fields(dflash_config=[]), ("dflash_config",)),
    ("xpress", nested("dflash_config", mask_token_id=...), ("mask_token_id", "missing")),
    ("xpress", nested("dflash_config", mask_token_id=61), ("mask_token_id is 61", "61")),
    ("xpress", nested("dflash_config", mask_token_id=-1), ("mask_token_id", "-1")),
    ("xpress", nested("dflash_config", target_layer_ids=...), ("target_layer_ids", "missing")),
    ("xpress", nested("dflash_config", target_layer_ids=[0, 3]), ("layer 3", "0 to 2")),
    ("xpress", nested("dflash_config", target_layer_ids=[-1, 1]), ("target_layer_ids", "-1")),
    ("xpress", nested("dflash_config", target_layer_ids=[1, 1]), ("[1, 1]", "twice")),
    ("xpress", nested("dflash_config", target_layer_ids=[]), ("target_layer_ids", "empty")),
    ("xpress", nested("dflash_config", target_layer_ids=[0.0, 1.0]), ("target_layer_ids", "0.0")),
    ("xpress", fields(layer_types=["full_attention", "sliding_attention"]), ("layer_types[1]", "sliding_attention")),
    ("dflash", fields(layer_types=["full_attention", "sliding_attention"]), ("layer_types[1]", "sliding_attention")),
    ("dflash", fields(xpress_rank=8), ("DFlashDraftModel", "xpress_rank")),
    ("dflash", fields(num_target_layers=..., dflash_config={"mask_token_id": 60}), ("target_layer_ids", "num_target_layers")),
]

TENSOR_CASES: list[tuple[str, Change, tuple[str, ...]]] = [
    ("llama", tensors(model__norm__weight=...), ("'model.norm.weight'", "missing")),
    ("llama", tensors(lm_head__weight=...), ("'lm_head.weight'", "missing")),
    ("llama", tensors(model__layers__1__mlp__up_proj__weight=...), ("'model.layers.1.mlp.up_proj.weight'", "missing")),
    ("llama", tensors(extra__weight=torch.ones(2)), ("'extra.weight'", "not part")),
    ("llama", tensors(model__layers__3__input_layernorm__weight=torch.ones(40)), ("'model.layers.3.input_layernorm.weight'",)),
    ("llama", tensors(model__layers__0__self_attn__q_proj__bias=torch.ones(48)), ("'model.layers.0.self_attn.q_proj.bias'",)),
    ("llama", tensors(model__layers__0__self_attn__k_proj__weight=lambda t: t.T), ("k_proj.weight", "[40, 24]", "[24, 40]")),
    ("llama", tensors(model__embed_tokens__weight=lambda t: t[:-1]), ("embed_tokens", "[60, 40]", "[61, 40]")),
    ("llama", fields(attention_bias=True), ("q_proj.bias", "missing", "more")),
    ("llama", fields(hidden_size=48), ("[61, 40]", "[61, 48]")),
    ("tied", tensors(lm_head__weight=torch.ones(3, 3)), ("'lm_head.weight'", "[3, 3]", "[61, 40]")),
    ("llama", tensors(model__norm__weight=lambda t: t.to(torch.int8)), ("'model.norm.weight'", "I8", "quantised")),
    ("llama", tensors(model__norm__weight=lambda t: t.to(torch.float8_e4m3fn)), ("'model.norm.weight'", "F8_E4M3")),
    ("llama", tensors(model__norm__weight=lambda t: t.double()), ("'model.norm.weight'", "F64")),
    ("xpress", tensors(fc__weight=...), ("'fc.weight'", "missing")),
    ("xpress", tensors(fc__weight=lambda t: t[:, :40]), ("'fc.weight'", "[40, 40]", "[40, 80]")),
    ("xpress", tensors(layers__0__self_attn__q_norm__weight=...), ("q_norm.weight", "missing")),
    ("xpress", tensors(xpress_head__mix__L=lambda t: t[:, :3, :3]), ("'xpress_head.mix.L'", "[8, 3, 3]", "[8, 4, 4]")),
    ("xpress", tensors(xpress_head__w2__weight=...), ("'xpress_head.w2.weight'", "missing")),
    ("xpress", tensors(lm_head__weight=torch.ones(61, 40)), ("'lm_head.weight'", "not part")),
    ("xpress", tensors(embed_tokens__weight=torch.ones(61, 40)), ("'embed_tokens.weight'", "not part")),
    ("xpress", fields(xpress_rank=16), ("xpress_head", "16")),
    ("dflash", tensors(xpress_head__w1__weight=torch.ones(61, 8)), ("xpress_head", "xpress_rank")),
    ("dflash", tensors(markov_w1__weight=torch.ones(61, 8)), ("'markov_w1.weight'", "not part")),
]


@pytest.mark.parametrize(("name", "change", "named"), CONFIG_CASES + TENSOR_CASES)
def test_spoilt_checkpoint(name: str, change: Change, named: tuple[str, ...], copy: Callable[[str], Path]) -> None:
    folder = copy(name)
    open_any(folder)
    change(folder)
    assert_refused(lambda: open_any(folder), *named)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama", fields(model_type="gpt\n9\x1b[31m")),
        ("llama", fields(**{"rope_theta\n": 1.0})),
        ("llama", fields(rope_parameters={"rope_type": "a\nb"})),
        ("llama", fields(rope_parameters={"rope_type": "default", "a\nb": "c\nd"})),
        ("llama", fields(hidden_act="si\nlu")),
        ("llama", tensors(**{"a\nb": torch.ones(2)})),
        ("sharded", lambda folder: edit_index(folder, **{"a\nb": "c\nd"})),
        ("sharded", lambda folder: edit_index(folder, model__norm__weight="c\nd")),
    ],
)
def test_control_characters_stay_out_of_messages(name: str, change: Change, copy: Callable[[str], Path]) -> None:
    folder = copy(name)
    change(folder)
    with pytest.raises(CheckpointError) as caught:
        open_any(folder)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"a": NaN', "\udcff", '{"model_type": "llama", ' + '"a": [' * 5000])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_broken_json(file: str, text: str, copy: Callable[[str], Path]) -> None:
    folder = copy("sharded")
    (folder / file).write_bytes(text.encode(errors="surrogateescape"))
    assert_refused(lambda: open_any(folder), file)


def test_missing_files(tmp_path: Path, copy: Callable[[str], Path]) -> None:
    assert_refused(lambda: open_target(str(tmp_path / "nowhere")), "nowhere", "does not exist")
    (tmp_path / "empty").mkdir()
    assert_refused(lambda: open_target(str(tmp_path / "empty")), "config.json")
    folder = copy("llama")
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    assert_refused(lambda: open_target(str(folder)), "other.safetensors", "model.safetensors")
    (folder / "other.safetensors").unlink()
    assert_refused(lambda: open_target(str(folder)), "no weights", "model.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"PK")
    assert_refused(lambda: open_target(str(folder)), "pytorch_model.bin", "only safetensors are read")


def test_a_target_is_no_drafter_and_a_drafter_no_target(originals: Path) -> None:
    assert_refused(lambda: open_drafter(str(originals / "llama")), "LlamaForCausalLM", "not a drafter")
    assert_refused(lambda: open_target(str(originals / "xpress")), "is a drafter", "dflash_config")


# Pairing.


@pytest.mark.parametrize(
    ("target", "named"),
    [
        ({"hidden_size": 48}, ("hidden size", "40", "48")),
        ({"vocab_size": 64}, ("vocabulary size", "61", "64")),
        ({"num_hidden_layers": 4}, ("target layers", "3", "4")),
        ({"num_hidden_layers": 2}, ("target layers", "3", "2")),
    ],
)
def test_drafter_for_another_target(target: dict[str, Any], named: tuple[str, ...], originals: Path, tmp_path: Path) -> None:
    write_target(tmp_path, **target)
    opened, drafter = open_target(str(tmp_path)), open_drafter(str(originals / "xpress"))
    assert_refused(lambda: check_pairing(opened, drafter), *named, str(tmp_path), "xpress", error=PairingError)


def test_tap_and_mask_beyond_the_target(originals: Path) -> None:
    """Checked against the target as well: a drafter made by other code than open_drafter keeps no promises."""
    from dataclasses import replace

    target, drafter = open_target(str(originals / "llama")), open_drafter(str(originals / "xpress"))
    good = drafter.config
    for change, named in (
        ({"tap_layers": (0, 7)}, ("layer 7", "0 to 2")),
        ({"tap_layers": (1, 1)}, ("[1, 1]", "twice")),
        ({"mask_token_id": 99}, ("99", "61")),
        ({"block_size": 1}, ("block size 1", "at least 2")),
    ):
        drafter.config = replace(good, **change)
        assert_refused(lambda: check_pairing(target, drafter), *named, "llama", "xpress", error=PairingError)


def test_another_rotary_base_is_a_warning(originals: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_drafter(tmp_path, originals / "llama", rope_theta=5e5)
    target = open_target(str(originals / "llama"))
    check_pairing(target, open_drafter(str(originals / "xpress")))
    assert not caplog.records
    check_pairing(target, open_drafter(str(tmp_path)))
    assert "500000" in caplog.text
    assert "10000" in caplog.text


def test_bare_drafter_has_no_refiner(originals: Path) -> None:
    drafter = open_drafter(str(originals / "dflash"))
    assert drafter.refiner is None
    assert_refused(drafter.refiner_module, "dflash", "without a refiner")
