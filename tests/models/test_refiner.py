"""The refiner against the method's equations: one slot, one pass, one channel sum at a time, on the published tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.models.close import assert_close
from tests.tiny import write_drafter, write_target
from xpress_export.checkpoints import open_drafter
from xpress_export.models.refiner import Refiner

TOLERANCE = 1e-5

BLOCK_SIZE = 6
VOCAB_SIZE = 61
HIDDEN_SIZE = 40
BATCH = 3

Array = NDArray[np.float64]


class Reference:
    """One block of one sequence. ``tensors`` have the published names and layouts."""

    def __init__(self, tensors: dict[str, Tensor], hidden: Tensor, base: Tensor, anchor: int, predecessor: int) -> None:
        self.tensors = {name.removeprefix("xpress_head."): tensor.double().numpy() for name, tensor in tensors.items()}
        self.hidden = hidden.double().numpy()
        self.base = base.double().numpy()
        self.anchor = anchor
        self.predecessor = predecessor

    def logits(self, slot: int, drafts: list[int]) -> Array:
        """Refined logits of ``slot`` (1 … P-1) given x[1], x[2], …; only those before the slot are read."""
        before = {0: self.predecessor, 1: self.anchor, **{index + 2: token for index, token in enumerate(drafts)}}
        z = [self.z(index, before[index]) for index in range(slot + 1)]
        u = z[slot].copy()
        for channel in range(len(u)):
            for index in range(slot + 1):
                u[channel] += self.tensors["mix.L"][channel, slot, index] * z[index][channel]
        gate, up = self.tensors["mlp.gate_proj.weight"] @ u, self.tensors["mlp.up_proj.weight"] @ u
        u = u + self.tensors["mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)
        refined: Array = self.base[slot - 1] + self.tensors["w2.weight"] @ u
        return refined

    def z(self, slot: int, previous: int) -> Array:
        parts = (
            self.tensors["down_h.weight"] @ self.hidden[slot],
            self.tensors["down_g.weight"] @ (sum(self.hidden) / len(self.hidden)),
            self.tensors["w1.weight"][previous],
        )
        z: Array = self.tensors["in_proj.weight"] @ np.concatenate(parts)
        return z

    def passes(self, num_passes: int, shortlist: int = VOCAB_SIZE) -> tuple[list[list[int]], Array]:
        """Drafts after the seed and after each pass, and the last logits; only the best ``shortlist`` of the base may be drafted."""
        allowed = np.argsort(-self.base, axis=-1)[:, :shortlist]
        scores = self.base
        history = [[int(token) for token in self.base.argmax(-1)]]
        for _ in range(num_passes):
            scores = np.stack([self.logits(slot, history[-1]) for slot in range(1, BLOCK_SIZE)])
            history.append([best_of(row, tokens) for row, tokens in zip(scores, allowed, strict=True)])
        return history, scores

    def left_to_right(self) -> list[int]:
        """Each slot decided once, given the final tokens before it."""
        drafts: list[int] = []
        for slot in range(1, BLOCK_SIZE):
            drafts.append(int(self.logits(slot, drafts).argmax()))
        return drafts


def best_of(row: Array, tokens: NDArray[np.int64]) -> int:
    return int(tokens[row[tokens].argmax()])


@dataclass
class Case:
    """A refiner, and a batch of blocks for it."""

    refiner: Refiner
    tensors: dict[str, Tensor]
    hidden: Tensor
    base: Tensor
    anchor: Tensor
    predecessor: Tensor

    def references(self) -> list[Reference]:
        return [
            Reference(self.tensors, self.hidden[row], self.base[row], int(self.anchor[row]), int(self.predecessor[row]))
            for row in range(BATCH)
        ]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder: Path = tmp_path_factory.mktemp("refiner")
    write_target(folder / "target")
    tensors = write_drafter(folder / "drafter", folder / "target", block_size=BLOCK_SIZE)
    generator = torch.Generator().manual_seed(7)
    return Case(
        refiner=open_drafter(str(folder / "drafter")).refiner_module(),
        tensors={name: tensor for name, tensor in tensors.items() if name.startswith("xpress_head.")},
        hidden=torch.randn(BATCH, BLOCK_SIZE, HIDDEN_SIZE, generator=generator),
        base=torch.randn(BATCH, BLOCK_SIZE - 1, VOCAB_SIZE, generator=generator),
        anchor=torch.tensor([3, 17, 17]),
        predecessor=torch.tensor([8, 0, 60]),
    )


def refine(case: Case, num_passes: int, shortlist: int = 0) -> tuple[list[Tensor], Tensor, Tensor | None]:
    block = case.refiner(case.hidden, case.base, case.anchor, case.predecessor, num_passes, shortlist)
    assert torch.equal(block.drafts, block.passes[-1])
    assert len(block.passes) == num_passes + 1
    return block.passes, block.scores, block.candidates


@pytest.mark.parametrize("num_passes", range(BLOCK_SIZE + 2))
def test_passes_equal_the_equations(case: Case, num_passes: int) -> None:
    passes, scores, candidates = refine(case, num_passes)
    assert candidates is None
    assert scores.dtype == torch.float32
    for row, reference in enumerate(case.references()):
        history, expected = reference.passes(num_passes)
        assert [drafts[row].tolist() for drafts in passes] == history
        assert_close(scores[row], expected, TOLERANCE)


def test_no_pass_is_the_bare_drafter(case: Case) -> None:
    passes, scores, _ = refine(case, 0)
    assert torch.equal(passes[0], case.base.argmax(-1))
    assert torch.equal(scores, case.base)


def test_one_pass_fewer_than_slots_is_left_to_right(case: Case) -> None:
    passes, _, _ = refine(case, BLOCK_SIZE + 2)
    expected = [reference.left_to_right() for reference in case.references()]
    for drafts in passes[BLOCK_SIZE - 1 :]:
        assert drafts.tolist() == expected
    # The case is one in which it takes several passes.
    assert passes[1].tolist() != expected
    assert passes[2].tolist() != expected


def test_slot_is_settled_after_as_many_passes(case: Case) -> None:
    passes, _, _ = refine(case, BLOCK_SIZE + 2)
    for slot in range(1, BLOCK_SIZE):
        for drafts in passes[slot:]:
            assert torch.equal(drafts[:, slot - 1], passes[slot][:, slot - 1])


def test_shortlist_of_the_whole_vocabulary_is_the_full_readout(case: Case) -> None:
    passes, scores, candidates = refine(case, 3, VOCAB_SIZE)
    full_passes, full_scores, _ = refine(case, 3)
    assert candidates is not None
    assert all(torch.equal(*pair) for pair in zip(passes, full_passes, strict=True))
    assert_close(scores, full_scores.gather(-1, candidates), TOLERANCE)


@pytest.mark.parametrize("shortlist", [1, 4, 20])
def test_shortlist(case: Case, shortlist: int) -> None:
    passes, scores, candidates = refine(case, 3, shortlist)
    assert candidates is not None
    assert scores.shape == candidates.shape == (BATCH, BLOCK_SIZE - 1, shortlist)
    best = case.base.topk(shortlist, dim=-1).indices
    assert torch.equal(candidates.sort(dim=-1).values, best.sort(dim=-1).values)
    for drafts in passes:
        assert (candidates == drafts[..., None]).any(dim=-1).all()
    for row, reference in enumerate(case.references()):
        history, expected = reference.passes(3, shortlist)
        assert [drafts[row].tolist() for drafts in passes] == history
        assert_close(scores[row], np.take_along_axis(expected, candidates[row].numpy(), axis=-1), TOLERANCE)


def test_small_shortlist_binds(case: Case) -> None:
    """Else the tests above would not tell a shortlist from the whole vocabulary."""
    assert refine(case, 3, 4)[0][-1].tolist() != refine(case, 3)[0][-1].tolist()


def test_mixer_is_folded_from_a_raw_matrix(case: Case) -> None:
    raw = case.tensors["xpress_head.mix.L"]
    upper = raw.triu(1)
    assert (upper != 0).sum() == raw.shape[0] * BLOCK_SIZE * (BLOCK_SIZE - 1) // 2
    assert torch.equal(case.refiner.mix, raw - upper + torch.eye(BLOCK_SIZE))


def test_later_slots_and_tokens_reach_no_earlier_slot(case: Case) -> None:
    """Causal but for the mean of hidden states: base logits of the last slot change the last slot alone."""
    _, before, _ = refine(case, BLOCK_SIZE - 1)
    base = case.base.clone()
    base[:, -1] = base[:, -1].flip(-1)
    changed = case.refiner(case.hidden, base, case.anchor, case.predecessor, BLOCK_SIZE - 1, 0)
    assert torch.equal(changed.scores[:, :-1], before[:, :-1])


def test_the_predecessor_matters(case: Case) -> None:
    """The token before the anchor is read, and is not the anchor itself."""
    block = case.refiner(case.hidden, case.base, case.anchor, case.anchor, 1, 0)
    assert (block.scores - refine(case, 1)[1]).abs().max() > 1e-3
