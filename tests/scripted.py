"""A target and a drafter whose every token is known beforehand: acceptance is dictated, not learned.

The target is a permutation: whatever stands before, token t is followed by ``successor(t)``. The drafter's base logits are constant, so
that its seed is one fixed token in every slot; the refiner knows the permutation. Pass k therefore settles slot k and no other: with K
passes exactly K drafts are accepted in every round (none with K = 0, all with K = block size - 1).
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB_SIZE = 32
BLOCK_SIZE = 4
MASK_TOKEN_ID = 31
# Follows no token, so that a seed is never right.
SEED_TOKEN = 0
_CYCLE = list(range(1, 31))


def successor(token: int) -> int:
    """The target's next token: 1 → 2 → … → 30 → 1. Anything else goes to 31, off the cycle, so that no wrong draft is right by luck."""
    return token % 30 + 1 if token in _CYCLE else MASK_TOKEN_ID


def continuation(token: int, count: int) -> list[int]:
    """The ``count`` tokens after ``token``."""
    tokens: list[int] = []
    for _ in range(count):
        token = successor(token)
        tokens.append(token)
    return tokens


def write_scripted(folder: Path) -> tuple[Path, Path]:
    """Write ``folder/target`` and ``folder/drafter``; returns both paths."""
    target, drafter = folder / "target", folder / "drafter"
    target.mkdir(parents=True)
    drafter.mkdir(parents=True)
    sizes = {
        "hidden_size": VOCAB_SIZE,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "vocab_size": VOCAB_SIZE,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
    }
    _write(target, {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False, **sizes}, _target_tensors())
    config = {
        "architectures": ["Qwen3XPressModel"],
        "model_type": "qwen3",
        **sizes,
        "num_hidden_layers": 1,
        "num_target_layers": 2,
        "block_size": BLOCK_SIZE,
        "dflash_config": {"mask_token_id": MASK_TOKEN_ID, "target_layer_ids": [0, 1]},
        "xpress_rank": VOCAB_SIZE,
        "xpress_mlp_hidden": 4,
        "xpress_block_size": BLOCK_SIZE,
        "xpress_num_passes": BLOCK_SIZE - 1,
        "sample_from_anchor": False,
    }
    _write(drafter, config, _drafter_tensors())
    return target, drafter


def _write(folder: Path, config: dict[str, object], tensors: dict[str, torch.Tensor]) -> None:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _layer(index: int, *, prefix: str, qk_norm: bool) -> dict[str, torch.Tensor]:
    """A layer whose attention and MLP add nothing, with the shapes of the sizes above."""
    shapes = {
        "input_layernorm": (VOCAB_SIZE,),
        "post_attention_layernorm": (VOCAB_SIZE,),
        "self_attn.q_proj": (16, VOCAB_SIZE),
        "self_attn.k_proj": (8, VOCAB_SIZE),
        "self_attn.v_proj": (8, VOCAB_SIZE),
        "self_attn.o_proj": (VOCAB_SIZE, 16),
        "mlp.gate_proj": (8, VOCAB_SIZE),
        "mlp.up_proj": (8, VOCAB_SIZE),
        "mlp.down_proj": (VOCAB_SIZE, 8),
    }
    if qk_norm:
        shapes |= {"self_attn.q_norm": (8,), "self_attn.k_norm": (8,)}
    zero = ("self_attn.o_proj", "mlp.down_proj")
    return {f"{prefix}.{index}.{name}.weight": torch.zeros(shape) if name in zero else torch.ones(shape) for name, shape in shapes.items()}


def _target_tensors() -> dict[str, torch.Tensor]:
    head = torch.zeros(VOCAB_SIZE, VOCAB_SIZE)
    for token in range(VOCAB_SIZE):
        head[successor(token), token] = 1.0
    tensors = {
        "model.embed_tokens.weight": torch.eye(VOCAB_SIZE),
        "model.norm.weight": torch.ones(VOCAB_SIZE),
        "lm_head.weight": head,
    }
    for layer in range(2):
        tensors |= _layer(layer, prefix="model.layers", qk_norm=False)
    return tensors


def _drafter_tensors() -> dict[str, torch.Tensor]:
    readout = torch.zeros(VOCAB_SIZE, VOCAB_SIZE)
    for token in range(VOCAB_SIZE):
        readout[successor(token), token] = 10.0
    # A norm weight of zero makes every base logit zero, whose argmax is token 0.
    tensors = {
        "fc.weight": torch.ones(VOCAB_SIZE, 2 * VOCAB_SIZE),
        "hidden_norm.weight": torch.ones(VOCAB_SIZE),
        "norm.weight": torch.zeros(VOCAB_SIZE),
        **_layer(0, prefix="layers", qk_norm=True),
        "xpress_head.w1.weight": torch.eye(VOCAB_SIZE),
        "xpress_head.w2.weight": readout,
        "xpress_head.down_h.weight": torch.zeros(VOCAB_SIZE, VOCAB_SIZE),
        "xpress_head.down_g.weight": torch.zeros(VOCAB_SIZE, VOCAB_SIZE),
        "xpress_head.in_proj.weight": torch.cat([torch.zeros(VOCAB_SIZE, 2 * VOCAB_SIZE), torch.eye(VOCAB_SIZE)], dim=1),
        # Folded to the identity: slots do not mix.
        "xpress_head.mix.L": torch.zeros(VOCAB_SIZE, BLOCK_SIZE, BLOCK_SIZE),
        "xpress_head.mlp.gate_proj.weight": torch.zeros(4, VOCAB_SIZE),
        "xpress_head.mlp.up_proj.weight": torch.zeros(4, VOCAB_SIZE),
        "xpress_head.mlp.down_proj.weight": torch.zeros(VOCAB_SIZE, 4),
    }
    return {name: tensor.contiguous() for name, tensor in tensors.items()}
