"""Whether two drafter checkpoints are the same drafter, whatever format each is in."""

from __future__ import annotations

from dataclasses import replace

import torch

from xpress_export.checkpoints import DrafterCheckpoint
from xpress_runtime.sets import AttentionForm


def config_of(drafter: DrafterCheckpoint) -> tuple[object, ...]:
    """The config, but for the number of target layers, which not every format says."""
    return replace(drafter.config, num_target_layers=None), drafter.refiner, drafter.markov


def assert_same(ours: DrafterCheckpoint, theirs: DrafterCheckpoint) -> None:
    """The same config, and modules that are equal bit for bit."""
    assert config_of(ours) == config_of(theirs)
    pairs: list[tuple[torch.nn.Module, torch.nn.Module]] = [(ours.drafter(8, AttentionForm.MASK), theirs.drafter(8, AttentionForm.MASK))]
    if ours.head is not None:
        pairs.append((ours.refiner_module(), theirs.refiner_module()))
    for one, other in pairs:
        mine, others = one.state_dict(), other.state_dict()
        assert mine.keys() == others.keys()
        assert all(torch.equal(mine[name], others[name]) for name in mine)
