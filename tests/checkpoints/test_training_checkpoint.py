"""Training checkpoints (.pt): what they hold is data, and damage is a line."""

from __future__ import annotations

import argparse
import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import layouts
from tests.checkpoints.spoil import assert_refused
from tests.tiny import edit_json, write_drafter
from xpress_export.checkpoints import open_drafter
from xpress_export.checkpoints.config_only import open_drafter_config
from xpress_runtime.errors import CheckpointError, OptionError
from xpress_runtime.sets import AttentionForm


class Harmful:
    """Pickles as a call."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def test_nothing_in_a_training_checkpoint_runs(drafters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "marker"
    layouts.training_checkpoint(drafters / "xpress", tmp_path / "step.pt", args=Harmful(marker))
    assert_refused(lambda: open_drafter(str(tmp_path / "step.pt")), "mkdir", "never loaded")
    assert not marker.exists()
    # The list of what it names only makes a better message: reading itself runs nothing.
    with monkeypatch.context() as patched:
        patched.setattr(torch.serialization, "get_unsafe_globals_in_checkpoint", lambda _path: [])
        assert_refused(lambda: open_drafter(str(tmp_path / "step.pt")), "mkdir", "never loaded")
    assert not marker.exists()
    # The same file would have run it.
    torch.load(tmp_path / "step.pt", weights_only=False)
    assert marker.exists()


def test_harm_inside_the_options(drafters: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    layouts.training_checkpoint(drafters / "xpress", tmp_path / "step.pt", args=argparse.Namespace(model=Harmful(marker)))
    assert_refused(lambda: open_drafter(str(tmp_path / "step.pt")), "mkdir", "never loaded")
    layouts.training_checkpoint(drafters / "xpress", tmp_path / "step.pt", args=argparse.Namespace(path=Path("runs")))
    assert_refused(lambda: open_drafter(str(tmp_path / "step.pt")), "Path", "never loaded")
    assert not marker.exists()


def test_a_plain_pickle_is_no_checkpoint(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    (tmp_path / "step.pt").write_bytes(pickle.dumps(Harmful(marker)))
    assert_refused(lambda: open_drafter(str(tmp_path / "step.pt")), "step.pt", "torch.save")
    assert not marker.exists()


def spoil(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def spoilt(path: Path) -> None:
        content = torch.load(path, weights_only=False)
        change(content)
        torch.save(content, path)

    return spoilt


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-400])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (truncate, ("step.pt", "fetch it again")),
        (lambda path: torch.save([1, 2], path), ("draft_state_dict", "missing", "list")),
        (spoil(lambda content: content.pop("refiner_state_dict")), ("'refiner_state_dict' is missing", "found draft_state_dict")),
        (spoil(lambda content: content["refiner_state_dict"].pop("w1.weight")), ("'refiner_state_dict.w1.weight' is missing",)),
        (spoil(lambda content: content["refiner_state_dict"].pop("w2.weight")), ("'refiner_state_dict.w2.weight' is missing",)),
        (spoil(lambda content: content["draft_state_dict"].pop("fc.weight")), ("'draft_state_dict.fc.weight' is missing",)),
        (spoil(lambda content: content["draft_state_dict"].update(extra=torch.ones(2))), ("'draft_state_dict.extra'", "not part")),
        (spoil(lambda content: content["draft_state_dict"].update(extra=3)), ("'extra'", "no tensor", "int")),
        (spoil(lambda content: content["draft_state_dict"].update({3: torch.ones(2)})), ("'3'", "no tensor")),
        (
            spoil(lambda content: content["draft_state_dict"].update({"fc.weight": torch.ones(40, 80, dtype=torch.int8)})),
            ("'fc.weight'", "int8"),
        ),
        (spoil(lambda content: content["draft_state_dict"].update({"fc.weight": torch.ones(40, 80).to_sparse()})), ("sparse",)),
        (spoil(lambda content: content["draft_state_dict"].update({"fc.weight": torch.empty(40, 80, device="meta")})), ("meta",)),
        (spoil(lambda content: content["draft_state_dict"].update({"fc.weight": torch.ones(40, 40)})), ("[40, 40]", "[40, 80]")),
        (spoil(lambda content: content["refiner_state_dict"].update({"mix.L": torch.ones(8, 5, 5)})), ("block_size 5", "says 4")),
        (spoil(lambda content: content["refiner_state_dict"].update({"mix.L": torch.ones(8)})), ("'refiner_state_dict.mix.L'", "[8]")),
        (lambda path: (path.parent / "config.json").unlink(), ("config.json beside", "convert --base-config")),
        (lambda path: edit_json(path.parent / "config.json", architectures=["Qwen3ForCausalLM"]), ("base drafter", "DFlashDraftModel")),
        (lambda path: edit_json(path.parent / "config.json", block_size=5), ("block_size 4", "says 5")),
        (lambda path: edit_json(path.parent / "config.json", xpress_rank=9), ("xpress_rank 8", "says 9")),
    ],
)
def test_spoilt_training_checkpoint(change: Callable[[Path], None], named: tuple[str, ...], drafters: Path, tmp_path: Path) -> None:
    path = tmp_path / "step.pt"
    layouts.training_checkpoint(drafters / "xpress", path)
    open_drafter(str(path))
    change(path)
    assert_refused(lambda: open_drafter(str(path)), *named)


def test_any_flipped_byte_of_a_training_checkpoint(drafters: Path, tmp_path: Path) -> None:
    """Damage is noticed in one line, or has hit a value, or what no part of the drafter is made of."""
    path = tmp_path / "step.pt"
    layouts.training_checkpoint(drafters / "xpress", path)
    content = path.read_bytes()
    structure = content.index(b"data.pkl")
    generator = random.Random(0)
    noticed = 0
    for _ in range(120):
        spoilt = bytearray(content)
        # The pickle stands first in the archive; its directory stands last.
        place = structure + generator.randrange(4000) if generator.random() < 0.7 else len(content) - 1 - generator.randrange(3000)
        spoilt[place] ^= 1 << generator.randrange(8)
        path.write_bytes(spoilt)
        try:
            drafter = open_drafter(str(path))
            drafter.drafter(8, AttentionForm.MASK)
            drafter.refiner_module()
        except CheckpointError as problem:
            assert str(problem).isprintable()
            noticed += 1
    assert noticed > 60


def test_not_finite_in_a_training_checkpoint(drafters: Path, tmp_path: Path) -> None:
    layouts.training_checkpoint(drafters / "xpress", tmp_path / "step.pt")
    spoil(lambda content: content["refiner_state_dict"]["w2.weight"].fill_(float("nan")))(tmp_path / "step.pt")
    drafter = open_drafter(str(tmp_path / "step.pt"))
    assert_refused(drafter.refiner_module, "'refiner_state_dict.w2.weight'", "not finite")


def test_number_of_passes_of_a_training_checkpoint(drafters: Path, tmp_path: Path) -> None:
    for block_size, expected in ((4, 3), (9, 6)):
        write_drafter(tmp_path / f"{block_size}", drafters / "target", block_size=block_size)
        path = tmp_path / f"trained-{block_size}" / "step.pt"
        layouts.training_checkpoint(tmp_path / f"{block_size}", path)
        refiner = open_drafter(str(path)).refiner
        assert refiner is not None
        assert refiner.num_passes == expected
        edit_json(path.parent / "config.json", xpress_num_passes=1)
        refiner = open_drafter(str(path)).refiner
        assert refiner is not None
        assert refiner.num_passes == 1


def test_base_config_elsewhere(drafters: Path, tmp_path: Path) -> None:
    path = tmp_path / "run/step.pt"
    layouts.training_checkpoint(drafters / "xpress", path, base=False)
    layouts.write_config(tmp_path / "base", layouts.base_config(drafters / "xpress"))
    for base in (tmp_path / "base", tmp_path / "base/config.json"):
        opened = open_drafter(str(path), base_config=base)
        assert opened.refiner is not None
        assert opened.refiner.num_passes == 3
    assert_refused(lambda: open_drafter(str(path), base_config=tmp_path / "none"), "--base-config", "none", error=OptionError)
    assert_refused(lambda: open_drafter(str(drafters / "xpress"), base_config=tmp_path / "base"), "--base-config", error=OptionError)


def test_a_compressed_archive_is_refused_before_it_is_unpacked(drafters: Path, tmp_path: Path) -> None:
    layouts.training_checkpoint(drafters / "xpress", tmp_path / "step.pt")
    with zipfile.ZipFile(tmp_path / "step.pt") as stored, zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as packed:
        for entry in stored.namelist():
            packed.writestr(entry, stored.read(entry))
    assert_refused(lambda: open_drafter(str(tmp_path / "packed.pt")), "packed.pt", "compressed")


def test_a_negated_view_is_its_values(drafters: Path, tmp_path: Path) -> None:
    layouts.training_checkpoint(drafters / "xpress", tmp_path / "step.pt")
    held = torch.load(tmp_path / "step.pt", weights_only=False)
    held["draft_state_dict"]["fc.weight"] = torch._neg_view(-held["draft_state_dict"]["fc.weight"])
    torch.save(held, tmp_path / "viewed.pt")
    # Other bytes of the file, the same tensors.
    assert open_drafter(str(tmp_path / "viewed.pt")).tensors.sha256() == open_drafter(str(tmp_path / "step.pt")).tensors.sha256()


def test_one_beside_other_weights_is_not_read_and_said_so(drafters: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(drafters / "dflash", tmp_path / "both")
    layouts.training_checkpoint(drafters / "xpress", tmp_path / "both/refiner.pt", base=False)
    (tmp_path / "both/optimizer.pt").write_bytes(b"")
    assert open_drafter(str(tmp_path / "both")).format == "bare DFlash"
    assert "name refiner.pt itself" in caplog.text
    assert open_drafter(str(tmp_path / "both/refiner.pt")).head == "xpress"


def test_a_config_alone_does_not_say_its_sizes(drafters: Path, tmp_path: Path) -> None:
    layouts.training_checkpoint(drafters / "xpress", tmp_path / "step.pt")
    assert_refused(lambda: open_drafter_config(str(tmp_path), None), "step.pt", "convert it first")


def test_several_training_checkpoints(drafters: Path, tmp_path: Path) -> None:
    for name in ("a.pt", "b.pt"):
        layouts.training_checkpoint(drafters / "xpress", tmp_path / name)
    assert_refused(lambda: open_drafter(str(tmp_path)), "a.pt, b.pt", "name the one")
    open_drafter(str(tmp_path / "b.pt"))
    # Beside safetensors a .pt file is a left-over.
    shutil.copy(drafters / "dflash/model.safetensors", tmp_path)
    assert open_drafter(str(tmp_path)).format == "bare DFlash"
