"""Acceptance on held-out answers without running the target: what a draft at each position would have had accepted.

For greedy answers this is what the real loop does, up to ties. Measures while training; ``evaluate`` runs the real loop. Knows nothing of
files or optimisers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from examples.distill.batches import cut_blocks
from examples.distill.drafter import TrainedDrafter
from examples.distill.features import Features
from examples.distill.tables import TargetTables

_BLOCKS_AT_ONCE = 128


@dataclass
class Acceptance:
    """Of one number of passes: ``tokens`` committed in ``rounds``; ``by_position[k]`` rounds accepted slot k + 1."""

    rounds: int
    tokens: int
    by_position: list[int]

    @property
    def length(self) -> float:
        """Mean acceptance length τ; the last round of an answer counts only the tokens that it has."""
        return self.tokens / max(1, self.rounds)


@torch.no_grad()
def replay(drafter: TrainedDrafter, tables: TargetTables, sequences: Iterable[Features], passes: Sequence[int]) -> dict[int, Acceptance]:
    """Acceptance for each number of passes, in the sequences' own order."""
    found = {num_passes: Acceptance(0, 0, [0] * (drafter.sizes.block_size - 1)) for num_passes in passes}
    for sequence in sequences:
        accepted = _accepted_everywhere(drafter, tables, sequence, passes)
        for num_passes, acceptance in found.items():
            _follow(accepted[num_passes], sequence, acceptance)
    return found


def _follow(accepted: Sequence[int], sequence: Features, into: Acceptance) -> None:
    """Walk an answer as the loop does: ``accepted`` for every anchor from the answer's first token on."""
    position, last = sequence.span.start, len(sequence.tokens) - 1
    while position < last:
        count = accepted[position - sequence.span.start]
        into.rounds += 1
        into.tokens += min(count + 1, last - position)
        for slot in range(count):
            into.by_position[slot] += 1
        position += count + 1


def _accepted_everywhere(drafter: TrainedDrafter, tables: TargetTables, sequence: Features, passes: Sequence[int]) -> dict[int, list[int]]:
    device = tables.head.device
    start, end = sequence.span.start, len(sequence.tokens) - 1
    tokens, taps = sequence.tokens.long()[None], sequence.taps[None].to(device)
    found: dict[int, list[int]] = {num_passes: [] for num_passes in passes}
    for first in range(start, end, _BLOCKS_AT_ONCE):
        anchors = torch.arange(first, min(first + _BLOCKS_AT_ONCE, end))[None]
        revealed = torch.zeros(*anchors.shape, drafter.sizes.block_size - 1, dtype=torch.bool)
        lengths = torch.tensor([len(sequence.tokens)])
        blocks = cut_blocks(tokens, lengths, anchors, drafter.sizes.block_size, drafter.sizes.mask_token_id, revealed).to(device)
        hidden = drafter.backbone(taps, nn.functional.embedding(blocks.shown, tables.embedding), blocks.anchors)
        base = nn.functional.linear(hidden[..., 1:, :], tables.head)
        drafts = tables.token_of(base.argmax(dim=-1))
        for num_passes in range(max(passes) + 1):
            if num_passes and drafter.head is not None:
                previous = torch.cat([blocks.previous[..., :2], drafts[..., :-1]], dim=-1)
                drafts = tables.token_of((base + drafter.head.bias(drafter.head(hidden, previous), tables.columns)).argmax(dim=-1))
            if num_passes in found:
                found[num_passes] += _leading(drafts, blocks.labels, blocks.counted)[0].tolist()
    return found


def _leading(drafts: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
    """[B, M]: how many slots from the first on are right."""
    return ((drafts == labels) & counted).long().cumprod(dim=-1).sum(dim=-1)
