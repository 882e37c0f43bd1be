"""Which tokens a drafter can draft, where that is not the whole vocabulary: the tensors d2t and t2d.

``d2t`` [Vd] holds, for each draft token, the target's id less the draft token's own; ``t2d`` [V] says of each target token whether it can
be drafted. Only these two small tensors are read here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xpress_export.checkpoints.formats.description import IN_DRAFT, OWN_HEAD, TO_TARGET, DrafterDescription
from xpress_export.checkpoints.tensors import StoredTensors
from xpress_runtime.errors import CheckpointError


def vocabulary_tensors(description: DrafterDescription) -> dict[str, tuple[int, ...]]:
    """Tensors that a reduced vocabulary needs, with their shapes; none where every token can be drafted."""
    if not description.is_reduced:
        return {}
    size = description.config.draft_vocab_size
    return {OWN_HEAD: (size, description.config.backbone.hidden_size), TO_TARGET: (size,)}


def read_draft_token_ids(description: DrafterDescription, source: StoredTensors, origin: str) -> Tensor | None:
    """The target's id of each draft token, int64 [Vd]; None where every token can be drafted. Raises CheckpointError."""
    size, vocab_size = description.config.draft_vocab_size, description.config.backbone.vocab_size
    if TO_TARGET not in source.shapes:
        return None
    for name, length in ((TO_TARGET, size), (IN_DRAFT, vocab_size)):
        if name in source.shapes and source.shapes[name] != (length,):
            raise CheckpointError(f"{origin}: tensor '{name}' has shape {list(source.shapes[name])}, config.json asks for {[length]}")
    if source.dtypes[TO_TARGET] == "BOOL":
        raise CheckpointError(f"{origin}: tensor '{TO_TARGET}' holds flags, expected offsets (I64 or I32)")
    ids = torch.arange(size) + source.stored(TO_TARGET).to(torch.int64)
    low, high = (int(value) for value in torch.aminmax(ids))
    if low < 0 or high >= vocab_size:
        raise CheckpointError(
            f"{origin}: tensor '{TO_TARGET}' leads to token {low if low < 0 else high}, expected 0 to {vocab_size - 1} (vocab_size - 1)"
        )
    if int(torch.unique(ids).numel()) != size:
        raise CheckpointError(f"{origin}: tensor '{TO_TARGET}' leads two draft tokens to the same token of the target")
    if IN_DRAFT in source.shapes:
        drafted = torch.zeros(vocab_size, dtype=torch.bool)
        drafted[ids] = True
        if not torch.equal(source.stored(IN_DRAFT).to(torch.bool), drafted):
            raise CheckpointError(f"{origin}: tensors '{TO_TARGET}' and '{IN_DRAFT}' disagree about which tokens can be drafted")
    if description.is_reduced:
        return ids
    if not torch.equal(ids, torch.arange(size)):
        raise CheckpointError(f"{origin}: tensor '{TO_TARGET}' changes the order of a full vocabulary, which is not supported")
    return None


def check_mapping(description: DrafterDescription, names: set[str], origin: str) -> None:
    """CheckpointError in one line where a reduced vocabulary has no mapping, or a head that has no form for one."""
    if not description.is_reduced:
        return
    sizes = f"draft_vocab_size is {description.config.draft_vocab_size} of {description.config.backbone.vocab_size} tokens"
    for name, what in ((TO_TARGET, "which of them are meant is not known"), (OWN_HEAD, "they have no head")):
        if name not in names:
            raise CheckpointError(f"{origin}: {sizes}, but tensor '{name}' is missing, so {what}")
