"""config.json in the serving format: an xPress drafter, or DFlash, bare or with a Markov head.

Fields of the drafter itself stand in ``dflash_config`` or beside it. Knows nothing about tensors, except that a Markov head may be told by
its tables alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from xpress_export.checkpoints.decoder_config import READ_FIELDS, read_family, refuse_misspelled, refuse_unless
from xpress_export.checkpoints.families import FAMILIES
from xpress_export.checkpoints.formats.description import (
    DFLASH_ARCHITECTURE,
    MARKOV_ARCHITECTURES,
    XPRESS_ARCHITECTURE,
    DrafterDescription,
    HeadConfig,
    check_taps,
    read_draft_vocab_size,
    read_mask_token_id,
)
from xpress_export.checkpoints.locate import shown
from xpress_export.checkpoints.markov import MARKOV_FIELDS, markov_of_tensors, markov_prefix, read_markov
from xpress_export.models.decoder import DecoderConfig, LayerConfig
from xpress_export.models.drafter import DrafterConfig
from xpress_export.models.refiner import AnchorPredecessor, RefinerConfig
from xpress_runtime.errors import CheckpointError
from xpress_runtime.fields import Fields

MAX_BLOCK_SIZE = 256
PREDECESSORS: tuple[AnchorPredecessor, ...] = ("previous", "anchor")

XPRESS_FIELDS = frozenset(
    ("xpress_rank", "xpress_mlp_hidden", "xpress_block_size", "xpress_num_passes", "xpress_candidate_topc", "xpress_topc")
)
# Fields that stand in dflash_config or beside it.
EITHER_PLACE = frozenset(
    (
        *("mask_token_id", "target_layer_ids", "block_size", "enable_thinking", "anchor_predecessor"),
        *("input_embedding_scale", "output_multiplier", "final_logit_softcapping"),
    )
)
# xpress_fused_kernel chooses how a server computes the same numbers.
DRAFTER_FIELDS = (
    READ_FIELDS
    | XPRESS_FIELDS
    | MARKOV_FIELDS
    | EITHER_PLACE
    | {"num_target_layers", "dflash_config", "sample_from_anchor", "draft_vocab_size", "xpress_fused_kernel"}
)
# What a drafter's own backbone may say beyond its family.
BACKBONE = replace(FAMILIES["qwen3"], own_fields=frozenset({"is_causal", "final_logit_softcapping"}))

REFUSED_ARCHITECTURES = {
    "DFlash2DraftModel": "its dynamic convolutions and its selector of candidates are not described yet",
}


def describe_serving(fields: Fields, shapes: Mapping[str, tuple[int, ...]] | None = None) -> DrafterDescription:
    """The drafter of a config.json; ``shapes`` of its tensors where they are known. Raises CheckpointError."""
    architecture = _check_architecture(fields)
    has_refiner = architecture == XPRESS_ARCHITECTURE
    drafter = _Places(fields)
    config = _read_drafter(fields, drafter, may_omit_taps=not has_refiner)
    head: HeadConfig | None
    if has_refiner:
        head = _read_refiner(fields, drafter, config)
    else:
        head = read_markov(fields, architecture, config.backbone.vocab_size, config.block_size)
        if head is None and "markov_rank" not in fields and shapes is not None:
            head = markov_of_tensors(shapes, config.backbone.vocab_size, config.block_size)
    prefix = markov_prefix(shapes or ())
    return DrafterDescription(
        format="xPress serving format" if has_refiner else "bare DFlash" if head is None else "DFlash with a Markov head",
        config=config,
        head=head,
        # No published checkpoint says it yet; where one does, the field is named as chat templates name the switch.
        trained_with_thinking=drafter.of("enable_thinking").boolean("enable_thinking") if "enable_thinking" in drafter else None,
        serving_config=fields.values,
        sources={name: name for name in fields},
        published=lambda name: prefix + name if name.startswith("markov_") else name,
        may_have_head="draft_vocab_size" in fields,
    )


def default_taps(num_draft_layers: int, num_target_layers: int) -> tuple[int, ...]:
    """Where bare DFlash taps the target when its config does not say: spread from the second layer to the fourth-last boundary."""
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + index * (num_target_layers - 4) / (num_draft_layers - 1)) for index in range(num_draft_layers))


def with_causality(backbone: DecoderConfig, *, causal: bool | None) -> DecoderConfig:
    """A drafter's backbone. ``causal`` says whether rows of a block see only what stands before them; None: in layers with a window."""

    def seen(layer: LayerConfig) -> LayerConfig:
        return replace(layer, causal=layer.window is not None if causal is None else causal)

    # A drafter has no tables to tie; the field is a left-over of the config it was made from.
    return replace(backbone, tied_embeddings=False, layers=tuple(seen(layer) for layer in backbone.layers))


