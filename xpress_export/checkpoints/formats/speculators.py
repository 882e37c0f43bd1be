"""config.json of the speculators library: xPress, DFlash, or DSpark drafters that draft behind the anchor.

It counts layers from the embedding on and leaves out sizes that are the Qwen3 class's own. Fields that concern training alone are ignored.
Knows the names of tensors, not the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xpress_export.checkpoints.decoder_config import READ_FIELDS, read_family, refuse_misspelled, refuse_unless
from xpress_export.checkpoints.families import FAMILIES
from xpress_export.checkpoints.formats.description import (
    DFLASH_ARCHITECTURE,
    OWN_EMBEDDING,
    XPRESS_ARCHITECTURE,
    DrafterDescription,
    HeadConfig,
    check_taps,
    read_draft_vocab_size,
    read_mask_token_id,
)
from xpress_export.checkpoints.formats.serving import MAX_BLOCK_SIZE, with_causality
from xpress_export.checkpoints.locate import shown
from xpress_export.checkpoints.markov import MARKOV_FIELDS, MAX_RANK, markov_prefix
from xpress_export.checkpoints.rope_config import FULL, SLIDING
from xpress_export.models.decoder import DecoderConfig
from xpress_export.models.drafter import DrafterConfig
from xpress_export.models.markov import MarkovConfig
from xpress_export.models.refiner import RefinerConfig
from xpress_runtime.errors import CheckpointError
from xpress_runtime.fields import Fields

KIND = "speculators_model_type"
KINDS = ("xpress", "dflash", "dspark")
SIZES = "transformer_layer_config"

DEFAULT_BLOCK_SIZE, DEFAULT_RANK, DEFAULT_MLP_RATIO, DEFAULT_PASSES = 8, 256, 2, 6

# What the library leaves out because transformers' Qwen3Config has it too, and what a config.json must say.
QWEN3_SIZES: Mapping[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
# Fields of the sizes that mean the same in the serving format.
SHARED_FIELDS = (
    *(*QWEN3_SIZES, "num_key_value_heads", "head_dim", "rms_norm_eps", "hidden_act", "attention_bias"),
    *("max_position_embeddings", "original_max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters"),
    *("use_sliding_window", "sliding_window", "max_window_layers"),
)

OWN_FIELDS = MARKOV_FIELDS | {
    *(KIND, SIZES, "block_size", "aux_hidden_state_layer_ids", "mask_token_id", "draft_vocab_size", "target_hidden_size"),
    *("xpress_rank", "xpress_mlp_ratio", "num_jacobi_passes", "sample_from_anchor", "sliding_window_non_causal"),
    *("projector_type", "shift_label"),
}

# Fields of the serving format that would change drafts, and have no place here.
SERVING_ONLY = (
    *("dflash_config", "anchor_predecessor", "input_embedding_scale", "output_multiplier", "final_logit_softcapping", "is_causal"),
    *("enable_thinking", "num_target_layers", "xpress_mlp_hidden", "xpress_block_size", "xpress_num_passes"),
    *("xpress_candidate_topc", "xpress_topc"),
)
# Switches of other drafters of the library.
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm")

# Names of the head's tensors here, by those of the serving format.
REFINER_NAMES: Mapping[str, str] = {
    "xpress_head.w1.weight": "refiner_head.token_embed.weight",
    "xpress_head.w2.weight": "refiner_head.readout.weight",
    "xpress_head.mix.L": "refiner_head.mix_l",
    **{f"xpress_head.{name}.weight": f"refiner_head.{name}.weight" for name in ("down_h", "down_g", "in_proj")},
    **{f"xpress_head.mlp.{name}_proj.weight": f"refiner_head.mlp_{name}.weight" for name in ("gate", "up", "down")},
}
# Judges how far a block may be trusted; drafts do not depend on it.
CONFIDENCE_HEAD = "confidence_head."
# Copies of the target's tables that training needed.
IGNORED = frozenset({OWN_EMBEDDING, "verifier_norm.weight", "verifier_lm_head.weight"})


def describe_speculators(fields: Fields, shapes: Mapping[str, tuple[int, ...]] | None = None) -> DrafterDescription:
    """The drafter of a speculators config.json; ``shapes`` of its tensors where they are known. Raises CheckpointError."""
    kind = _check_kind(fields)
    if SIZES not in fields:
        raise CheckpointError(f"{fields.origin}: {KIND} is '{kind}', but field '{SIZES}', which has the sizes, is missing")
    given = fields.nested(SIZES)
    sizes = Fields({**QWEN3_SIZES, **given.values}, given.origin, CheckpointError)
    config = _read_drafter(fields, sizes)
    head: HeadConfig | None = None
    if kind == "xpress":
        head = _read_refiner(fields, config)
    elif kind == "dspark":
        head = _read_markov(fields, config)
    notes: tuple[str, ...] = ()
    if isinstance(head, RefinerConfig) and "num_jacobi_passes" in fields and fields.values["num_jacobi_passes"] != head.num_passes:
        given_passes = fields.values["num_jacobi_passes"]
        notes = (f"num_jacobi_passes is {given_passes}; {head.num_passes} settle every slot and are taken",)
    prefix = markov_prefix(shapes or ())
    serving_config, sources = _serving_config(fields, given, config, head)
    return DrafterDescription(
        format=f"speculators {kind}",
        config=config,
        head=head,
        trained_with_thinking=None,
        serving_config=serving_config,
        sources=sources,
        published=lambda name: prefix + name if name.startswith("markov_") else REFINER_NAMES.get(name, name),
        may_have_head=True,
        ignored=IGNORED | {name for name in shapes or () if kind == "dspark" and name.startswith(CONFIDENCE_HEAD)},
        notes=notes,
    )


def _check_kind(fields: Fields) -> str:
    kind = fields.required(KIND)
    if kind not in KINDS:
        raise CheckpointError(f"{fields.origin}: {KIND} '{shown(kind)}' is not supported, expected {', '.join(KINDS)}")
    refuse_misspelled(fields, OWN_FIELDS)
    for name in SERVING_ONLY:
        if name in fields:
            raise CheckpointError(
                f"{fields.origin}: field '{name}' is not read in a speculators config; convert the drafter and set it in the serving format"
            )
    for name in NORMS:
        refuse_unless(fields, name, (False,))
    projector = fields.values.get("projector_type")
    if projector == "domino":
        raise CheckpointError(
            f"{fields.origin}: projector_type is 'domino', whose recurrent correction of a block is not described yet; expected dflash"
        )
    refuse_unless(fields, "projector_type", ("dflash",))
    refuse_unless(fields, "shift_label", (False,))
    if fields.values.get("sample_from_anchor") is True or (kind == "dspark" and "sample_from_anchor" not in fields):
        given = "true" if "sample_from_anchor" in fields else "absent"
        raise CheckpointError(
            f"{fields.origin}: sample_from_anchor is {given}: such a drafter predicts a token in every slot, the anchor's too, which is "
            "not supported; expected false"
        )
    refuse_unless(fields, "sample_from_anchor", (False,))
    return str(kind)


def _read_drafter(fields: Fields, sizes: Fields) -> DrafterConfig:
    if sizes.values.get("model_type") not in (None, "qwen3"):
        named = shown(sizes.values["model_type"])
        raise CheckpointError(f"{sizes.origin}: model_type '{named}' of a drafter is not supported, expected qwen3")
    refuse_misspelled(sizes, READ_FIELDS)
    non_causal = "sliding_window_non_causal" in fields and fields.boolean("sliding_window_non_causal")
    backbone = with_causality(read_family(sizes, FAMILIES["qwen3"]), causal=False if non_causal else None)
    refuse_unless(fields, "target_hidden_size", (backbone.hidden_size,))
    taps = _read_taps(fields)
    if "mask_token_id" not in fields:
        raise CheckpointError(
            f"{fields.origin}: field 'mask_token_id' is missing or null; it must say which token stands in the slots to be drafted"
        )
    return DrafterConfig(
        backbone=backbone,
        block_size=fields.integer("block_size", 2, MAX_BLOCK_SIZE) if "block_size" in fields else DEFAULT_BLOCK_SIZE,
        mask_token_id=read_mask_token_id(fields, backbone.vocab_size),
        tap_layers=taps,
        num_target_layers=None,
        draft_vocab_size=read_draft_vocab_size(fields, backbone.vocab_size),
    )


def _read_taps(fields: Fields) -> tuple[int, ...]:
    """0-based layers. The library counts hidden states, of which number 0 is the embedding."""
    name = "aux_hidden_state_layer_ids"
    numbers = fields.integers(name, 0, 1024)
    if 0 in numbers:
        raise CheckpointError(
            f"{fields.origin}: {name} {list(numbers)} has 0, which is the embedding and no layer; only outputs of layers (from 1 on) "
            "are tapped"
        )
    check_taps(fields.origin, name, numbers, None)
    return tuple(number - 1 for number in numbers)


def _read_refiner(fields: Fields, config: DrafterConfig) -> RefinerConfig:
    rank = fields.integer("xpress_rank", 1, MAX_RANK) if "xpress_rank" in fields else DEFAULT_RANK
    ratio = fields.number("xpress_mlp_ratio", 1e-3, 64) if "xpress_mlp_ratio" in fields else DEFAULT_MLP_RATIO
    num_passes = fields.integer("num_jacobi_passes", 1) if "num_jacobi_passes" in fields else DEFAULT_PASSES
    mlp_hidden = int(rank * ratio)
    if mlp_hidden < 1:
        raise CheckpointError(f"{fields.origin}: xpress_mlp_ratio is {ratio:g}, which leaves an MLP of rank {rank} no width")
    return RefinerConfig(
        hidden_size=config.backbone.hidden_size,
        vocab_size=config.backbone.vocab_size,
        rank=rank,
        mlp_hidden=mlp_hidden,
        block_size=config.block_size,
        # More than block size - 1 settle nothing more.
        num_passes=min(num_passes, config.block_size - 1),
        shortlist=0,
    )


def _read_markov(fields: Fields, config: DrafterConfig) -> MarkovConfig | None:
    refuse_unless(fields, "markov_head_type", ("vanilla",))
    rank = fields.integer("markov_rank", 0, MAX_RANK) if "markov_rank" in fields else 0
    return MarkovConfig(config.backbone.vocab_size, rank, config.block_size) if rank else None


def _serving_config(fields: Fields, given: Fields, config: DrafterConfig, head: HeadConfig | None) -> tuple[dict[str, Any], dict[str, str]]:
    """The same drafter as a config.json of the serving format, and where each field came from."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}

    def put(source: str, **entries: Any) -> None:
        values.update(entries)
        sources.update(dict.fromkeys(entries, source))

    def named(field: str, default: object) -> str:
        return field if field in fields else f"the default of {field} ({default})"

    architecture = XPRESS_ARCHITECTURE if isinstance(head, RefinerConfig) else DFLASH_ARCHITECTURE
    put(KIND, architectures=[architecture], model_type="qwen3")
    for name in ("dtype", "torch_dtype"):
        if isinstance(fields.values.get(name), str):
            put(name, dtype=fields.values[name])
    defaults = {**QWEN3_SIZES, **_assumed(config.backbone)}
    for name in SHARED_FIELDS:
        if name in given.values:
            put(f"{SIZES}.{name}", **{name: given.values[name]})
        elif name in defaults:
            put("the default of Qwen3Config", **{name: defaults[name]})
    kinds = [FULL if layer.window is None else SLIDING for layer in config.backbone.layers]
    put(f"{SIZES}.layer_types" if "layer_types" in given else f"the windows of {SIZES}", layer_types=kinds)
    if "sliding_window_non_causal" in fields and fields.boolean("sliding_window_non_causal"):
        put("sliding_window_non_causal", is_causal=False)
    put(named("block_size", DEFAULT_BLOCK_SIZE), block_size=config.block_size)
    dflash = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.tap_layers)}
    put("mask_token_id, and aux_hidden_state_layer_ids less one", dflash_config=dflash)
    put("the library's only form that is read", sample_from_anchor=False)
    if isinstance(head, RefinerConfig):
        put(named("xpress_rank", DEFAULT_RANK), xpress_rank=head.rank)
        put(f"xpress_rank times {named('xpress_mlp_ratio', DEFAULT_MLP_RATIO)}", xpress_mlp_hidden=head.mlp_hidden)
        put(named("block_size", DEFAULT_BLOCK_SIZE), xpress_block_size=head.block_size)
        put(named("num_jacobi_passes", DEFAULT_PASSES), xpress_num_passes=head.num_passes)
    elif head is not None:
        put("markov_rank", markov_rank=head.rank)
        put("markov_head_type", markov_head_type="vanilla")
    return values, sources


def _assumed(backbone: DecoderConfig) -> dict[str, Any]:
    """Fields that a config.json of the serving format usually says although they may be absent."""
    rotary = next(layer.rope for layer in backbone.layers if layer.rope is not None)
    return {
        "num_key_value_heads": backbone.num_kv_heads,
        "head_dim": backbone.head_dim,
        "rms_norm_eps": backbone.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": backbone.qkv_bias,
        "max_position_embeddings": rotary.max_positions,
        "rope_theta": rotary.theta,
    }
