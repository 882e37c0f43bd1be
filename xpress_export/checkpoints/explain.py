"""What a checkpoint is, for people and programs that have not built it yet: target or drafter, its format, sizes and layers, and whether it
can be built.

It reads configs and the names and shapes of tensors; values only for an identity. Of a hub id config.json alone is fetched, unless the
identity is wanted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xpress_export.checkpoints.config_only import open_drafter_config, open_target_config
from xpress_export.checkpoints.drafter import DrafterCheckpoint, open_drafter
from xpress_export.checkpoints.formats.description import DFLASH_ARCHITECTURE, MARKOV_ARCHITECTURES, XPRESS_ARCHITECTURE
from xpress_export.checkpoints.formats.serving import REFUSED_ARCHITECTURES
from xpress_export.checkpoints.formats.speculators import KIND, SIZES
from xpress_export.checkpoints.licence import MAX_BYTES, read_licence
from xpress_export.checkpoints.locate import CONFIG_FILE, TRAINING_SUFFIXES, Location, locate, shown
from xpress_export.checkpoints.pairing import check_pairing
from xpress_export.checkpoints.target import TargetCheckpoint, open_target
from xpress_export.models.decoder import DecoderConfig, LayerConfig
from xpress_runtime.errors import CheckpointError, OptionError, PairingError
from xpress_runtime.fields import Fields

_DRAFTERS = (XPRESS_ARCHITECTURE, DFLASH_ARCHITECTURE, *MARKOV_ARCHITECTURES, *REFUSED_ARCHITECTURES)
_BASE_MODEL = re.compile(r"^base_model:[ \t]*([^\s\[]+)[ \t]*$|^base_model:[ \t]*\n[ \t]*-[ \t]*(\S+)[ \t]*$", re.MULTILINE)
_STATED = ("model_type", "hidden_size", "vocab_size", "num_hidden_layers", "num_target_layers", "block_size")


@dataclass(frozen=True)
class Explanation:
    """``kind`` is target or drafter. ``problem`` says in one line why it cannot be built, ``mismatch`` why not with a given target.

    ``facts`` are JSON values by name: all that is known where it can be built, else what the config states.
    """

    kind: str
    source: str
    revision: str | None
    licence: str | None
    problem: str | None
    config_alone: bool
    facts: Mapping[str, Any]
    target: str | None = None
    mismatch: str | None = None
    layers: tuple[LayerConfig, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """One object; the pairing is in it only where a target was given."""
        pairing = (
            {} if self.target is None else {"pairing": {"target": self.target, "fits": self.mismatch is None, "reason": self.mismatch}}
        )
        return {
            "kind": self.kind,
            "source": self.source,
            "revision": self.revision,
            "licence": self.licence,
            "can_be_built": self.problem is None,
            "reason": self.problem,
            "judged_by": "config.json" if self.config_alone else "config.json and the names and shapes of all tensors",
            **self.facts,
            **pairing,
        }


def explain(
    reference: str,
    revision: str | None = None,
    *,
    with_identity: bool = False,
    target: str | None = None,
    target_revision: str | None = None,
) -> Explanation:
    """Find a checkpoint and say what it is; with ``target`` also whether the two fit.

    A checkpoint that cannot be built is explained, too. Raises CheckpointError where there is none, and OptionError where a target is given
    for a target.
    """
    try:
        path = Path(reference).expanduser()
    except RuntimeError as unknown:
        raise CheckpointError(f"'{shown(reference)}' cannot be opened: {unknown}") from None
    config_alone = not with_identity and (not path.exists() or (path.suffix == ".json" and path.is_file()))
    location = locate(reference, revision, config_only=config_alone, training_files=not config_alone)
    stated = _stated(location)
    is_drafter = _is_drafter(location, stated)
    if target is not None and not is_drafter:
        raise OptionError(f"--target is for drafters, and '{reference}' is a target itself; leave it out")
    checkpoint: TargetCheckpoint | DrafterCheckpoint | None = None
    problem = None
    try:
        if is_drafter:
            checkpoint = open_drafter_config(reference, revision) if config_alone else open_drafter(reference, revision)
        else:
            checkpoint = open_target_config(reference, revision) if config_alone else open_target(reference, revision)
    except CheckpointError as found:
        problem = str(found)
    mismatch = None
    if target is not None and isinstance(checkpoint, DrafterCheckpoint):
        opened = open_target_config(target, target_revision) if config_alone else open_target(target, target_revision)
        try:
            check_pairing(opened, checkpoint)
        except PairingError as found:
            mismatch = str(found)
    elif target is not None:
        mismatch = f"the drafter cannot be built: {problem}"
    if checkpoint is None:
        facts = _stated_facts(stated)
    elif isinstance(checkpoint, DrafterCheckpoint):
        facts = _drafter_facts(checkpoint, _named_target(location.folder, stated))
    else:
        facts = _target_facts(checkpoint)
    if with_identity:
        facts["identity"] = checkpoint.identity() if checkpoint is not None else None
    return Explanation(
        kind="drafter" if is_drafter else "target",
        source=reference,
        revision=location.revision,
        licence=checkpoint.licence if checkpoint is not None and checkpoint.licence else read_licence(location.folder),
        problem=problem,
        config_alone=config_alone,
        facts=facts,
        target=target,
        mismatch=mismatch,
        layers=_backbone(checkpoint).layers if checkpoint is not None else (),
    )


def _stated(location: Location) -> Mapping[str, Any]:
    """The values of config.json; empty for a file that has none. CheckpointError where nothing says that this is a checkpoint."""
    path = location.path
    if location.is_gguf or location.is_training_file:
        magic = b"GGUF" if location.is_gguf else b"PK"
        try:
            with path.open("rb") as file:
                known = file.read(len(magic)) == magic
        except OSError as problem:
            raise CheckpointError(f"{path} cannot be read: {problem.strerror}") from None
        if not known:
            raise CheckpointError(f"{path} is damaged or no {path.suffix} file; fetch it again")
        beside = location.folder / CONFIG_FILE
        return {} if location.is_gguf or not beside.exists() else Fields.from_file(beside, CheckpointError).values
    fields = Fields.from_file(path if path.is_file() else path / CONFIG_FILE, CheckpointError)
    if not any(name in fields for name in ("model_type", "architectures", KIND)):
        raise CheckpointError(f"{fields.origin} describes no model: it has neither model_type nor architectures")
    return fields.values


def _is_drafter(location: Location, stated: Mapping[str, Any]) -> bool:
    architectures = stated.get("architectures")
    named = architectures if isinstance(architectures, list) else []
    training = location.is_training_file or (
        location.path.is_dir() and any(path.suffix in TRAINING_SUFFIXES for path in location.path.iterdir()) and "dflash_config" in stated
    )
    return training or KIND in stated or "dflash_config" in stated or any(name in _DRAFTERS for name in named)


def _backbone(checkpoint: TargetCheckpoint | DrafterCheckpoint) -> DecoderConfig:
    return checkpoint.config.backbone if isinstance(checkpoint, DrafterCheckpoint) else checkpoint.config


def _stated_facts(stated: Mapping[str, Any]) -> dict[str, Any]:
    """What a config says of a model that cannot be built, unchecked."""
    sizes = stated[SIZES] if isinstance(stated.get(SIZES), dict) else {}
    both = {**sizes, **stated}
    facts: dict[str, Any] = {
        name: shown(both[name]) if isinstance(both[name], str) else both[name] for name in _STATED if isinstance(both.get(name), int | str)
    }
    architectures = stated.get("architectures")
    if isinstance(architectures, list):
        facts["architectures"] = [shown(name) for name in architectures[:4]]
    return {"stated": facts}


def _decoder_facts(config: DecoderConfig) -> dict[str, Any]:
    return {
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_layers": config.num_layers,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "max_positions": config.max_positions,
        "layers": [_layer_facts(layer) for layer in config.layers],
        "attention_scale": config.attention_scale,
        "attention_cap": config.attention_cap,
        "logit_cap": config.logit_cap,
        "logit_scale": config.logit_scale,
        "embedding_scale": config.embedding_scale,
        "residual_scale": config.residual_scale,
    }


def _layer_facts(layer: LayerConfig) -> dict[str, Any]:
    rope = None
    if layer.rope is not None:
        rope = {"type": layer.rope.rope_type, "theta": layer.rope.theta, "rotary_dim": layer.rope.rotary_dim}
    return {"window": layer.window, "causal": layer.causal, "rope": rope}


def _target_facts(target: TargetCheckpoint) -> dict[str, Any]:
    return {
        "format": "GGUF" if target.location.is_gguf else "Hugging Face",
        "family": target.model_type,
        **_decoder_facts(target.config),
        "tied_embeddings": target.config.tied_embeddings,
        "engines": target.config.attention_cap is None,
        "fp16": target.beyond_fp16 is None,
        "stop_token_ids": list(target.eos_token_ids),
    }


def _drafter_facts(drafter: DrafterCheckpoint, target: str | None) -> dict[str, Any]:
    config, refiner, markov = drafter.config, drafter.refiner, drafter.markov
    head: dict[str, Any] | None = None
    if refiner is not None:
        head = {
            "kind": "xpress",
            "rank": refiner.rank,
            "mlp_hidden": refiner.mlp_hidden,
            "num_passes": refiner.num_passes,
            "shortlist": refiner.shortlist,
            "anchor_predecessor": refiner.anchor_predecessor,
        }
    elif markov is not None:
        head = {"kind": "markov", "rank": markov.rank}
    return {
        "format": drafter.format,
        "family": "qwen3",
        **_decoder_facts(config.backbone),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "tap_layers": list(config.tap_layers),
        "head": head,
        "draft_vocab_size": config.draft_vocab_size,
        "has_own_head": drafter.has_own_head,
        "trained_with_thinking": drafter.trained_with_thinking,
        "target": {
            "name": target,
            "hidden_size": config.backbone.hidden_size,
            "vocab_size": config.backbone.vocab_size,
            "num_layers": config.num_target_layers,
            "min_num_layers": max(config.tap_layers) + 1,
        },
    }


def _named_target(folder: Path, stated: Mapping[str, Any]) -> str | None:
    """The target's name where the checkpoint gives one: speculators' verifier, or the model card's base model."""
    verifier: Any = stated
    for name in ("speculators_config", "verifier", "name_or_path"):
        verifier = verifier.get(name) if isinstance(verifier, dict) else None
    if isinstance(verifier, str) and verifier:
        return shown(verifier)
    try:
        with (folder / "README.md").open("rb") as file:
            card = file.read(MAX_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return None
    front = card.split("\n---", 1)[0] if card.startswith("---") else ""
    match = _BASE_MODEL.search(front)
    return shown((match[1] or match[2]).strip("'\"")) if match else None