def _check_architecture(fields: Fields) -> str:
    """The architecture: the xPress serving format, DFlash, or DFlash with a Markov head; anything else is refused by name."""
    architectures = fields.required("architectures")
    known = (XPRESS_ARCHITECTURE, DFLASH_ARCHITECTURE, *MARKOV_ARCHITECTURES)
    if architectures not in [[name] for name in known]:
        named = shown(", ".join(map(str, architectures)) if isinstance(architectures, list) else architectures)
        if named in REFUSED_ARCHITECTURES:
            raise CheckpointError(f"{fields.origin}: architecture {named} is not supported: {REFUSED_ARCHITECTURES[named]}")
        raise CheckpointError(f"{fields.origin}: architecture {named} is not a drafter, expected {', '.join(known[:-1])} or {known[-1]}")
    architecture: str = architectures[0]
    if (model_type := fields.text("model_type")) != "qwen3":
        raise CheckpointError(f"{fields.origin}: model_type '{shown(model_type)}' of a drafter is not supported, expected qwen3")
    # auto_map is not looked at: published drafters name their own modelling code there, and their architectures are what we implement.
    refuse_misspelled(fields, DRAFTER_FIELDS)
    refuse_unless(fields, "sample_from_anchor", (False,))
    if "sliding_window_non_causal" in fields:
        raise CheckpointError(
            f"{fields.origin}: field 'sliding_window_non_causal' is read in speculators configs alone; here is_causal says it"
        )
    what, others = ("Markov head", MARKOV_FIELDS) if architecture == XPRESS_ARCHITECTURE else ("refiner", XPRESS_FIELDS)
    if found := sorted(name for name in others if name in fields):
        raise CheckpointError(f"{fields.origin}: architecture {architecture} has no {what}, but field '{found[0]}' is given")
    return architecture


class _Places:
    """Where the fields of :data:`EITHER_PLACE` stand: in dflash_config or beside it. In both only where the two agree."""

    def __init__(self, fields: Fields) -> None:
        nested = "dflash_config" in fields
        self._beside = fields
        # Where there is none, a missing field is missing there: that is where it belongs.
        self._dflash = fields.nested("dflash_config") if nested else Fields({}, f"{fields.origin}: dflash_config", CheckpointError)
        refuse_misspelled(self._dflash, EITHER_PLACE)
        for name in self._dflash:
            if name in DRAFTER_FIELDS - EITHER_PLACE and name in self._dflash:
                raise CheckpointError(f"{self._dflash.origin}: field '{name}' is read beside dflash_config, not in it; move it there")
        for name in sorted(EITHER_PLACE):
            if name in self._dflash and name in fields and fields.values[name] != self._dflash.values[name]:
                raise CheckpointError(
                    f"{fields.origin}: field '{name}' is {shown(fields.values[name])}, but in dflash_config it is "
                    f"{shown(self._dflash.values[name])}; remove the one that is stale"
                )

    def __contains__(self, name: str) -> bool:
        return name in self._dflash or name in self._beside

    def of(self, name: str) -> Fields:
        """The object that holds a field."""
        if name in self._beside and name not in self._dflash:
            return self._beside
        # A block size was always beside.
        return self._beside if name == "block_size" and name not in self._dflash else self._dflash


def _read_drafter(fields: Fields, drafter: _Places, *, may_omit_taps: bool) -> DrafterConfig:
    backbone = _read_backbone(fields, drafter)
    num_target_layers = fields.integer("num_target_layers", 1, 1024) if "num_target_layers" in fields else None
    if "target_layer_ids" in drafter or not may_omit_taps:
        taps = drafter.of("target_layer_ids").integers("target_layer_ids")
    elif num_target_layers is None:
        raise CheckpointError(
            f"{fields.origin}: neither target_layer_ids nor num_target_layers is given, so which layers to tap is not known; "
            "add target_layer_ids to dflash_config"
        )
    else:
        taps = default_taps(backbone.num_layers, num_target_layers)
    check_taps(drafter.of("target_layer_ids").origin, "target_layer_ids", taps, num_target_layers)
    return DrafterConfig(
        backbone=backbone,
        block_size=drafter.of("block_size").integer("block_size", 2, MAX_BLOCK_SIZE),
        mask_token_id=read_mask_token_id(drafter.of("mask_token_id"), backbone.vocab_size),
        tap_layers=taps,
        num_target_layers=num_target_layers,
        draft_vocab_size=read_draft_vocab_size(fields, backbone.vocab_size),
    )


def _read_backbone(fields: Fields, drafter: _Places) -> DecoderConfig:
    cap = "final_logit_softcapping"
    others = Fields({name: value for name, value in fields.values.items() if name != cap}, fields.origin, CheckpointError)
    backbone = replace(
        read_family(others, BACKBONE),
        embedding_scale=_factor(drafter, "input_embedding_scale"),
        logit_scale=_factor(drafter, "output_multiplier"),
        logit_cap=_cap(drafter.of(cap), cap) if cap in drafter else None,
    )
    return with_causality(backbone, causal=fields.boolean("is_causal") if "is_causal" in fields else None)


def _factor(drafter: _Places, name: str) -> float:
    return drafter.of(name).number(name, 1e-6, 1e6) if name in drafter else 1.0


def _cap(fields: Fields, name: str) -> float | None:
    """A bound of logits; 0 means none."""
    return fields.number(name, 1e-3, 1e6) if fields.values[name] != 0 else None


def _read_refiner(fields: Fields, drafter: _Places, config: DrafterConfig) -> RefinerConfig:
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
        anchor_predecessor=_read_predecessor(drafter),
    )


def _read_predecessor(drafter: _Places) -> AnchorPredecessor:
    name = "anchor_predecessor"
    chosen = drafter.of(name).choice(name, PREDECESSORS) if name in drafter else PREDECESSORS[0]
    return "anchor" if chosen == "anchor" else "previous"
