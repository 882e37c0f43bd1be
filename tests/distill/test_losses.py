"""The losses, against the equations slot by slot."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from examples.distill.batches import Batch, Blocks, cut_blocks
from examples.distill.losses import block_losses, slot_weights
from examples.distill.settings import TrainingSettings
from examples.distill.tables import TargetTables, most_frequent
from tests.distill.test_drafter import opened, settings_of
from tests.reference import ReferenceDrafter
from xpress_runtime.errors import OptionError

LENGTH, ANCHORS = 18, (3, 9, 15)
# Slot 2 of the second block is shown; the third block reaches one slot past the end.
REVEALED = [[False, False, False], [False, True, False], [False, False, False]]


def make_batch(tables: TargetTables, width: int, block_size: int, mask: int) -> tuple[Batch, Tensor]:
    torch.manual_seed(3)
    tokens = torch.randint(4, tables.embedding.shape[0], (1, LENGTH))
    blocks = cut_blocks(tokens, torch.tensor([LENGTH]), torch.tensor([ANCHORS]), block_size, mask, torch.tensor([REVEALED]))
    return Batch(torch.randn(1, LENGTH, width), torch.randn(1, LENGTH, tables.head.shape[1]), blocks), tokens[0]


def reference_losses(reference: ReferenceDrafter, batch: Batch, tokens: Tensor, settings: TrainingSettings) -> dict[str, float]:
    """Every part as a weighted mean over slots, from one block at a time."""
    sums = {"base": 0.0, "refined": 0.0, "free": 0.0, "variation": 0.0}
    total_weight = 0.0
    assert batch.final is not None
    for index, anchor in enumerate(ANCHORS):
        context = batch.taps[0, :anchor]
        hidden = shown_hidden(reference, context, batch.blocks.shown[0, index])
        base = reference.base_logits(hidden)
        slots = [slot for slot in range(3) if anchor + 1 + slot < LENGTH and not REVEALED[index][slot]]
        labels = [int(tokens[min(anchor + 1 + slot, LENGTH - 1)]) for slot in range(3)]
        inside = [anchor + 1 + slot < LENGTH for slot in range(3)]
        true = [label if here else 0 for label, here in zip(labels, inside, strict=True)]
        refined = reference.refined_logits(hidden, [int(tokens[anchor - 1]), int(tokens[anchor]), *true[:-1]])
        drafts = [int(base[slot].argmax()) if slot in slots else true[slot] for slot in range(3)]
        rounds = []
        for _ in range(settings.free_rounds):
            logits = reference.refined_logits(hidden, [int(tokens[anchor - 1]), int(tokens[anchor]), *drafts[:-1]])
            rounds.append(logits)
            drafts = [int(logits[slot].argmax()) if slot in slots else true[slot] for slot in range(3)]
        for slot in slots:
            weight = math.exp(-slot / settings.position_decay)
            target = (batch.final[0, anchor + slot] @ reference.head.T).softmax(-1)
            total_weight += weight

            def entropy(logits: Tensor, label: int) -> float:
                return -float(logits.log_softmax(-1)[label])

            def variation(logits: Tensor, target: Tensor) -> float:
                return 0.5 * float((logits.softmax(-1) - target).abs().sum())

            sums["base"] += weight * (entropy(base[slot], labels[slot]) + settings.tv_weight * variation(base[slot], target))
            sums["refined"] += weight * (entropy(refined[slot], labels[slot]) + settings.tv_weight * variation(refined[slot], target))
            sums["variation"] += weight * variation(refined[slot], target)
            sums["free"] += weight * sum(entropy(logits[slot], labels[slot]) for logits in rounds) / len(rounds)
    means = {name: value / total_weight for name, value in sums.items()}
    parts = (settings.base_weight * means["base"], settings.refined_weight * means["refined"], settings.free_weight * means["free"])
    return {"total": sum(parts), **means}


def shown_hidden(reference: ReferenceDrafter, context: Tensor, shown: Tensor) -> Tensor:
    """The reference's hidden states of a block that shows more than its anchor."""
    table = reference.embedding
    # The reference asks for the rows of an anchor and masks; it gets those of what is shown.
    reference.embedding = _BySlot(table, shown)  # type: ignore[assignment]
    hidden = reference.hidden(context, int(shown[0]))
    reference.embedding = table
    return hidden


