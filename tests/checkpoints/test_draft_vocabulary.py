"""Drafters with tables of their own: a reduced vocabulary with its head, and copies of the target's tables."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import layouts
from tests.checkpoints.same import assert_same
from tests.checkpoints.spoil import assert_refused
from tests.tiny import edit_json
from xpress_export.checkpoints import check_pairing, open_drafter, open_pair, open_target
from xpress_export.checkpoints.config_only import open_pair_configs
from xpress_export.convert import convert_drafter
from xpress_runtime.errors import PairingError

IDS = (0, 1, 3, 7, 19, 20, 44, 59, 60)


@pytest.fixture(scope="module")
def reduced(drafters: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = tmp_path_factory.mktemp("reduced") / "given"
    layouts.speculators(drafters / "xpress", given, draft_token_ids=IDS, own_head=torch.randn(len(IDS), 40))
    return given


def test_reduced_vocabulary(reduced: Path, drafters: Path, tmp_path: Path) -> None:
    _, drafter = open_pair(str(drafters / "target"), str(reduced))
    assert (drafter.config.draft_vocab_size, drafter.has_own_head) == (len(IDS), True)
    assert drafter.draft_token_ids is not None
    assert drafter.draft_token_ids.tolist() == list(IDS)
    published = load_file(reduced / "model.safetensors")
    assert torch.equal(drafter.own_head_table(), published["lm_head.weight"])
    module = drafter.refiner_module()
    full = load_file(drafters / "xpress/model.safetensors")["xpress_head.w2.weight"]
    for token in range(61):
        assert torch.equal(module.w2[token], full[token] if token in IDS else torch.zeros(8))
    assert torch.equal(module.w1, published["refiner_head.token_embed.weight"])
    convert_drafter(drafter, tmp_path / "converted")
    converted = open_drafter(str(tmp_path / "converted"))
    assert_same(converted, drafter)
    assert converted.identity() == drafter.identity()
    assert converted.draft_token_ids is not None
    assert torch.equal(converted.draft_token_ids, drafter.draft_token_ids)
    assert torch.equal(converted.own_head_table(), drafter.own_head_table())
    stored = load_file(tmp_path / "converted/model.safetensors")
    assert {"d2t", "lm_head.weight"} < stored.keys()
    assert stored["d2t"].dtype == torch.int64


def test_reduced_vocabulary_by_its_config(reduced: Path, drafters: Path) -> None:
    _, drafter = open_pair_configs(str(drafters / "target"), str(reduced))
    assert drafter.has_own_head
    assert drafter.draft_token_ids is not None
    assert drafter.draft_token_ids.tolist() == list(range(len(IDS)))
    with torch.device("meta"):
        assert drafter.refiner_module().w2.shape == (61, 8)


def changed(**tensors: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        held = load_file(path / "model.safetensors") | tensors
        save_file({name: tensor for name, tensor in held.items() if tensor is not ...}, path / "model.safetensors")

    return change


OFFSETS = torch.tensor(IDS) - torch.arange(len(IDS))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (changed(d2t=...), ("draft_vocab_size is 9 of 61", "'d2t' is missing")),
        (changed(**{"lm_head.weight": ...}), ("draft_vocab_size is 9 of 61", "'lm_head.weight' is missing")),
        (changed(**{"lm_head.weight": torch.ones(61, 40)}), ("'lm_head.weight'", "[61, 40]", "[9, 40]")),
        (changed(d2t=OFFSETS[:-1].clone()), ("'d2t'", "[8]", "[9]")),
        (changed(d2t=OFFSETS + 1), ("'d2t'", "token 61", "0 to 60")),
        (changed(d2t=OFFSETS - 1), ("'d2t'", "token -1", "0 to 60")),
        (changed(d2t=OFFSETS.index_fill(0, torch.tensor([1]), -1)), ("'d2t'", "same token")),
        (changed(d2t=OFFSETS.float()), ("'d2t'", "F32")),
        (changed(d2t=torch.zeros(9, dtype=torch.bool)), ("'d2t'", "flags")),
        (changed(t2d=torch.zeros(61, dtype=torch.bool)), ("'d2t' and 't2d' disagree",)),
        (changed(t2d=torch.zeros(60, dtype=torch.bool)), ("'t2d'", "[60]", "[61]")),
        (changed(**{"refiner_head.readout.weight": torch.ones(61, 8)}), ("'refiner_head.readout.weight'", "[61, 8]", "[9, 8]")),
        (lambda path: edit_json(path / "config.json", draft_vocab_size=62), ("draft_vocab_size", "62")),
    ],
)
def test_spoilt_vocabulary(change: Callable[[Path], None], named: tuple[str, ...], reduced: Path, tmp_path: Path) -> None:
    shutil.copytree(reduced, tmp_path / "given")
    change(tmp_path / "given")
    assert_refused(lambda: open_drafter(str(tmp_path / "given")), *named)


def test_a_markov_head_needs_the_whole_vocabulary(drafters: Path, tmp_path: Path) -> None:
    layouts.speculators(drafters / "markov", tmp_path, draft_token_ids=IDS, own_head=torch.ones(len(IDS), 40))
    assert_refused(lambda: open_drafter(str(tmp_path)), "Markov head", "9 of 61")


# Tables beside the drafter's own.


def test_tables_of_the_target(drafters: Path, tmp_path: Path) -> None:
    tables = load_file(drafters / "target/model.safetensors")
    embedding, head = tables["model.embed_tokens.weight"], tables["lm_head.weight"]
    layouts.speculators(drafters / "xpress", tmp_path / "same", target_tables=(embedding, head), own_head=head.clone())
    alone = open_drafter(str(tmp_path / "same"))
    assert alone.has_own_head
    _, paired = open_pair(str(drafters / "target"), str(tmp_path / "same"))
    assert not paired.has_own_head
    assert paired.identity() == alone.identity()
    layouts.speculators(drafters / "xpress", tmp_path / "other", target_tables=(embedding, head), own_head=head + 1)
    _, paired = open_pair(str(drafters / "target"), str(tmp_path / "other"))
    assert paired.has_own_head
    assert torch.equal(paired.own_head_table(), head + 1)
    conversion = convert_drafter(paired, tmp_path / "converted")
    converted = open_drafter(str(tmp_path / "converted"))
    assert converted.identity() == paired.identity()
    assert torch.equal(converted.own_head_table(), head + 1)
    assert sorted(conversion.left_out) == ["embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight"]
    layouts.speculators(drafters / "xpress", tmp_path / "wrong", target_tables=(embedding + 1, head))
    drafter = open_drafter(str(tmp_path / "wrong"))
    with pytest.raises(PairingError, match="embeddings of its own is not supported"):
        check_pairing(open_target(str(drafters / "target")), drafter)


def test_quantised_tensors_are_refused_beside_ids(reduced: Path, tmp_path: Path) -> None:
    shutil.copytree(reduced, tmp_path / "given")
    changed(**{"norm.weight": torch.ones(40, dtype=torch.int64)})(tmp_path / "given")
    assert_refused(lambda: open_drafter(str(tmp_path / "given")), "'norm.weight'", "I64", "quantised")
