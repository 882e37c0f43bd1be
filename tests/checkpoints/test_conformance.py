"""The conformance checkpoints, loaded and replayed round by round against what the public implementations computed on them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.checkpoints.replay import NUM_POSITIONS, TargetRun, empty_caches
from xpress_export.checkpoints import check_pairing, open_drafter, open_target
from xpress_export.models.refiner import RefinedBlock
from xpress_runtime.sets import AttentionForm

DATA = Path(__file__).parents[1] / "conformance_data"
CASES = ("qwen3-b4", "llama-b8")
TOLERANCE = 1e-4
NUM_TOKENS = 40


@dataclass(frozen=True)
class Round:
    start: int
    anchor: int
    predecessor: int
    hidden: Tensor
    base: Tensor
    block: RefinedBlock
    verify_logits: Tensor
    accepted: int
    emitted: list[int]


@cache
def expected(case: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((DATA / case / "expected.json").read_text())
    return values


def rounds(case: str, prompt: list[int], num_passes: int, form: AttentionForm) -> Iterator[Round]:
    """The greedy method on the loaded modules, without an end."""
    checkpoint = open_drafter(str(DATA / case / "xpress"))
    config = checkpoint.config
    target = TargetRun(open_target(str(DATA / case / "target")), config.tap_layers, form)
    drafter, refiner = checkpoint.drafter(NUM_POSITIONS, form), checkpoint.refiner_module()
    keys, values = empty_caches(config.backbone), empty_caches(config.backbone)

    _, taps, logits = target.step(prompt, 0)
    context_start, length = 0, len(prompt)
    anchor, predecessor = int(logits[-1].argmax()), prompt[-1]
    while True:
        ids = torch.tensor([[anchor] + [config.mask_token_id] * (config.block_size - 1)])
        hidden, keys, values = drafter(
            target.embedding(ids), taps[None], torch.tensor([context_start]), torch.tensor([length]), keys, values
        )
        base, _ = target.head(hidden, torch.arange(1, config.block_size)[None])
        block = refiner(hidden, base, torch.tensor([anchor]), torch.tensor([predecessor]), num_passes, 0)
        verified = [anchor, *block.drafts[0].tolist()]
        _, taps, logits = target.step(verified, length)
        tokens = logits.argmax(dim=-1).tolist()
        accepted = next((slot for slot in range(config.block_size - 1) if verified[slot + 1] != tokens[slot]), config.block_size - 1)
        yield Round(length, anchor, predecessor, hidden[0], base[0], block, logits, accepted, tokens[: accepted + 1])
        context_start, length = length, length + accepted + 1
        anchor, predecessor = tokens[accepted], verified[accepted]


@pytest.mark.parametrize("form", AttentionForm)
@pytest.mark.parametrize("case", CASES)
def test_rounds(case: str, form: AttentionForm) -> None:
    arrays = load_file(DATA / case / "expected.safetensors")
    default_passes = open_drafter(str(DATA / case / "xpress")).refiner
    assert default_passes is not None
    checked = 0
    for index, entry in enumerate(expected(case)["prompts"]):
        replayed = rounds(case, entry["prompt"], default_passes.num_passes, form)
        for number, wanted in enumerate(entry.get("rounds", [])):
            got = next(replayed)
            assert (got.start, got.anchor, got.predecessor) == (wanted["start"], wanted["anchor"], wanted["predecessor"])
            assert [drafts[0].tolist() for drafts in got.block.passes] == wanted["passes"]
            assert got.accepted == wanted["accepted"]
            prefix = f"p{index}.r{number}."
            for name, values in (
                ("hidden", got.hidden),
                ("base", got.base),
                ("refined", got.block.scores[0]),
                ("verify_logits", got.verify_logits),
            ):
                assert (values - arrays[prefix + name]).abs().max() < TOLERANCE, prefix + name
                checked += 1
    assert checked == len(arrays)


@pytest.mark.parametrize("case", CASES)
def test_acceptance_lengths_and_tokens_of_every_number_of_passes(case: str) -> None:
    for entry in expected(case)["prompts"]:
        for num_passes, wanted in entry["by_passes"].items():
            tokens, lengths = [entry["plain"][0]], []
            replayed = rounds(case, entry["prompt"], int(num_passes), AttentionForm.LENGTH)
            # The reference counts what rounds emit, without the first token that prefill gave.
            while sum(lengths) < NUM_TOKENS:
                got = next(replayed)
                tokens += got.emitted
                lengths.append(len(got.emitted))
            assert tokens[:NUM_TOKENS] == entry["plain"] == wanted["tokens"]
            assert lengths == wanted["acceptance_lengths"]


@pytest.mark.parametrize("case", CASES)
def test_plain_decoding(case: str) -> None:
    for entry in expected(case)["prompts"]:
        run = TargetRun(open_target(str(DATA / case / "target")), (0,))
        _, _, logits = run.step(entry["prompt"], 0)
        tokens = [int(logits[-1].argmax())]
        while len(tokens) < NUM_TOKENS:
            _, _, logits = run.step(tokens[-1:], len(entry["prompt"]) + len(tokens) - 1)
            tokens.append(int(logits[-1].argmax()))
        assert tokens == entry["plain"]


@pytest.mark.parametrize("case", CASES)
def test_bare_dflash_is_the_same_backbone(case: str) -> None:
    bare, full = open_drafter(str(DATA / case / "dflash")), open_drafter(str(DATA / case / "xpress"))
    assert bare.refiner is None
    assert bare.config == full.config
    ours, theirs = (checkpoint.drafter(8, AttentionForm.MASK).state_dict() for checkpoint in (bare, full))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert bare.identity() != full.identity()
    for checkpoint in (bare, full):
        check_pairing(open_target(str(DATA / case / "target")), checkpoint)