class _BySlot:
    """Looks like the embedding table when the reference asks for its block's rows."""

    def __init__(self, table: Tensor, shown: Tensor) -> None:
        self._rows = table[shown]

    def __getitem__(self, ids: Tensor) -> Tensor:
        assert len(ids) == len(self._rows)
        return self._rows


@pytest.mark.parametrize("tv_weight", [0.0, 0.3])
def test_losses_equal_the_equations(tiny_folders: tuple[Path, Path], tv_weight: float) -> None:
    """All parts within 1e-4, with a revealed slot and a block that reaches past the end."""
    drafter, tables, sizes = opened(settings_of(*tiny_folders))
    settings = TrainingSettings(tv_weight=tv_weight, position_decay=2.0, free_rounds=2)
    batch, tokens = make_batch(tables, 2 * sizes.hidden_size, sizes.block_size, sizes.mask_token_id)
    with torch.no_grad():
        found = block_losses(drafter, tables, batch, settings)
        expected = reference_losses(ReferenceDrafter(tiny_folders[1], tables.embedding, tables.head), batch, tokens, settings)
    assert float(found.base) == pytest.approx(expected["base"], abs=1e-4)
    assert float(found.refined) == pytest.approx(expected["refined"], abs=1e-4)
    assert float(found.free) == pytest.approx(expected["free"], abs=1e-4)
    assert float(found.variation) == pytest.approx(expected["variation"] if tv_weight else 0.0, abs=1e-4)
    assert float(found.total) == pytest.approx(expected["total"], abs=3e-4)


def test_softmax_over_some_tokens_is_that_over_all_with_the_others_impossible(tiny_folders: tuple[Path, Path]) -> None:
    """Labels and drafts keep their meaning where the head has fewer rows, in an order of its own."""
    drafter, tables, sizes = opened(settings_of(*tiny_folders))
    batch, tokens = make_batch(tables, 2 * sizes.hidden_size, sizes.block_size, sizes.mask_token_id)
    columns = tokens.unique()
    few = cut_to(tables, columns)
    settings = TrainingSettings(tv_weight=0.0)
    with torch.no_grad():
        found = block_losses(drafter, few, batch, settings)
        reference = ReferenceDrafter(tiny_folders[1], tables.embedding, tables.head)
        unseen = torch.ones(len(tables.head), dtype=torch.bool)
        unseen[columns] = False
        whole, refine = reference.base_logits, reference.refined_logits
        reference.base_logits = lambda hidden: whole(hidden).masked_fill(unseen, -1e9)  # type: ignore[method-assign]
        reference.refined_logits = lambda hidden, previous: refine(hidden, previous).masked_fill(unseen, -1e9)  # type: ignore[method-assign]
        expected = reference_losses(reference, batch, tokens, settings)
    assert float(found.total) == pytest.approx(expected["total"], abs=3e-4)


def test_slots_whose_token_cannot_be_drafted_count_for_nothing(tiny_folders: tuple[Path, Path]) -> None:
    """They weigh like shown ones; with every token of the sequence outside, nothing is left to learn and nothing breaks."""
    drafter, tables, sizes = opened(settings_of(*tiny_folders))
    batch, tokens = make_batch(tables, 2 * sizes.hidden_size, sizes.block_size, sizes.mask_token_id)
    unknown = int(tokens[10])
    columns = torch.tensor([token for token in range(len(tables.head)) if token != unknown])
    settings = TrainingSettings(tv_weight=0.3)
    counted = batch.blocks.counted & (batch.blocks.labels != unknown)
    assert int(counted.sum()) < int(batch.blocks.counted.sum())
    uncounted = replace(batch, blocks=replace(batch.blocks, counted=counted))
    with torch.no_grad():
        found = block_losses(drafter, cut_to(tables, columns), batch, settings)
        assert found == block_losses(drafter, cut_to(tables, columns), uncounted, settings)
        absent = torch.tensor([token for token in range(len(tables.head)) if token not in tokens])
        nothing = block_losses(drafter, cut_to(tables, absent), batch, settings)
    assert math.isfinite(float(found.total)) and float(found.total) > 0
    assert float(nothing.total) == float(nothing.correct) == 0


