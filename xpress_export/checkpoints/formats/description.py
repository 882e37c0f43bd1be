"""What every format of a drafter is read into: its sizes, its config.json in the serving format, and how the format names tensors.

It knows no format and reads no file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from xpress_export.models.drafter import DrafterConfig
from xpress_export.models.markov import MarkovConfig
from xpress_export.models.refiner import RefinerConfig
from xpress_runtime.errors import CheckpointError
from xpress_runtime.fields import Fields

XPRESS_ARCHITECTURE = "Qwen3XPressModel"
DFLASH_ARCHITECTURE = "DFlashDraftModel"
MARKOV_ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel")

# Tensors beside those of the serving format.
OWN_HEAD = "lm_head.weight"
OWN_EMBEDDING = "embed_tokens.weight"
TO_TARGET, IN_DRAFT = "d2t", "t2d"

HeadConfig = RefinerConfig | MarkovConfig


@dataclass(frozen=True)
class DrafterDescription:
    """A drafter as its config describes it.

    ``format`` is a short name for people. ``trained_with_thinking`` is None where the config does not say. ``serving_config`` is a
    config.json of the serving format that says the same, and ``sources`` where each of its fields came from. ``published`` turns a
    tensor's name in the serving format into its name here. ``may_have_head``: the format has a place for a head of the drafter's own.
    ``ignored`` are tensors that may be there and are never read. ``notes`` are for the log.
    """

    format: str
    config: DrafterConfig
    head: HeadConfig | None
    trained_with_thinking: bool | None
    serving_config: Mapping[str, Any]
    sources: Mapping[str, str]
    published: Callable[[str], str] = str
    may_have_head: bool = False
    ignored: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    @property
    def is_reduced(self) -> bool:
        """Whether some tokens of the vocabulary cannot be drafted."""
        return self.config.draft_vocab_size != self.config.backbone.vocab_size


def check_taps(origin: str, name: str, taps: tuple[int, ...], num_target_layers: int | None) -> None:
    """CheckpointError where 0-based ``taps``, which the field ``name`` gives, are none, too high or not distinct."""
    if not taps:
        raise CheckpointError(f"{origin}: field '{name}' is empty, expected at least one layer")
    for tap in taps:
        if num_target_layers is not None and tap >= num_target_layers:
            raise CheckpointError(f"{origin}: {name} has layer {tap}, expected 0 to {num_target_layers - 1} (num_target_layers - 1)")
    if len(set(taps)) != len(taps):
        raise CheckpointError(f"{origin}: {name} {list(taps)} names a layer twice")


def read_mask_token_id(fields: Fields, vocab_size: int) -> int:
    """The id that stands in the slots to be drafted."""
    mask_token_id = fields.integer("mask_token_id")
    if mask_token_id >= vocab_size:
        raise CheckpointError(f"{fields.origin}: mask_token_id is {mask_token_id}, expected less than vocab_size ({vocab_size})")
    return mask_token_id


def read_draft_vocab_size(fields: Fields, vocab_size: int) -> int:
    """How many tokens can be drafted; absent: all."""
    return fields.integer("draft_vocab_size", 2, vocab_size) if "draft_vocab_size" in fields else vocab_size
