"""One step of an autoregressive drafter: its token, the logits it collects, its noise, and tables of another size than the target's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from xpress_export.models.draft_step import DraftEmbedding, DraftStep, DraftStepSampled
from xpress_export.models.noise import BlockNoise, TokenNoise

VOCAB_SIZE, BATCH = 11, 3
KEY = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]])
POSITION = torch.tensor([7, 0, 31])
SAMPLED = torch.tensor([1, 0, 1])
# Rows that are not sampled have temperature 1.
INVERSE_TEMPERATURE = torch.tensor([1.5, 1.0, 0.6])


def logits_of(num_proposals: int, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> Tensor:
    return torch.randn(BATCH, num_proposals, vocab_size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_proposals", [1, 2, 5])
def test_a_block_of_steps_collects_its_logits_in_order(num_proposals: int) -> None:
    logits = logits_of(num_proposals)
    step, collected = DraftStep(VOCAB_SIZE), torch.full((BATCH, num_proposals, VOCAB_SIZE), torch.nan)
    for slot in range(num_proposals):
        token, collected = step(logits[:, slot : slot + 1], collected)
        assert torch.equal(token, logits[:, slot : slot + 1].argmax(dim=-1))
        assert torch.equal(collected[:, -1], logits[:, slot])
    assert torch.equal(collected, logits)


@pytest.mark.parametrize("num_proposals", [1, 2, 5])
def test_draws_are_those_of_a_block_drafter_from_the_same_logits(num_proposals: int) -> None:
    """Greedy rows beside sampled ones: bit for bit, both what is drawn and what it is drawn from."""
    logits, differs = logits_of(num_proposals, seed=4), False
    noise = BlockNoise(TokenNoise(VOCAB_SIZE), KEY, POSITION, INVERSE_TEMPERATURE, SAMPLED, num_proposals + 1)
    expected = noise.perturb(logits, slice(0, num_proposals)).argmax(dim=-1)
    step, collected = DraftStepSampled(VOCAB_SIZE), torch.full((BATCH, num_proposals, VOCAB_SIZE), torch.nan)
    for slot in range(num_proposals):
        one = logits[:, slot : slot + 1]
        token, collected = step(one, collected, torch.tensor([slot + 1]), KEY, POSITION, INVERSE_TEMPERATURE, SAMPLED)
        assert torch.equal(token[:, 0], expected[:, slot])
        assert torch.equal(token[1], one[1].argmax(dim=-1))
        differs |= not torch.equal(token, one.argmax(dim=-1))
    assert torch.equal(collected, logits)
    assert differs


def test_greedy_rows_are_greedy_to_the_last_bit() -> None:
    logits, collected = logits_of(1), torch.zeros(BATCH, 3, VOCAB_SIZE)
    nobody, cold = torch.zeros(BATCH, dtype=torch.int64), torch.ones(BATCH)
    drawn = DraftStepSampled(VOCAB_SIZE)(logits, collected, torch.tensor([2]), KEY, POSITION, cold, nobody)
    for found, expected in zip(drawn, DraftStep(VOCAB_SIZE)(logits, collected), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("temperature", [1e-6, 1.0, 100.0])
def test_tokens_without_a_row_are_never_drafted(temperature: float) -> None:
    logits, collected = logits_of(1, VOCAB_SIZE - 4) - 50, torch.zeros(BATCH, 2, VOCAB_SIZE)
    everybody, hot = torch.ones(BATCH, dtype=torch.int64), torch.full((BATCH,), 1 / temperature)
    for token, block in (
        DraftStep(VOCAB_SIZE)(logits, collected),
        DraftStepSampled(VOCAB_SIZE)(logits, collected, torch.tensor([1]), KEY, POSITION, hot, everybody),
    ):
        assert (token < VOCAB_SIZE - 4).all()
        assert block.isfinite().all()
        assert block.shape == (BATCH, 2, VOCAB_SIZE)
        assert (block[:, -1].softmax(dim=-1)[:, VOCAB_SIZE - 4 :] == 0).all()


def test_rows_that_the_target_lacks_are_cut_off() -> None:
    logits, collected = logits_of(1, VOCAB_SIZE + 3), torch.zeros(BATCH, 2, VOCAB_SIZE)
    logits[..., VOCAB_SIZE:] = 99
    token, block = DraftStep(VOCAB_SIZE)(logits, collected)
    assert torch.equal(token, logits[..., :VOCAB_SIZE].argmax(dim=-1))
    assert torch.equal(block[:, -1:], logits[..., :VOCAB_SIZE])


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_ids_behind_the_drafters_table_read_its_last_row(scale: float) -> None:
    """Every row that is read is multiplied with the family's factor; the table itself is left alone."""
    embedding = DraftEmbedding(5, 2, scale)
    table = torch.arange(10.0).reshape(5, 2)
    embedding.table.copy_(table)
    assert torch.equal(embedding(torch.tensor([[0, 4, 5, 9]]))[0], scale * table[[0, 4, 4, 4]])
    assert torch.equal(embedding.table, table)
