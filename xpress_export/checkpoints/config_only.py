"""A target and a drafter known by their config.json alone: checked as whole checkpoints are, with the tensors that the configs ask for.

These have shapes and no values: modules are to be made under ``torch.device("meta")``, and identities say nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from xpress_export.checkpoints.drafter import DrafterCheckpoint, check_description, describe_config, serving_tensors
from xpress_export.checkpoints.families import FAMILIES
from xpress_export.checkpoints.formats.training import training_file
from xpress_export.checkpoints.locate import CONFIG_FILE, Location, locate
from xpress_export.checkpoints.packing import expected_tensors
from xpress_export.checkpoints.pairing import check_pairing
from xpress_export.checkpoints.target import EMBEDDING, HEAD, TargetCheckpoint, decoder_plan, read_target_config
from xpress_runtime.errors import CheckpointError
from xpress_runtime.fields import Fields


class ShapesOnly:
    """A tensor source without values."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = shapes

    def read(self, name: str) -> Tensor:
        return torch.empty(self.shapes[name], device="meta")

    def sha256(self) -> str:
        return ""


def open_pair_configs(
    target: str, drafter: str, *, target_revision: str | None = None, drafter_revision: str | None = None
) -> tuple[TargetCheckpoint, DrafterCheckpoint]:
    """As open_pair, from folders of which config.json alone is read, such files themselves, or hub ids of which no more is fetched."""
    opened = open_target_config(target, target_revision), open_drafter_config(drafter, drafter_revision)
    check_pairing(*opened)
    return opened


def open_target_config(reference: str, revision: str | None) -> TargetCheckpoint:
    """As open_target, from a config alone."""
    location = locate(reference, revision, config_only=True)
    model_type, config = read_target_config(_fields(location), location)
    table = (config.vocab_size, config.hidden_size)
    tables = {EMBEDDING: table} if config.tied_embeddings else {EMBEDDING: table, HEAD: table}
    return TargetCheckpoint(
        location, model_type, config, ShapesOnly(tables | expected_tensors(decoder_plan(config, FAMILIES[model_type].layout))), (), None
    )


def open_drafter_config(reference: str, revision: str | None) -> DrafterCheckpoint:
    """As open_drafter, from a config alone. Which tokens can be drafted it does not say: the first ones stand for them."""
    location = locate(reference, revision, config_only=True)
    if location.path.is_dir() and (training := training_file(location)) is not None:
        raise CheckpointError(f"the sizes of {training} are in its tensors, and not in a config; convert it first, and name the result")
    description = describe_config(_fields(location))
    check_description(description, str(location.path))
    ids = torch.arange(description.config.draft_vocab_size) if description.is_reduced else None
    return DrafterCheckpoint(location, description, ShapesOnly(serving_tensors(description)), None, ids)


def _fields(location: Location) -> Fields:
    path: Path = location.path
    return Fields.from_file(path if path.suffix == ".json" and path.is_file() else path / CONFIG_FILE, CheckpointError)
