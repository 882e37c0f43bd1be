"""A drafter checkpoint: the xPress serving format, or DFlash, bare or with a Markov head.

Opening checks the config, and names and shapes of all tensors; values are read when a module is asked for. Whether drafter and target
belong together is pairing.py's question.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, replace
from typing import Literal

import torch
from torch import Tensor

from xpress_export.checkpoints.decoder_config import (
    READ_FIELDS,
    read_family,
    refuse_misspelled,
    refuse_unless,
)
from xpress_export.checkpoints.families import FAMILIES, TensorLayout
from xpress_export.checkpoints.licence import read_licence
from xpress_export.checkpoints.locate import Location, locate, shown
from xpress_export.checkpoints.markov import MARKOV_ARCHITECTURES, MARKOV_FIELDS, markov_of_tensors, markov_plan, read_markov
from xpress_export.checkpoints.packing import Packed, check_tensors, expected_tensors, layer_plan, linear, plain, read_plan
from xpress_export.checkpoints.target import identity_of
from xpress_export.checkpoints.tensors import SafetensorsSource, TensorSource
from xpress_export.models.decoder import LayerConfig
from xpress_export.models.drafter import Drafter, DrafterConfig
from xpress_export.models.markov import MarkovConfig, MarkovHead
from xpress_export.models.refiner import Refiner, RefinerConfig
from xpress_export.models.rope import RotaryModules
from xpress_runtime.errors import CheckpointError
from xpress_runtime.fields import Fields
from xpress_runtime.sets import AttentionForm

XPRESS_ARCHITECTURE = "Qwen3XPressModel"
DFLASH_ARCHITECTURE = "DFlashDraftModel"
MAX_BLOCK_SIZE = 256

HEAD = "xpress_head"
IN_PROJECTION = f"{HEAD}.in_proj.weight"
MIX = f"{HEAD}.mix.L"

XPRESS_FIELDS = frozenset(
    ("xpress_rank", "xpress_mlp_hidden", "xpress_block_size", "xpress_num_passes", "xpress_candidate_topc", "xpress_topc")
)
DRAFTER_FIELDS = (
    READ_FIELDS
    | XPRESS_FIELDS
    | MARKOV_FIELDS
    | {"num_target_layers", "block_size", "dflash_config", "sample_from_anchor", "enable_thinking"}
)
DFLASH_FIELDS = frozenset(("mask_token_id", "target_layer_ids", "enable_thinking"))

HeadConfig = RefinerConfig | MarkovConfig


class DrafterCheckpoint:
    """A checked drafter. Of ``refiner`` and ``markov`` the one that it has is set, for bare DFlash neither.

    ``trained_with_thinking`` is None when the checkpoint does not say.
    """

    def __init__(
        self,
        location: Location,
        config: DrafterConfig,
        head: HeadConfig | None,
        tensors: TensorSource,
        licence: str | None,
        trained_with_thinking: bool | None,
    ) -> None:
        self.location = location
        self.config = config
        self.refiner = head if isinstance(head, RefinerConfig) else None
        self.markov = head if isinstance(head, MarkovConfig) else None
        self.licence = licence
        self.trained_with_thinking = trained_with_thinking
        self.tensors = tensors
        self._drafter_plan = drafter_plan(config)
        self._head_plan = refiner_plan(head, tensors.shapes) if head is not None else {}
        folded = folded_tensors(head) if head is not None else {}
        origin = str(location.path)
        if self.refiner is None and any(name.startswith(f"{HEAD}.") for name in tensors.shapes):
            raise CheckpointError(f"{origin} has tensors of a refiner ({HEAD}.…), but config.json has no xpress_rank")
        check_tensors(tensors, expected_tensors(self._drafter_plan, self._head_plan) | folded, origin)

    @property
    def head(self) -> Literal["xpress", "markov"] | None:
        """What corrects the drafter's block."""
        if self.refiner is not None:
            return "xpress"
        return "markov" if self.markov is not None else None

    @property
    def head_rank(self) -> int | None:
        """Width of the head's token tables."""
        head = self.refiner or self.markov
        return None if head is None else head.rank

    def identity(self) -> str:
        """sha256 over the config as we read it and over the tensors."""
        description = {"drafter": asdict(self.config), "refiner": asdict(self.refiner) if self.refiner is not None else None}
        return identity_of(description, self.tensors)

    def drafter(self, num_positions: int, attention_form: AttentionForm, target_embedding_scale: float = 1.0) -> Drafter:
        """The drafter for a target that multiplies its embeddings with a factor."""
        with torch.device("meta"):
            module = Drafter(self.config, num_positions, attention_form, self.config.backbone.embedding_scale / target_embedding_scale)
        # Not part of the state: the tables must be real, whatever the module was built on.
        module.rotary = RotaryModules(module.rotary.ropes, num_positions)
        module.load_state_dict(read_plan(self._drafter_plan, self.tensors), strict=True, assign=True)
        return module

    def refiner_module(self) -> Refiner | MarkovHead:
        """The head that the drafter has; CheckpointError if it has none."""
        if self.refiner is not None:
            with torch.device("meta"):
                refiner = Refiner(self.refiner)
            refiner.load_state_dict(read_plan(self._head_plan, self.tensors) | self._folded(self.refiner.rank), strict=True, assign=True)
            return refiner
        if self.markov is not None:
            with torch.device("meta"):
                head = MarkovHead(self.markov)
            head.load_state_dict(read_plan(self._head_plan, self.tensors), strict=True, assign=True)
            return head
        raise CheckpointError(f"'{self.location.source}' is a bare DFlash drafter without a refiner; only 0 passes can be built")

    def _folded(self, rank: int) -> dict[str, Tensor]:
        """Parameters that are computed from a published tensor, not only laid out."""
        projection = self.tensors.read(IN_PROJECTION).T
        mix = self.tensors.read(MIX).tril_()
        # Slot k gets its own z once more: the residual.
        mix.diagonal(dim1=-2, dim2=-1).add_(1)
        return {
            "in_hidden.weight": projection[: 2 * rank].contiguous(),
            "in_token.weight": projection[2 * rank :].contiguous(),
            "mix": mix,
        }


