"""Checkpoints of real width with random weights, written shard by shard: what matters of them is their size."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

# What Qwen3 models of 4B and 8B share; then the widths of the one that most drafters are published for, and ones that fit any machine.
QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1_000_000,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
}
QWEN3_8B = QWEN3 | {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "tie_word_embeddings": False,
    "eos_token_id": 151645,
}
TWO_GIGABYTES = QWEN3_8B | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}


def write_large_target(folder: Path, config: dict[str, Any], *, shard_bytes: int = 500_000_000) -> None:
    """A random Qwen3 target in bf16, in shards of at most ``shard_bytes`` (or one tensor)."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}

    def write() -> None:
        name = f"model-{len(set(weight_map.values())):05d}.safetensors"
        save_file(shard, folder / name)
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, shape in target_shapes(config):
        tensor = torch.empty(shape, dtype=torch.bfloat16)
        tensor = tensor.fill_(1) if len(shape) == 1 else tensor.normal_(0, shape[-1] ** -0.5, generator=generator)
        if shard and sum(held.nbytes for held in shard.values()) + tensor.nbytes > shard_bytes:
            write()
        shard[name] = tensor
    write()
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def target_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        for name, rows, columns in (("q", queries, hidden), ("k", keys, hidden), ("v", keys, hidden), ("o", hidden, queries)):
            yield f"{prefix}.self_attn.{name}_proj.weight", (rows, columns)
        yield f"{prefix}.self_attn.q_norm.weight", (head_dim,)
        yield f"{prefix}.self_attn.k_norm.weight", (head_dim,)
        for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            yield f"{prefix}.mlp.{name}_proj.weight", (rows, columns)
