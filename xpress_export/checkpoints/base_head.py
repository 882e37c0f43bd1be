"""Where a block's base logits come from: from the target's own head, or from a head of the drafter's.

Knows both checkpoints; knows nothing about graphs.
"""

from __future__ import annotations

import torch
from torch import nn

from xpress_export.checkpoints.drafter import DrafterCheckpoint
from xpress_export.checkpoints.target import TargetCheckpoint
from xpress_export.models.base_head import BaseHead
from xpress_export.models.decoder import Head


def needs_base_head(target: TargetCheckpoint, drafter: DrafterCheckpoint) -> bool:
    """Whether the drafter's logits are other than those of the target's head for the same hidden states."""
    theirs, ours = target.config, drafter.config.backbone
    return drafter.has_own_head or (theirs.logit_scale, theirs.logit_cap) != (ours.logit_scale, ours.logit_cap)


def base_head(target: TargetCheckpoint, drafter: DrafterCheckpoint) -> BaseHead:
    """The drafter's head: its own table or the target's, with the drafter's scale and cap."""
    config = drafter.config
    with torch.device("meta"):
        head = Head(config.draft_vocab_size, config.backbone.hidden_size, config.backbone.logit_scale, config.backbone.logit_cap)
    table = drafter.own_head_table() if drafter.has_own_head else target.head().table
    head.table = nn.Parameter(table, requires_grad=False)
    return BaseHead(head, target.config.vocab_size, drafter.draft_token_ids)