def open_drafter(reference: str, revision: str | None = None) -> DrafterCheckpoint:
    """Find a drafter and check its config, and names and shapes of all its tensors."""
    location = locate(reference, revision)
    if location.is_gguf:
        raise CheckpointError(f"'{reference}' is a GGUF file; a drafter is a folder with config.json and safetensors")
    fields = Fields.from_file(location.path / "config.json", CheckpointError)
    config, head = read_drafter_config(fields)
    source = SafetensorsSource.from_folder(location.path)
    if head is None and "markov_rank" not in fields:
        head = markov_of_tensors(source.shapes, config.backbone.vocab_size, config.block_size)
    return DrafterCheckpoint(location, config, head, source, read_licence(location.path), _read_thinking(fields))


def read_drafter_config(fields: Fields) -> tuple[DrafterConfig, HeadConfig | None]:
    """The drafter that a config.json describes, and its head: a refiner, a Markov head, or None for bare DFlash."""
    architecture = _check_format(fields)
    has_refiner = architecture == XPRESS_ARCHITECTURE
    config = _read_drafter(fields, may_omit_taps=not has_refiner)
    if has_refiner:
        return config, _read_refiner(fields, config)
    return config, read_markov(fields, architecture, config.backbone.vocab_size, config.block_size)


def drafter_plan(config: DrafterConfig) -> dict[str, Packed]:
    """The backbone's parameters out of the published tensors."""
    hidden = config.backbone.hidden_size
    plan = linear("fc", [("fc", hidden)], len(config.tap_layers) * hidden, bias=False)
    plan |= {"hidden_norm.weight": plain("hidden_norm.weight", hidden), "norm.weight": plain("norm.weight", hidden)}
    for layer in range(config.backbone.num_layers):
        plan |= layer_plan(f"layers.{layer}", f"layers.{layer}", config.backbone, TensorLayout(), packed_qkv=False)
    return plan


def refiner_plan(config: HeadConfig, published: Collection[str] = ()) -> dict[str, Packed]:
    """The head's parameters that are published tensors as they are or transposed; the rest is :func:`folded_tensors`.

    ``published``: names of the checkpoint's tensors, where they are known; a Markov head's have one of two prefixes.
    """
    if isinstance(config, MarkovConfig):
        return markov_plan(config, published)
    rank, hidden = config.rank, config.hidden_size
    gate_up = [(f"{HEAD}.mlp.gate_proj", config.mlp_hidden), (f"{HEAD}.mlp.up_proj", config.mlp_hidden)]
    return {
        "w1": plain(f"{HEAD}.w1.weight", config.vocab_size, rank),
        "w2": plain(f"{HEAD}.w2.weight", config.vocab_size, rank),
        **linear("down_h", [(f"{HEAD}.down_h", rank)], hidden, bias=False),
        **linear("down_g", [(f"{HEAD}.down_g", rank)], hidden, bias=False),
        **linear("mlp.gate_up", gate_up, rank, bias=False),
        **linear("mlp.down", [(f"{HEAD}.mlp.down_proj", rank)], config.mlp_hidden, bias=False),
    }


def default_taps(num_draft_layers: int, num_target_layers: int) -> tuple[int, ...]:
    """Where bare DFlash taps the target when its config does not say: spread from the second layer to the fourth-last boundary."""
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + index * (num_target_layers - 4) / (num_draft_layers - 1)) for index in range(num_draft_layers))


