"""Writes a drafter that lies in the serving format in the other published layouts, each as its public tool writes it.

Every function takes the folder in the serving format and the folder, or file, to write.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

HEAD = "xpress_head."
XPRESS_FIELDS = ("xpress_rank", "xpress_mlp_hidden", "xpress_block_size", "xpress_num_passes", "xpress_candidate_topc", "xpress_topc")
SPECULATORS_HEAD = {
    "w1.weight": "token_embed.weight",
    "w2.weight": "readout.weight",
    "mix.L": "mix_l",
    "mlp.gate_proj.weight": "mlp_gate.weight",
    "mlp.up_proj.weight": "mlp_up.weight",
    "mlp.down_proj.weight": "mlp_down.weight",
}


def read_config(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return values


def write_config(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def flat_config(source: Path, folder: Path) -> None:
    """The serving format with the drafter's own fields beside the sizes, and none in dflash_config."""
    config = read_config(source)
    write_config(folder, {**config, **config.pop("dflash_config")})
    shutil.copy(source / "model.safetensors", folder)


def speculators(
    source: Path,
    folder: Path,
    *,
    draft_token_ids: Sequence[int] | None = None,
    target_tables: tuple[Tensor, Tensor] | None = None,
    own_head: Tensor | None = None,
    sizes: dict[str, Any] | None = None,
    shards: int = 1,
    **overrides: Any,
) -> None:
    """The layout of the speculators library: "xpress", "dspark" where there is a Markov head, else "dflash".

    ``draft_token_ids`` are the tokens of a reduced draft vocabulary; then ``own_head`` [Vd, H] is needed too. ``target_tables``: the
    target's embedding and head [V, H], which training left in the folder. ``sizes`` change transformer_layer_config, ``overrides`` the
    fields beside it; a value of ``...`` removes one.
    """
    config, tensors = read_config(source), load_file(source / "model.safetensors")
    kind = "xpress" if "xpress_rank" in config else "dspark" if "markov_rank" in config else "dflash"
    vocab_size = config["vocab_size"]
    written: dict[str, Any] = {
        "architectures": [{"xpress": "XPressSpeculator", "dspark": "DSparkSpeculator", "dflash": "DFlashSpeculator"}[kind]],
        "auto_map": {"": "config.SpeculatorConfig"},
        "speculators_model_type": kind,
        "speculators_version": "0.5.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config["block_size"] - 1}],
            "verifier": {"name_or_path": "example/target", "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": _changed(_layer_config(config), sizes or {}),
        "draft_vocab_size": len(draft_token_ids) if draft_token_ids is not None else vocab_size,
        "block_size": config["block_size"],
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config["dflash_config"]["target_layer_ids"]],
        "mask_token_id": config["dflash_config"]["mask_token_id"],
        "sample_from_anchor": False,
        "sliding_window_non_causal": config.get("is_causal") is False,
        "projector_type": "dflash",
        "shift_label": False,
        "tie_word_embeddings": False,
        "num_anchors": 256,
        "loss_decay_gamma": None,
        "dtype": "float32",
        "transformers_version": "5.24.0",
    }
    if kind == "xpress":
        written |= {
            "xpress_rank": config["xpress_rank"],
            "xpress_mlp_ratio": config["xpress_mlp_hidden"] // config["xpress_rank"],
            "num_jacobi_passes": config["xpress_num_passes"],
        }
    if kind == "dspark":
        written |= {"markov_rank": config["markov_rank"], "markov_head_type": "vanilla", "enable_confidence_head": True}
        tensors = {f"markov_head.{name}" if name.startswith("markov_") else name: tensor for name, tensor in tensors.items()}
        tensors["confidence_head.proj.weight"] = torch.ones(1, config["hidden_size"])
    held = {_speculators_name(name): tensor for name, tensor in tensors.items()}
    if draft_token_ids is not None:
        ids = torch.tensor(draft_token_ids)
        held["d2t"] = ids - torch.arange(len(ids))
        held["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, value=True)
        if kind == "xpress":
            held["refiner_head.readout.weight"] = held["refiner_head.readout.weight"][ids].contiguous()
    if own_head is not None:
        held["lm_head.weight"] = own_head
    if target_tables is not None:
        held["embed_tokens.weight"], held["verifier_lm_head.weight"] = target_tables[0].clone(), target_tables[1].clone()
        held["verifier_norm.weight"] = torch.ones(config["hidden_size"])
    write_config(folder, _changed(written, overrides))
    _save(held, folder, shards)


def training_checkpoint(source: Path, path: Path, *, base: bool = True, parallel: bool = False, args: Any = None, step: int = 1200) -> None:
    """A .pt file of the training code, and beside it, with ``base``, the config.json of the DFlash drafter that training started from."""
    config, tensors = read_config(source), load_file(source / "model.safetensors")
    prefix = "module." if parallel else ""
    draft = OrderedDict((prefix + name, tensor) for name, tensor in tensors.items() if not name.startswith(HEAD))
    refiner = OrderedDict((prefix + name.removeprefix(HEAD), tensor) for name, tensor in tensors.items() if name.startswith(HEAD))
    path.parent.mkdir(parents=True, exist_ok=True)
    run = argparse.Namespace(lr=1e-4, epochs=3, rank=config["xpress_rank"], output="runs/1", betas=[0.9, 0.95]) if args is None else args
    torch.save({"draft_state_dict": draft, "refiner_state_dict": refiner, "args": run, "step": step}, path)
    if base:
        write_config(path.parent, base_config(source))


def base_config(source: Path) -> dict[str, Any]:
    """config.json of the bare drafter that an xPress one was made from."""
    config = {name: value for name, value in read_config(source).items() if name not in (*XPRESS_FIELDS, "sample_from_anchor")}
    return config | {"architectures": ["DFlashDraftModel"]}


def _layer_config(config: dict[str, Any]) -> dict[str, Any]:
    """What an old release of transformers leaves of a Qwen3Config: the fields that differ from the class's own."""
    from transformers import Qwen3Config

    ours = (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
        *("rms_norm_eps", "hidden_act", "attention_bias", "max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters"),
        *("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
    )
    defaults = {**Qwen3Config().to_dict(), "rope_theta": 10_000.0, "rope_parameters": None, "rope_scaling": None, "layer_types": None}
    kept = {name: config[name] for name in ours if name in config and config[name] != defaults[name]}
    return {"model_type": "qwen3", **kept}


def _speculators_name(name: str) -> str:
    if not name.startswith(HEAD):
        return name
    inner = name.removeprefix(HEAD)
    return f"refiner_head.{SPECULATORS_HEAD.get(inner, inner)}"


def _changed(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in {**values, **changes}.items() if value is not ...}


def _save(tensors: dict[str, Tensor], folder: Path, shards: int) -> None:
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for index in range(shards):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name] for name in names[index::shards]}, folder / file)
        weight_map |= dict.fromkeys(names[index::shards], file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index_file = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_file), encoding="utf-8")
