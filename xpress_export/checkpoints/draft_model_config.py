"""A draft model known by its config.json alone, as :mod:`xpress_export.checkpoints.config_only` knows target and drafter.

Whether it has the target's tokenizer a config does not say.
"""

from __future__ import annotations

from collections.abc import Sequence

from xpress_export.checkpoints.config_only import open_target_config
from xpress_export.checkpoints.draft_model import DraftModelCheckpoint
from xpress_export.checkpoints.target import TargetCheckpoint


def open_draft_model_config(
    reference: str | None, revision: str | None, layers: Sequence[int] | None, target: TargetCheckpoint
) -> DraftModelCheckpoint:
    """As open_draft_model, from a config alone; ``target`` is one too. Raises CheckpointError, OptionError where it has no such layers."""
    model = target if reference is None else open_target_config(reference, revision)
    if model.location.path.resolve() == target.location.path.resolve():
        model = target
    return DraftModelCheckpoint(model, layers, shares_tables=model is target)
