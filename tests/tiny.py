"""Tiny random checkpoints in published layouts: a Hugging Face target folder, and a drafter folder made for a given target.

Sizes are small and odd on purpose: vocabulary, hidden size and head dim are no powers of two, and heads share keys. Nothing is trained, so
drafts are rarely accepted; ``conformance_data`` has trained ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

TARGET_SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "pad_token_id": None,
    "eos_token_id": 1,
}

# No field of these families: their heads always divide the hidden size.
NO_HEAD_DIM = ("qwen2", "phi3")


def write_target(folder: Path, model_type: str = "llama", *, seed: int = 0, max_shard_size: str = "5GB", **overrides: Any) -> Any:
    """Save a random causal LM of any supported ``model_type`` and return the transformers model, in eval mode.

    ``overrides`` are fields of the family's config class. Biases and norm weights are random too, so that a forgotten one shows.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(TARGET_SIZES)
    if model_type == "mistral":
        fields["sliding_window"] = None
    if model_type in NO_HEAD_DIM:
        del fields["head_dim"]
    config = AutoConfig.for_model(model_type, **(fields | overrides))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                # Gemma's are stored less one.
                one = 0 if model_type.startswith("gemma") else 1
                parameter.copy_(one + 0.2 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.copy_(0.2 * torch.randn_like(parameter))
            else:
                parameter.copy_(parameter.shape[-1] ** -0.5 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def write_drafter(
    folder: Path,
    target_folder: Path,
    *,
    block_size: int = 4,
    tap_layers: tuple[int, ...] = (0, 1),
    rank: int = 8,
    refiner: bool = True,
    mask_token_id: int | None = None,
    seed: int = 0,
    **overrides: Any,
) -> dict[str, torch.Tensor]:
    """Save a random drafter for a target, in the xPress serving format or, without ``refiner``, as bare DFlash; return its tensors.

    ``overrides`` are fields of its config.json; they go in before the tensors are drawn, so sizes stay consistent.
    """
    target = json.loads((target_folder / "config.json").read_text(encoding="utf-8"))
    config: dict[str, Any] = {
        "architectures": ["Qwen3XPressModel" if refiner else "DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "float32",
        "hidden_size": target["hidden_size"],
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "vocab_size": target["vocab_size"],
        "rope_theta": rope_theta(target),
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": target["max_position_embeddings"],
        "num_target_layers": target["num_hidden_layers"],
        "block_size": block_size,
        "dflash_config": {
            "mask_token_id": target["vocab_size"] - 1 if mask_token_id is None else mask_token_id,
            "target_layer_ids": list(tap_layers),
        },
    }
    if refiner:
        config |= {
            "xpress_rank": rank,
            "xpress_mlp_hidden": 2 * rank,
            "xpress_block_size": block_size,
            "xpress_num_passes": min(2, block_size - 1),
            "sample_from_anchor": False,
        }
    config |= overrides
    config.setdefault("layer_types", ["full_attention"] * config["num_hidden_layers"])
    tensors = random_drafter_tensors(config, refiner=refiner, seed=seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return tensors


def write_markov_drafter(
    folder: Path, target_folder: Path, *, rank: int = 8, prefix: str = "", states_rank: bool = True, seed: int = 0, **options: Any
) -> dict[str, torch.Tensor]:
    """Save a random DFlash drafter with a Markov head, its tables named with ``prefix``; options and result are :func:`write_drafter`'s."""
    tensors = write_drafter(folder, target_folder, refiner=False, seed=seed, **({"markov_rank": rank} if states_rank else {}), **options)
    vocab_size = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    generator = torch.Generator().manual_seed(seed + 1)
    for name in ("markov_w1.weight", "markov_w2.weight"):
        tensors[prefix + name] = torch.randn(vocab_size, rank, generator=generator) * rank**-0.25
    save_file(tensors, folder / "model.safetensors")
    return tensors


def random_drafter_tensors(config: dict[str, Any], *, refiner: bool, seed: int) -> dict[str, torch.Tensor]:
    """Random tensors under the published names, for a drafter's config.json."""
    hidden, heads, kv_heads, head_dim = (config[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"))
    inner, num_taps = config["intermediate_size"], len(config["dflash_config"]["target_layer_ids"])
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, num_taps * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (heads * head_dim, hidden),
            prefix + "self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
            prefix + "self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, heads * head_dim),
            prefix + "self_attn.q_norm.weight": (head_dim,),
            prefix + "self_attn.k_norm.weight": (head_dim,),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
        }
        if config["attention_bias"]:
            for name, width in (("q", heads * head_dim), ("k", kv_heads * head_dim), ("v", kv_heads * head_dim), ("o", hidden)):
                shapes[f"{prefix}self_attn.{name}_proj.bias"] = (width,)
    if refiner:
        rank, inner, vocab, block = (config[name] for name in ("xpress_rank", "xpress_mlp_hidden", "vocab_size", "xpress_block_size"))
        shapes |= {
            "xpress_head.w1.weight": (vocab, rank),
            "xpress_head.w2.weight": (vocab, rank),
            "xpress_head.down_h.weight": (rank, hidden),
            "xpress_head.down_g.weight": (rank, hidden),
            "xpress_head.in_proj.weight": (rank, 3 * rank),
            "xpress_head.mix.L": (rank, block, block),
            "xpress_head.mlp.gate_proj.weight": (inner, rank),
            "xpress_head.mlp.up_proj.weight": (inner, rank),
            "xpress_head.mlp.down_proj.weight": (rank, inner),
        }
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.2 * values if name.endswith("norm.weight") else values * shape[-1] ** -0.5
    return tensors


def rope_theta(config: dict[str, Any]) -> float:
    """The rotary base of a config.json of either layout."""
    parameters = config.get("rope_parameters") or {}
    return float(parameters.get("rope_theta") or config.get("rope_theta") or 10_000.0)


def edit_json(path: Path, **changes: Any) -> None:
    """Set top-level fields of a JSON file; a value of ``...`` removes the field."""
    values = json.loads(path.read_text(encoding="utf-8"))
    for name, value in changes.items():
        if value is ...:
            values.pop(name, None)
        else:
            values[name] = value
    path.write_text(json.dumps(values, indent=1), encoding="utf-8")
