"""A GGUF target: written here from a random model, read back through transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoints.replay import TargetRun
from tests.tiny import write_target
from xpress_export.checkpoints import open_drafter, open_target
from xpress_runtime.errors import CheckpointError

gguf = pytest.importorskip("gguf")

TOLERANCE = 1e-4
# Quantised blocks are 32 wide, so every matrix is a multiple of 32.
SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 2}
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(path: Path, model: Any, *, quantised: bool = False, architecture: str | None = None, **extra: Any) -> None:
    """As llama.cpp's converter writes them: q and k rows of a Llama are interleaved for its rotary kernel."""
    config = model.config
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    writer = gguf.GGUFWriter(path, architecture or config.model_type)
    writer.add_license("apache-2.0")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(extra.get("key_length", head_dim))
    writer.add_vocab_size(config.vocab_size)
    for key, value in extra.items():
        if key == "expert_count":
            writer.add_expert_count(value)
        elif key == "scaling":
            writer.add_rope_scaling_type(value)
        elif key == "window":
            writer.add_sliding_window(value)
    tensors = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if not config.tie_word_embeddings:
        tensors["output.weight"] = "lm_head.weight"
    for layer in range(config.num_hidden_layers):
        for ours, theirs in NAMES.items():
            for kind in ("weight", "bias"):
                tensors[f"blk.{layer}.{theirs}.{kind}"] = f"model.layers.{layer}.{ours}.{kind}"
    state = model.state_dict()
    tensors = {theirs: ours for theirs, ours in tensors.items() if ours in state and theirs != extra.get("without")}
    for theirs, ours in tensors.items():
        values = state[ours].numpy()
        if config.model_type in ("llama", "mistral") and theirs.endswith(("attn_q.weight", "attn_k.weight")):
            heads = values.shape[0] // head_dim
            values = values.reshape(heads, 2, head_dim // 2, -1).swapaxes(1, 2).reshape(values.shape)
        if quantised and values.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(theirs, gguf.quants.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
        else:
            writer.add_tensor(theirs, np.ascontiguousarray(values))
    if "rope_freqs" in extra:
        writer.add_tensor("rope_freqs.weight", np.ones(head_dim // 2, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_equals_the_model_it_was_made_from(model_type: str, tied: bool, tmp_path: Path) -> None:
    sizes = dict(SIZES)
    if model_type == "qwen2":
        del sizes["head_dim"]
    elif model_type == "qwen3":
        # The only one that transformers assumes for this architecture.
        sizes["head_dim"] = 128
    model = write_target(tmp_path / "original", model_type, tie_word_embeddings=tied, **sizes)
    (tmp_path / "gguf").mkdir()
    write_gguf(tmp_path / "gguf/tiny.gguf", model)
    # A folder with one .gguf and nothing else is that file.
    target = open_target(str(tmp_path / "gguf"))
    assert target.location.path == tmp_path / "gguf/tiny.gguf"
    assert target.model_type == model_type
    assert target.licence == "apache-2.0"
    assert target.config.tied_embeddings == tied
    ids = [5, 17, 60, 0, 33]
    _, _, logits = TargetRun(target, (1,)).chunks(ids, (3, 2))
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    assert (logits - expected).abs().max() < TOLERANCE
    assert len(target.identity()) == 64
    assert (target.head().table is target.embedding().table) == tied


def test_quantised(tmp_path: Path) -> None:
    model = write_target(tmp_path / "original", **SIZES)
    write_gguf(tmp_path / "q8.gguf", model, quantised=True)
    table = open_target(str(tmp_path / "q8.gguf")).embedding().table
    assert table.dtype == torch.float32
    error = (table - model.model.embed_tokens.weight).abs().max()
    assert 0 < error < 0.01


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        *[
            ({"architecture": name}, f"architecture '{name}' is not read from GGUF, expected llama, qwen2, qwen3; give safetensors")
            # As llama.cpp names families.
            for name in ("gemma2", "gemma3", "phi3", "granite", "smollm3", "mistral", "qwen3moe")
        ],
        ({"expert_count": 8}, "expert_count is 8"),
        ({"scaling": gguf.RopeScalingType.YARN}, "rope.scaling.type is yarn"),
        ({"rope_freqs": True}, "rope_freqs.weight"),
        ({"window": 4096}, "attention.sliding_window is 4096"),
        ({"key_length": 32}, "attention.key_length is 32"),
        ({"without": "blk.1.ffn_up.weight"}, "'blk.1.ffn_up.weight' is missing"),
        ({"without": "output_norm.weight"}, "'output_norm.weight' is missing"),
    ],
)
def test_refused(extra: dict[str, Any], named: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", write_target(tmp_path / "original", **SIZES), **extra)
    with pytest.raises(CheckpointError) as caught:
        open_target(str(tmp_path / "x.gguf"))
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_biases_that_transformers_would_drop(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", write_target(tmp_path / "original", attention_bias=True, **SIZES))
    with pytest.raises(CheckpointError, match=r"'blk\.0\.attn_k\.bias' is not part"):
        open_target(str(tmp_path / "x.gguf"))


def test_damaged(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(path, write_target(tmp_path / "original", **SIZES))
    content = path.read_bytes()
    for spoilt in (b"", b"GGUF", b"not a model at all", content[:40], content[:700], content[:-5000], b"XXXX" + content[4:]):
        path.write_bytes(spoilt)
        with pytest.raises(CheckpointError) as caught:
            open_target(str(path))
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_not_finite(tmp_path: Path) -> None:
    model = write_target(tmp_path / "original", **SIZES)
    with torch.no_grad():
        model.model.embed_tokens.weight[3, 5] = float("nan")
    write_gguf(tmp_path / "x.gguf", model)
    with pytest.raises(CheckpointError, match=r"'model\.embed_tokens\.weight' holds values that are not finite"):
        open_target(str(tmp_path / "x.gguf")).embedding()


def test_no_drafter(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="a drafter is a folder"):
        open_drafter(str(tmp_path / "x.gguf"))
