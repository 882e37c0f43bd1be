"""Whether a drafter was made for a target: everything that can be told from the two configs, and from tables that both hold.

A drafter for another target of the same sizes cannot be told apart: it only drafts badly, and verification keeps the output right.
"""

from __future__ import annotations

import logging

import torch

from xpress_export.checkpoints.drafter import DrafterCheckpoint, open_drafter
from xpress_export.checkpoints.formats.description import OWN_EMBEDDING
from xpress_export.checkpoints.target import TargetCheckpoint, open_target
from xpress_export.models.decoder import DecoderConfig
from xpress_runtime.errors import PairingError

logger = logging.getLogger(__name__)


def open_pair(
    target: str, drafter: str, *, target_revision: str | None = None, drafter_revision: str | None = None
) -> tuple[TargetCheckpoint, DrafterCheckpoint]:
    """Open a target and a drafter, and check that they belong together. Raises CheckpointError and PairingError."""
    opened = open_target(target, target_revision), open_drafter(drafter, drafter_revision)
    check_pairing(*opened)
    return opened


def check_pairing(target: TargetCheckpoint, drafter: DrafterCheckpoint) -> None:
    """Raise :class:`PairingError` with both values and both sources at the first disagreement.

    A head of the drafter's that equals the target's is the target's from then on. Only drafters with tables of their own pay for reading
    values.
    """
    theirs, ours = target.config, drafter.config
    of_target, of_drafter = f"target '{target.location.source}'", f"drafter '{drafter.location.source}'"
    # The drafter has no tables: it reads the target's embeddings and writes for the target's head.
    for what, wanted, given in (
        ("hidden size", theirs.hidden_size, ours.backbone.hidden_size),
        ("vocabulary size", theirs.vocab_size, ours.backbone.vocab_size),
        ("number of target layers", theirs.num_layers, theirs.num_layers if ours.num_target_layers is None else ours.num_target_layers),
    ):
        if wanted != given:
            raise PairingError(f"{what}: {given} in {of_drafter}, but {wanted} in {of_target}; the drafter was made for another target")
    for tap in ours.tap_layers:
        if not 0 <= tap < theirs.num_layers:
            raise PairingError(f"{of_drafter} taps layer {tap}, but {of_target} has layers 0 to {theirs.num_layers - 1}")
    if len(set(ours.tap_layers)) != len(ours.tap_layers):
        raise PairingError(f"{of_drafter} taps a layer of {of_target} twice: {list(ours.tap_layers)}")
    if not 0 <= ours.mask_token_id < theirs.vocab_size:
        raise PairingError(f"mask token id {ours.mask_token_id} of {of_drafter} is outside the {theirs.vocab_size} tokens of {of_target}")
    if ours.block_size < 2:
        raise PairingError(f"block size {ours.block_size} of {of_drafter} leaves nothing for {of_target} to verify; expected at least 2")
    # A warning only: the drafter rotates its own keys and queries with its own tables, so a different base is a matter of how it was
    # trained, not of consistency. Still, published drafters keep their target's, so a difference deserves a look.
    theirs_rope, ours_rope = _main_rope(theirs), _main_rope(ours.backbone)
    if None not in (theirs_rope, ours_rope) and theirs_rope != ours_rope:
        logger.warning("rotary embedding: %s in %s, %s in %s; each keeps its own", ours_rope, of_drafter, theirs_rope, of_target)
    _compare_tables(target, drafter, f"{of_drafter} and {of_target}")


def _compare_tables(target: TargetCheckpoint, drafter: DrafterCheckpoint, named: str) -> None:
    if drafter.own_embedding is not None and not torch.equal(drafter.own_embedding.read(OWN_EMBEDDING), target.embedding().table):
        raise PairingError(
            f"{named}: '{OWN_EMBEDDING}' differs from the target's table; a drafter with embeddings of its own is not supported"
        )
    if drafter.has_own_head and drafter.draft_token_ids is None and torch.equal(drafter.own_head_table(), target.head().table):
        drafter.has_own_head = False


def _main_rope(config: DecoderConfig) -> str | None:
    """Kind and base of the first layer that sees everything, or of any."""
    layers = sorted((layer for layer in config.layers if layer.rope is not None), key=lambda layer: layer.window is not None)
    return f"{layers[0].rope.rope_type} (base {layers[0].rope.theta:g})" if layers and layers[0].rope is not None else None
