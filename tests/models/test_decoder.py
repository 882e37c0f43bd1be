"""The decoder on static caches: rolling back is a smaller position, rows of a batch stand where they like, taps are transformers' own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.close import assert_close
from tests.tiny import write_target
from xpress_export.checkpoints import TargetCheckpoint, open_target
from xpress_export.models.decoder import Decoder, Head, select_rows
from xpress_runtime.sets import AttentionForm

# fp32 through three layers, sums in another order.
TOLERANCE = 1e-5

NUM_POSITIONS = 32
NUM_LAYERS = 3
GARBAGE = 3e4

PROMPT = [5, 17, 60, 0, 33, 2]
BLOCK = [41, 9, 9, 30]
LATER = [12, 50, 7, 7]


@dataclass
class Case:
    """A random target and the transformers model that it came from."""

    checkpoint: TargetCheckpoint
    model: Any
    decoders: dict[AttentionForm, Decoder]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("decoder")
    model = write_target(folder, "qwen3")
    checkpoint = open_target(str(folder))
    taps = tuple(range(NUM_LAYERS))
    return Case(checkpoint, model, {form: checkpoint.decoder(taps, NUM_POSITIONS, form) for form in AttentionForm})


class Run:
    """Token ids in, hidden states and taps of every layer out; several rows, each at its own position."""

    def __init__(self, case: Case, batch: int = 1, form: AttentionForm = AttentionForm.LENGTH) -> None:
        config = case.checkpoint.config
        self.embedding = case.checkpoint.embedding()
        self.decoder = case.decoders[form]
        shape = (batch, config.num_kv_heads, NUM_POSITIONS, config.head_dim)
        self.keys = [torch.full(shape, GARBAGE) for _ in range(NUM_LAYERS)]
        self.values = [torch.full(shape, -GARBAGE) for _ in range(NUM_LAYERS)]

    def step(self, ids: list[list[int]], positions: list[int]) -> tuple[Tensor, Tensor]:
        hidden: Tensor
        taps: Tensor
        embeddings = self.embedding(torch.tensor(ids))
        hidden, taps, self.keys, self.values = self.decoder(embeddings, torch.tensor(positions), self.keys, self.values)
        return hidden, taps


@pytest.mark.parametrize("form", AttentionForm)
@pytest.mark.parametrize("kept", range(len(BLOCK) + 1))
def test_rollback_is_a_smaller_position(case: Case, kept: int, form: AttentionForm) -> None:
    rolled_back = Run(case, form=form)
    rolled_back.step([PROMPT], [0])
    rolled_back.step([BLOCK], [len(PROMPT)])
    found = rolled_back.step([LATER], [len(PROMPT) + kept])

    fresh = Run(case, form=form)
    fresh.step([PROMPT + BLOCK[:kept]], [0])
    expected = fresh.step([LATER], [len(PROMPT) + kept])
    assert_close(found[0], expected[0], TOLERANCE)
    assert_close(found[1], expected[1], TOLERANCE)


def test_rejected_rows_are_overwritten(case: Case) -> None:
    """Row by row after a rejected block, down to single tokens: the garbage of it is never seen."""
    run = Run(case)
    run.step([PROMPT], [0])
    run.step([BLOCK], [len(PROMPT)])
    found = [run.step([[token]], [len(PROMPT) + 1 + index])[0][0, 0] for index, token in enumerate(LATER)]
    expected, _ = Run(case).step([[*PROMPT, BLOCK[0], *LATER]], [0])
    assert_close(torch.stack(found), expected[0, len(PROMPT) + 1 :], TOLERANCE)


@pytest.mark.parametrize("form", AttentionForm)
def test_rows_of_a_batch_stand_anywhere(case: Case, form: AttentionForm) -> None:
    """Three rows that have kept 0, 2 and all tokens of a block equal three runs of their own."""
    kept = [0, 2, len(BLOCK)]
    prompts = [PROMPT, PROMPT[::-1], PROMPT[2:] + PROMPT[:2]]
    blocks, later = [BLOCK, LATER, BLOCK[::-1]], [LATER, BLOCK, LATER[::-1]]
    positions = [len(PROMPT) + count for count in kept]
    together = Run(case, 3, form)
    together.step(prompts, [0, 0, 0])
    together.step(blocks, [len(PROMPT)] * 3)
    hidden, taps = together.step(later, positions)
    for row in range(3):
        alone = Run(case, 1, form)
        alone.step([prompts[row]], [0])
        alone.step([blocks[row]], [len(PROMPT)])
        expected = alone.step([later[row]], [positions[row]])
        assert_close(hidden[row], expected[0][0], TOLERANCE)
        assert_close(taps[row], expected[1][0], TOLERANCE)


def test_forms_agree(case: Case) -> None:
    by_length, by_mask = (Run(case, 2, form) for form in AttentionForm)
    for ids, positions in (([PROMPT, LATER + BLOCK[:2]], [0, 0]), ([BLOCK, LATER], [6, 3]), ([[1], [2]], [8, 7])):
        for found, expected in zip(by_mask.step(ids, positions), by_length.step(ids, positions), strict=True):
            assert_close(found, expected, TOLERANCE)


@pytest.mark.parametrize("form", AttentionForm)
def test_taps_are_the_hidden_states_of_transformers(case: Case, form: AttentionForm) -> None:
    """The last layer's is read after the final norm, the others' before anything follows them."""
    run = Run(case, form=form)
    chunks = [run.step([PROMPT], [0]), run.step([BLOCK], [len(PROMPT)]), run.step([LATER[:1]], [len(PROMPT) + len(BLOCK)])]
    hidden, taps = (torch.cat(parts, dim=1)[0] for parts in zip(*chunks, strict=True))
    with torch.no_grad():
        states = case.model(torch.tensor([[*PROMPT, *BLOCK, LATER[0]]]), output_hidden_states=True).hidden_states
    assert len(states) == NUM_LAYERS + 1
    for layer, tap in enumerate(taps.chunk(NUM_LAYERS, dim=-1)):
        assert_close(tap, states[layer + 1][0], TOLERANCE)
    assert torch.equal(taps[:, -hidden.shape[1] :], hidden)
    # The final norm does something: without it the last tap would be another.
    assert (run.decoder.norm.weight - 1).abs().max() > 0.1


def test_taps_keep_the_order_they_are_asked_in(case: Case) -> None:
    run = Run(case)
    _, all_taps = run.step([PROMPT], [0])
    by_layer = all_taps.chunk(NUM_LAYERS, dim=-1)
    other = Run(case)
    other.decoder = case.checkpoint.decoder((2, 0), NUM_POSITIONS, AttentionForm.LENGTH)
    _, taps = other.step([PROMPT], [0])
    assert torch.equal(taps, torch.cat([by_layer[2], by_layer[0]], dim=-1))


def test_past_the_end_is_refused(case: Case) -> None:
    run = Run(case)
    run.step([BLOCK], [NUM_POSITIONS - len(BLOCK)])
    with pytest.raises(IndexError):
        run.step([BLOCK], [NUM_POSITIONS - len(BLOCK) + 1])


def test_head_ranks_the_rows_that_are_asked_for(case: Case) -> None:
    head: Head = case.checkpoint.head()
    hidden = torch.randn(2, 5, case.checkpoint.config.hidden_size, generator=torch.Generator().manual_seed(0))
    rows = torch.tensor([[4, 0, 0], [1, 3, 2]])
    logits, token = head(hidden, rows)
    assert logits.dtype == torch.float32
    for row, index in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)):
        expected = case.model.lm_head.weight @ hidden[row, rows[row, index]]
        assert_close(logits[row, index], expected.detach(), TOLERANCE)
        assert token[row, index] == expected.argmax()
    assert torch.equal(select_rows(hidden, rows)[1, 1], hidden[1, 3])
