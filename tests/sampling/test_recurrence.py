"""P-1 parallel passes are one pass from left to right: greedy, and with the block's noise frozen, for every temperature of a batch.

The loop is over slots and rows, in double precision, on the published tensors.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from tests.models.test_refiner import Reference
from tests.sampling import noise
from tests.tiny import write_drafter, write_markov_drafter, write_target
from xpress_export.checkpoints import open_drafter
from xpress_export.graphs.refiner import GreedyForm, RefinerGraph, SampledForm
from xpress_export.models.markov import MarkovHead
from xpress_export.models.refiner import Refiner
from xpress_runtime.sampling import noise_key

BLOCK_SIZE, VOCAB_SIZE, HIDDEN_SIZE = 6, 61, 40
NUM_ROWS = 24
POSITION = 10


class Blocks:
    """A batch of blocks, every fourth row greedy and the others at three temperatures, and the seeds 0, 1, 2, …"""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.hidden = torch.randn(NUM_ROWS, BLOCK_SIZE, HIDDEN_SIZE, generator=generator)
        self.base = torch.randn(NUM_ROWS, BLOCK_SIZE - 1, VOCAB_SIZE, generator=generator)
        self.anchor, self.predecessor = torch.randint(VOCAB_SIZE, (2, NUM_ROWS), generator=generator)
        self.position = POSITION + torch.arange(NUM_ROWS)
        self.temperatures = [(0.0, 0.5, 1.0, 1.5)[row % 4] for row in range(NUM_ROWS)]
        self.keys = [noise_key(seed) for seed in range(NUM_ROWS)]

    def inputs(self) -> tuple[Tensor, ...]:
        inverse = torch.tensor([1 / temperature if temperature else 1.0 for temperature in self.temperatures])
        sampled = torch.tensor([int(temperature > 0) for temperature in self.temperatures])
        return (self.hidden, self.base, self.anchor, self.predecessor, self.position, torch.tensor(self.keys), inverse, sampled)

    def best(self, row: int, slot: int, logits: NDArray[np.float64], allowed: NDArray[np.int64]) -> int:
        """The token of ``allowed`` that a slot takes from its logits [V]."""
        temperature = self.temperatures[row]
        scores = logits[allowed]
        if temperature:
            polynomial = noise.coefficients(self.keys[row], int(self.position[row]), slot)
            scores = scores / temperature + [noise.gumbel(noise.value(polynomial, int(token))) for token in allowed]
        return int(allowed[scores.argmax()])

    def allowed(self, row: int, slot: int, shortlist: int) -> NDArray[np.int64]:
        best: NDArray[np.int64] = np.argsort(-self.base[row, slot - 1].double().numpy())[: shortlist or VOCAB_SIZE]
        return best


def left_to_right(blocks: Blocks, tensors: dict[str, Tensor], shortlist: int) -> list[list[int]]:
    """Verify ids of every row with an xPress refiner."""
    ids = []
    for row in range(NUM_ROWS):
        known = int(blocks.anchor[row]), int(blocks.predecessor[row])
        reference = Reference(tensors, blocks.hidden[row], blocks.base[row], *known)
        drafts: list[int] = []
        for slot in range(1, BLOCK_SIZE):
            drafts.append(blocks.best(row, slot, reference.logits(slot, drafts), blocks.allowed(row, slot, shortlist)))
        ids.append([known[0], *drafts])
    return ids


def markov_left_to_right(blocks: Blocks, tensors: dict[str, Tensor], shortlist: int) -> list[list[int]]:
    """As :func:`left_to_right`, with a Markov head."""
    before, bias = (tensors[f"markov_{name}.weight"].double().numpy() for name in ("w1", "w2"))
    ids = []
    for row in range(NUM_ROWS):
        tokens = [int(blocks.anchor[row])]
        for slot in range(1, BLOCK_SIZE):
            logits = blocks.base[row, slot - 1].double().numpy() + bias @ before[tokens[-1]]
            tokens.append(blocks.best(row, slot, logits, blocks.allowed(row, slot, shortlist)))
        ids.append(tokens)
    return ids


@pytest.fixture(scope="module")
def refiner(tmp_path_factory: pytest.TempPathFactory) -> tuple[Refiner, dict[str, Tensor]]:
    folder: Path = tmp_path_factory.mktemp("recurrence")
    write_target(folder / "target")
    tensors = write_drafter(folder / "drafter", folder / "target", block_size=BLOCK_SIZE)
    # The token before a slot weighs so much that most rows take several passes.
    tensors["xpress_head.w1.weight"] *= 6
    save_file(tensors, folder / "drafter" / "model.safetensors")
    module = open_drafter(str(folder / "drafter")).refiner_module()
    assert isinstance(module, Refiner)
    return module, {name: tensor for name, tensor in tensors.items() if name.startswith("xpress_head.")}


@pytest.fixture(scope="module")
def markov(tmp_path_factory: pytest.TempPathFactory) -> tuple[MarkovHead, dict[str, Tensor]]:
    folder: Path = tmp_path_factory.mktemp("markov-recurrence")
    write_target(folder / "target")
    tensors = write_markov_drafter(folder / "drafter", folder / "target", block_size=BLOCK_SIZE)
    module = open_drafter(str(folder / "drafter")).refiner_module()
    assert isinstance(module, MarkovHead)
    return module, tensors


def drafted(module: Refiner | MarkovHead, num_passes: int, shortlist: int, blocks: Blocks) -> list[list[int]]:
    ids: Tensor = SampledForm(RefinerGraph(module, num_passes, shortlist), VOCAB_SIZE)(*blocks.inputs())[0]
    return ids.tolist()


@pytest.mark.parametrize("shortlist", [0, 9])
def test_as_many_passes_as_proposals_are_left_to_right(refiner: tuple[Refiner, dict[str, Tensor]], shortlist: int) -> None:
    module, tensors = refiner
    blocks = Blocks()
    expected = left_to_right(blocks, tensors, shortlist)
    for num_passes in (BLOCK_SIZE - 1, BLOCK_SIZE):
        assert drafted(module, num_passes, shortlist, blocks) == expected
    # Two are not, for rows of every temperature.
    fewer = drafted(module, 2, shortlist, blocks)
    assert {blocks.temperatures[row] for row in range(NUM_ROWS) if fewer[row] != expected[row]} == {0.0, 0.5, 1.0, 1.5}


@pytest.mark.parametrize("shortlist", [0, 9])
def test_greedy_rows_of_a_sampled_form_are_those_of_the_greedy_one(refiner: tuple[Refiner, dict[str, Tensor]], shortlist: int) -> None:
    module, _ = refiner
    blocks = Blocks()
    greedy = GreedyForm(RefinerGraph(module, 2, shortlist))(*blocks.inputs()[:4])
    sampled = SampledForm(RefinerGraph(module, 2, shortlist), VOCAB_SIZE)(*blocks.inputs())
    rows = [row for row in range(NUM_ROWS) if not blocks.temperatures[row]]
    assert rows
    for one, other in zip(greedy, sampled, strict=True):
        assert torch.equal(one[rows], other[rows])


@pytest.mark.parametrize("shortlist", [0, 9])
def test_a_markov_head_drafts_left_to_right(markov: tuple[MarkovHead, dict[str, Tensor]], shortlist: int) -> None:
    module, tensors = markov
    blocks = Blocks()
    assert drafted(module, BLOCK_SIZE - 1, shortlist, blocks) == markov_left_to_right(blocks, tensors, shortlist)