def test_a_draft_vocabulary_is_what_the_answers_hold_most() -> None:
    counts = torch.tensor([0, 5, 1, 9, 1, 0, 5])
    assert most_frequent(counts, 2).tolist() == [1, 3]
    assert most_frequent(counts, 4).tolist() == [1, 2, 3, 6]
    assert most_frequent(counts, 100).tolist() == [1, 2, 3, 4, 6]
    with pytest.raises(OptionError, match="leave out draft_vocab_size"):
        most_frequent(torch.tensor([0, 7]), 10)


def cut_to(tables: TargetTables, columns: Tensor) -> TargetTables:
    """The same tables with a head for some tokens alone."""
    to_column = torch.full((len(tables.head),), -1)
    to_column[columns] = torch.arange(len(columns))
    return TargetTables(tables.embedding, tables.head[columns], columns, to_column)


def test_no_gradient_goes_through_drafts_or_the_target(tiny_folders: tuple[Path, Path]) -> None:
    """Only the drafter learns, and all of it does."""
    drafter, tables, sizes = opened(settings_of(*tiny_folders))
    batch, _ = make_batch(tables, 2 * sizes.hidden_size, sizes.block_size, sizes.mask_token_id)
    block_losses(drafter, tables, batch, TrainingSettings()).total.backward()  # type: ignore[no-untyped-call]
    assert not tables.head.requires_grad
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None and float(parameter.grad.abs().max()) > 0, name


def test_weights_fall_with_the_slot_and_add_up_to_one() -> None:
    weights = slot_weights(torch.tensor([[True, True, True], [True, False, True]]), decay=4.0)
    expected = torch.tensor([1, math.exp(-1 / 4), math.exp(-2 / 4), 1, math.exp(-2 / 4)])
    torch.testing.assert_close(weights, expected / expected.sum())


def test_targets_cap_and_scale_are_those_of_its_logits() -> None:
    tables = TargetTables(torch.empty(0), torch.eye(3), logit_scale=2.0, logit_cap=5.0)
    torch.testing.assert_close(tables.target_logits(torch.tensor([1.0, -4.0, 0.0])), 5 * torch.tanh(torch.tensor([2.0, -8.0, 0.0]) / 5))


def test_blocks_by_hand() -> None:
    """Anchor at the first token, in the middle, and with the end of the sequence inside of the block."""
    tokens, mask = torch.tensor([[10, 11, 12, 13, 14, 15]]), 99
    revealed = torch.tensor([[[False, False, False], [True, False, True], [False, True, False]]])
    blocks: Blocks = cut_blocks(tokens, torch.tensor([6]), torch.tensor([[0, 2, 4]]), 4, mask, revealed)
    assert blocks.shown.tolist() == [[[10, mask, mask, mask], [12, 13, mask, 15], [14, mask, mask, mask]]]
    assert blocks.labels.tolist() == [[[11, 12, 13], [13, 14, 15], [15, 0, 0]]]
    assert blocks.previous.tolist() == [[[10, 10, 11, 12], [11, 12, 13, 14], [13, 14, 15, 0]]]
    assert blocks.counted.tolist() == [[[True, True, True], [False, True, False], [True, False, False]]]
    assert blocks.target_rows.tolist() == [[[0, 1, 2], [2, 3, 4], [4, 5, 5]]]
