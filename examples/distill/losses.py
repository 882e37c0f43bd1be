"""The losses of the paper, over the slots of many blocks.

    loss = refined_weight · teacher-forced refined + free_weight · mean of the free-running rounds + base_weight · base

Each part is a weighted mean over slots of cross-entropy with the true token and, times ``tv_weight``, the total variation to the target's
distribution. Teacher-forced: the head reads the true token before each slot. Free-running: it reads its own drafts of the round before,
beginning with the base logits' best; no gradient goes through a draft. Knows nothing of where batches come from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from examples.distill.batches import Batch
from examples.distill.drafter import TrainedDrafter
from examples.distill.settings import TrainingSettings
from examples.distill.tables import TargetTables


@dataclass(frozen=True)
class Losses:
    """Scalars; ``total`` has the gradient. ``correct`` is the share of slot 1 that the base logits get right."""

    total: Tensor
    refined: Tensor
    free: Tensor
    base: Tensor
    variation: Tensor
    correct: Tensor


def block_losses(drafter: TrainedDrafter, tables: TargetTables, batch: Batch, settings: TrainingSettings) -> Losses:
    """Losses of a batch. Logits exist for counted slots only."""
    blocks = batch.blocks
    hidden = drafter.backbone(batch.taps, nn.functional.embedding(blocks.shown, tables.embedding), blocks.anchors)
    # A token without a column cannot be drafted, so nothing is to be learned from it.
    counted = blocks.counted & tables.holds(blocks.labels)
    weights = slot_weights(counted, settings.position_decay)
    labels = tables.column_of(blocks.labels[counted])
    base_logits = nn.functional.linear(hidden[..., 1:, :][counted], tables.head)
    target = _target_distribution(tables, batch, counted, settings)

    base, variation = _slot_loss(base_logits, labels, weights, target, settings.tv_weight)
    zero = base.new_zeros(())
    refined = free = zero
    head = drafter.head
    if head is not None:

        def logits(previous: Tensor) -> Tensor:
            return base_logits + head.bias(head(hidden, previous)[counted], tables.columns)

        if settings.refined_weight:
            refined, variation = _slot_loss(logits(blocks.previous), labels, weights, target, settings.tv_weight)
        rounds = []
        drafts = _drafts(base_logits, blocks.labels, counted, tables)
        for _ in range(settings.free_rounds if settings.free_weight else 0):
            round_logits = logits(torch.cat([blocks.previous[..., :2], drafts[..., :-1]], dim=-1))
            rounds.append(_slot_loss(round_logits, labels, weights, None, 0.0)[0])
            drafts = _drafts(round_logits, blocks.labels, counted, tables)
        free = torch.stack(rounds).mean() if rounds else zero
    total = settings.base_weight * base + settings.refined_weight * refined + settings.free_weight * free
    first = counted.clone()
    first[..., 1:] = False
    is_first = first[counted]
    with torch.no_grad():
        correct = (base_logits[is_first].argmax(dim=-1) == labels[is_first]).float().sum() / is_first.sum().clamp(min=1)
    return Losses(total, refined.detach(), free.detach(), base.detach(), variation.detach(), correct)


def slot_weights(counted: Tensor, decay: float) -> Tensor:
    """Weights [C] of the counted slots [.., P-1], exp(-(k-1)/decay) for slot k; their sum is 1."""
    weights = torch.exp(-torch.arange(counted.shape[-1], device=counted.device) / decay).expand(counted.shape)[counted]
    return weights / weights.sum().clamp(min=1e-6)


def _slot_loss(logits: Tensor, labels: Tensor, weights: Tensor, target: Tensor | None, tv_weight: float) -> tuple[Tensor, Tensor]:
    """Weighted cross-entropy, with total variation added where a target distribution is given; and the variation alone."""
    logits = logits.float()
    loss = (nn.functional.cross_entropy(logits, labels, reduction="none") * weights).sum()
    if target is None:
        return loss, loss.new_zeros(())
    variation = (0.5 * (logits.softmax(dim=-1) - target).abs().sum(dim=-1) * weights).sum()
    return loss + tv_weight * variation, variation


@torch.no_grad()
def _target_distribution(tables: TargetTables, batch: Batch, counted: Tensor, settings: TrainingSettings) -> Tensor | None:
    """[C, V or W]: what the target says at each counted slot."""
    if not settings.tv_weight or batch.final is None:
        return None
    blocks = batch.blocks
    rows = blocks.target_rows.flatten(1)[..., None].expand(-1, -1, batch.final.shape[-1])
    final = batch.final.gather(1, rows).reshape(*blocks.target_rows.shape, -1)[counted]
    return tables.target_logits(final).softmax(dim=-1)


@torch.no_grad()
def _drafts(logits: Tensor, labels: Tensor, counted: Tensor, tables: TargetTables) -> Tensor:
    """[B, M, P-1]: the best token of each counted slot, the true one where nothing is drafted."""
    drafts = labels.clone()
    drafts[counted] = tables.token_of(logits.argmax(dim=-1))
    return drafts
