"""The Markov head against decoding from left to right, one slot and one product at a time, on the published tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.models.close import assert_close
from tests.tiny import write_markov_drafter, write_target
from xpress_export.checkpoints import open_drafter
from xpress_export.models.markov import MarkovConfig, MarkovHead
from xpress_export.models.noise import BlockNoise, TokenNoise
from xpress_export.models.refiner import RefinedBlock

# fp32 against fp64, one sum over a rank of 8.
TOLERANCE = 1e-5

BLOCK_SIZE, VOCAB_SIZE, BATCH = 6, 61, 3
NUM_PROPOSALS = BLOCK_SIZE - 1

Array = NDArray[np.float64]


@dataclass
class Case:
    """A head with its published tables, and a batch of blocks for it."""

    head: MarkovHead
    w1: Array
    w2: Array
    base: Tensor
    anchor: Tensor

    def draft(self, num_passes: int = NUM_PROPOSALS, shortlist: int = 0, noise: BlockNoise | None = None) -> RefinedBlock:
        unread = torch.full((BATCH, BLOCK_SIZE, 1), torch.nan)
        block: RefinedBlock = self.head(unread, self.base, self.anchor, self.anchor - 1000, num_passes, shortlist, noise)
        return block

    def left_to_right(self, row: int, shortlist: int, temperature: float = 1.0, gumbel: Array | None = None) -> Iterator[tuple[int, Array]]:
        """Token and logits of each slot; only the base's best ``shortlist`` may be drafted, with ``gumbel`` noise [P-1, V]."""
        before = int(self.anchor[row])
        for slot, base in enumerate(self.base[row].double().numpy()):
            logits = base + self.w2 @ self.w1[before]
            perturbed = logits if gumbel is None else logits / temperature + gumbel[slot]
            allowed = np.argsort(-base)[:shortlist]
            before = int(allowed[perturbed[allowed].argmax()])
            yield before, logits


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder: Path = tmp_path_factory.mktemp("markov")
    write_target(folder / "target")
    tensors = write_markov_drafter(folder / "drafter", folder / "target", block_size=BLOCK_SIZE)
    head = open_drafter(str(folder / "drafter")).refiner_module()
    assert isinstance(head, MarkovHead)
    generator = torch.Generator().manual_seed(7)
    return Case(
        head=head,
        w1=tensors["markov_w1.weight"].double().numpy(),
        w2=tensors["markov_w2.weight"].double().numpy(),
        base=torch.randn(BATCH, NUM_PROPOSALS, VOCAB_SIZE, generator=generator),
        anchor=torch.tensor([3, 17, 60]),
    )


@pytest.mark.parametrize("shortlist", [0, 1, 4, 20, VOCAB_SIZE])
def test_block_equals_left_to_right(case: Case, shortlist: int) -> None:
    block = case.draft(shortlist=shortlist)
    assert block.scores.dtype == torch.float32
    assert block.scores.shape == (BATCH, NUM_PROPOSALS, shortlist or VOCAB_SIZE)
    for row in range(BATCH):
        tokens, logits = zip(*case.left_to_right(row, shortlist or VOCAB_SIZE), strict=True)
        assert block.drafts[row].tolist() == list(tokens)
        expected = np.stack(logits)
        if block.candidates is not None:
            expected = np.take_along_axis(expected, block.candidates[row].numpy(), axis=-1)
        assert_close(block.scores[row], expected, TOLERANCE)


def test_candidates_are_the_best_of_the_base(case: Case) -> None:
    candidates = case.draft(shortlist=4).candidates
    assert candidates is not None
    assert torch.equal(candidates, case.base.topk(4, dim=-1).indices)
    assert case.draft().candidates is None


def test_shortlist_and_head_matter(case: Case) -> None:
    """Else the tests above would pass without them."""
    full = case.draft().drafts
    assert not torch.equal(case.draft(shortlist=4).drafts, full)
    assert not torch.equal(case.draft(num_passes=0).drafts, full)
    # And every slot reads the one before it, not the anchor.
    bias = torch.tensor(case.w1[case.anchor] @ case.w2.T)
    assert not torch.equal((case.base + bias[:, None]).argmax(dim=-1), full)


def test_no_pass_is_the_bare_drafter(case: Case) -> None:
    for shortlist in (0, 4):
        block = case.draft(num_passes=0, shortlist=shortlist)
        assert torch.equal(block.drafts, case.base.argmax(dim=-1))
    assert torch.equal(case.draft(num_passes=0).scores, case.base)


@pytest.mark.parametrize("num_passes", [1, NUM_PROPOSALS - 1, NUM_PROPOSALS + 1])
def test_other_numbers_of_passes_are_refused(case: Case, num_passes: int) -> None:
    with pytest.raises(ValueError, match=f"in {NUM_PROPOSALS} passes, not in {num_passes}"):
        case.draft(num_passes)


@pytest.mark.parametrize("shortlist", [0, 9])
def test_draws_follow_each_slots_noise(case: Case, shortlist: int) -> None:
    """Two sampled rows beside a greedy one, which is greedy to the last bit."""
    tokens = TokenNoise(VOCAB_SIZE)
    key, position = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]), torch.tensor([10, 20, 30])
    temperatures, sampled = (0.7, 1.0, 1.6), torch.tensor([1, 0, 1])
    noise = BlockNoise(tokens, key, position, 1 / torch.tensor(temperatures), sampled, BLOCK_SIZE)
    block, greedy = case.draft(shortlist=shortlist, noise=noise), case.draft(shortlist=shortlist)
    gumbel = tokens.gumbel(tokens.coefficients(key, position, torch.arange(1, BLOCK_SIZE))).double().numpy()
    for row in range(BATCH):
        reference = case.left_to_right(row, shortlist or VOCAB_SIZE, temperatures[row], gumbel[row] * int(sampled[row]))
        assert block.drafts[row].tolist() == [token for token, _ in reference]
    assert torch.equal(block.scores[1], greedy.scores[1])
    assert not torch.equal(block.drafts, greedy.drafts)
    # Scores are the logits, without the noise.
    first = case.base[:, 0] + torch.tensor(case.w1[case.anchor] @ case.w2.T).float()
    if block.candidates is not None:
        first = first.gather(-1, block.candidates[:, 0])
    assert_close(block.scores[:, 0], first, TOLERANCE)


def test_passes_of_a_config_settle_every_slot() -> None:
    assert MarkovConfig(vocab_size=61, rank=8, block_size=16).num_passes == 15
