"""Sizes of a drafter, from the settings and the target where the settings are silent, and its config.json in the serving format.

Knows the configs of targets and drafters; knows nothing of weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from examples.distill.settings import DrafterSettings
from xpress_export.checkpoints.formats.serving import default_taps, describe_serving
from xpress_export.models.decoder import DecoderConfig
from xpress_runtime.errors import OptionError
from xpress_runtime.fields import Fields
from xpress_runtime.fit import THINKING

# The published checkpoints'.
_DEFAULT_PASSES = 6


@dataclass(frozen=True)
class Sizes:
    """Everything that the shapes of a drafter's tensors depend on, its rotary base, and whether it saw answers that think."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_target_layers: int
    tap_layers: tuple[int, ...]
    block_size: int
    mask_token_id: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    refiner_rank: int
    refiner_mlp_hidden: int
    num_passes: int
    markov_rank: int
    thinking: bool | None

    def serving_config(self) -> dict[str, Any]:
        """The config.json of the serving format: xPress, DFlash with a Markov head, or bare DFlash."""
        head: dict[str, Any] = {}
        architecture = "DFlashDraftModel"
        if self.refiner_rank:
            architecture = "Qwen3XPressModel"
            head = {
                "xpress_rank": self.refiner_rank,
                "xpress_mlp_hidden": self.refiner_mlp_hidden,
                "xpress_block_size": self.block_size,
                "xpress_num_passes": self.num_passes,
            }
        elif self.markov_rank:
            head = {"markov_rank": self.markov_rank, "markov_head_type": "vanilla"}
        thinking = {} if self.thinking is None else {THINKING: self.thinking}
        return {
            "architectures": [architecture],
            "model_type": "qwen3",
            "dtype": "float16",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "rms_norm_eps": self.rms_norm_eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "layer_types": ["full_attention"] * self.num_layers,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": True,
            "num_target_layers": self.num_target_layers,
            "block_size": self.block_size,
            "dflash_config": {"mask_token_id": self.mask_token_id, "target_layer_ids": list(self.tap_layers), **thinking},
            "sample_from_anchor": False,
            **head,
        }


def drafter_sizes(
    settings: DrafterSettings, target: DecoderConfig, special_token_ids: Mapping[str, int], thinking: bool | None = None
) -> Sizes:
    """Sizes for a target; ``special_token_ids`` by name, of which the mask is one where the settings name none. Raises OptionError.

    ``thinking``: whether the answers were made with it, None where nobody said so.
    """
    if settings.refiner_rank and settings.markov_rank:
        raise OptionError("[drafter] has a refiner_rank and a markov_rank; a drafter has one head, set the other to 0")
    if settings.markov_rank and settings.draft_vocab_size is not None:
        raise OptionError("[drafter] has a markov_rank and a draft_vocab_size; a Markov head drafts all tokens, leave one of them out")
    sizes = Sizes(
        hidden_size=target.hidden_size,
        intermediate_size=settings.intermediate_size or target.intermediate_size,
        num_layers=settings.num_layers,
        num_heads=settings.num_heads or target.num_heads,
        num_kv_heads=settings.num_kv_heads or target.num_kv_heads,
        head_dim=settings.head_dim or target.head_dim,
        vocab_size=target.vocab_size,
        num_target_layers=target.num_layers,
        tap_layers=tap_layers(settings, target.num_layers),
        block_size=settings.block_size,
        mask_token_id=_mask_token(settings.mask_token_id, target.vocab_size, special_token_ids),
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=next((layer.rope.theta for layer in target.layers if layer.rope is not None), 10_000.0),
        max_positions=target.max_positions,
        refiner_rank=settings.refiner_rank,
        refiner_mlp_hidden=settings.refiner_mlp_hidden,
        num_passes=min(_DEFAULT_PASSES, settings.block_size - 1) if settings.num_passes is None else settings.num_passes,
        markov_rank=settings.markov_rank,
        thinking=thinking,
    )
    # What the exporter would refuse after days of training is refused now.
    describe_serving(Fields(sizes.serving_config(), "the config.json that [drafter] gives", OptionError))
    return sizes


def tap_layers(settings: DrafterSettings, num_target_layers: int) -> tuple[int, ...]:
    """The target's layers that the drafter taps, 0-based and ascending."""
    layers = default_taps(settings.num_layers, num_target_layers) if settings.tap_layers is None else tuple(settings.tap_layers)
    if not layers or sorted(set(layers)) != list(layers) or not 0 <= layers[0] <= layers[-1] < num_target_layers:
        raise OptionError(f"tap_layers are {list(layers)}, expected ascending layers from 0 to {num_target_layers - 1}")
    return layers


def _mask_token(stated: int | None, vocab_size: int, special_token_ids: Mapping[str, int]) -> int:
    if stated is None:
        # A token that no answer holds would be best; one that is only ever fed as padding comes next.
        found = special_token_ids.get("mask_token", special_token_ids.get("pad_token"))
        if found is None:
            raise OptionError(
                "mask_token_id under [drafter] is missing, and the tokenizer has no mask or padding token; name an unused token"
            )
        return found
    if stated >= vocab_size:
        raise OptionError(
            f"mask_token_id is {stated}, and the target's embedding has {vocab_size} rows; name one of them that chats do not use"
        )
    return stated