def folded_tensors(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Published tensors that parameters are computed from; a Markov head has none."""
    if isinstance(config, MarkovConfig):
        return {}
    return {IN_PROJECTION: (config.rank, 3 * config.rank), MIX: (config.rank, config.block_size, config.block_size)}


def _check_format(fields: Fields) -> str:
    """The architecture: the xPress serving format, DFlash, or DFlash with a Markov head; anything else is refused by name."""
    if "speculators_model_type" in fields:
        raise CheckpointError(f"{fields.origin}: speculators checkpoints are not supported; give the xPress serving format or bare DFlash")
    architectures = fields.required("architectures")
    known = (XPRESS_ARCHITECTURE, DFLASH_ARCHITECTURE, *MARKOV_ARCHITECTURES)
    if architectures not in [[name] for name in known]:
        named = shown(", ".join(map(str, architectures)) if isinstance(architectures, list) else architectures)
        raise CheckpointError(f"{fields.origin}: architecture {named} is not a drafter, expected {', '.join(known[:-1])} or {known[-1]}")
    architecture: str = architectures[0]
    if (model_type := fields.text("model_type")) != "qwen3":
        raise CheckpointError(f"{fields.origin}: model_type '{shown(model_type)}' of a drafter is not supported, expected qwen3")
    # auto_map is not looked at: published drafters name their own modelling code there, and their architectures are what we implement.
    refuse_misspelled(fields, DRAFTER_FIELDS)
    refuse_unless(fields, "sample_from_anchor", (False,))
    what, others = ("Markov head", MARKOV_FIELDS) if architecture == XPRESS_ARCHITECTURE else ("refiner", XPRESS_FIELDS)
    if found := sorted(name for name in others if name in fields):
        raise CheckpointError(f"{fields.origin}: architecture {architecture} has no {what}, but field '{found[0]}' is given")
    return architecture


def _read_drafter(fields: Fields, *, may_omit_taps: bool) -> DrafterConfig:
    backbone = read_family(fields, FAMILIES["qwen3"])
    # A drafter has neither table; the field is a left-over of the config it was made from.
    backbone = replace(backbone, tied_embeddings=False, layers=tuple(replace(layer, causal=_is_causal(layer)) for layer in backbone.layers))
    num_target_layers = fields.integer("num_target_layers", 1, 1024)
    dflash = fields.nested("dflash_config")
    refuse_misspelled(dflash, DFLASH_FIELDS)
    if may_omit_taps and "target_layer_ids" not in dflash:
        taps = default_taps(backbone.num_layers, num_target_layers)
    else:
        taps = dflash.integers("target_layer_ids")
    if not taps:
        raise CheckpointError(f"{dflash.origin}: field 'target_layer_ids' is empty, expected at least one layer")
    for tap in taps:
        if not 0 <= tap < num_target_layers:
            raise CheckpointError(
                f"{dflash.origin}: target_layer_ids has layer {tap}, expected 0 to {num_target_layers - 1} (num_target_layers - 1)"
            )
    if len(set(taps)) != len(taps):
        raise CheckpointError(f"{dflash.origin}: target_layer_ids {list(taps)} names a layer twice")
    mask_token_id = dflash.integer("mask_token_id")
    if mask_token_id >= backbone.vocab_size:
        raise CheckpointError(f"{dflash.origin}: mask_token_id is {mask_token_id}, expected less than vocab_size ({backbone.vocab_size})")
    return DrafterConfig(
        backbone=backbone,
        block_size=fields.integer("block_size", 2, MAX_BLOCK_SIZE),
        mask_token_id=mask_token_id,
        tap_layers=taps,
        num_target_layers=num_target_layers,
    )


def _is_causal(layer: LayerConfig) -> bool:
    """Rows of a block see each other, but in layers with a window each sees only what stands before it."""
    return layer.window is not None


def _read_refiner(fields: Fields, config: DrafterConfig) -> RefinerConfig:
    block_size = fields.integer("xpress_block_size", 2, MAX_BLOCK_SIZE)
    if block_size != config.block_size:
        raise CheckpointError(f"{fields.origin}: xpress_block_size is {block_size}, but block_size is {config.block_size}")
    num_passes = fields.integer("xpress_num_passes", 1)
    if num_passes > block_size - 1:
        raise CheckpointError(
            f"{fields.origin}: xpress_num_passes is {num_passes}, expected at most {block_size - 1} (block size - 1 settles every slot)"
        )
    vocab_size = config.backbone.vocab_size
    shortlists = {fields.integer(name, 0, vocab_size) for name in ("xpress_candidate_topc", "xpress_topc") if name in fields}
    if len(shortlists) > 1:
        raise CheckpointError(
            f"{fields.origin}: xpress_candidate_topc and xpress_topc differ ({' and '.join(map(str, sorted(shortlists)))})"
        )
    return RefinerConfig(
        hidden_size=config.backbone.hidden_size,
        vocab_size=vocab_size,
        rank=fields.integer("xpress_rank", 1, 2**16),
        mlp_hidden=fields.integer("xpress_mlp_hidden", 1, 2**18),
        block_size=block_size,
        num_passes=num_passes,
        shortlist=shortlists.pop() if shortlists else 0,
    )


def _read_thinking(fields: Fields) -> bool | None:
    """No published checkpoint says it yet; where one does, the field is named as chat templates name the switch."""
    for place in (fields.nested("dflash_config"), fields):
        if "enable_thinking" in place:
            return place.boolean("enable_thinking")
    return None
