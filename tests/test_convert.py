"""Conversion to the serving format: every bit is kept, and only conversions are replaced."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tests import layouts
from tests.checkpoints.spoil import assert_refused
from xpress_export.checkpoints import open_drafter
from xpress_export.convert import convert_drafter
from xpress_runtime.errors import OptionError, OutputError


def test_conversion_keeps_every_dtype_and_shards(drafters: Path, tmp_path: Path) -> None:
    shutil.copytree(drafters / "xpress", tmp_path / "given")
    held = load_file(tmp_path / "given/model.safetensors")
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    stored = {name: tensor.to(dtypes[index % 3]) for index, (name, tensor) in enumerate(held.items())}
    save_file(stored, tmp_path / "given/model.safetensors")
    (tmp_path / "given/README.md").write_text("---\nlicense: mit\n---\n")
    drafter = open_drafter(str(tmp_path / "given"))
    convert_drafter(drafter, tmp_path / "whole")
    conversion = convert_drafter(drafter, tmp_path / "sharded", max_shard_bytes=20_000)
    files = sorted((tmp_path / "sharded").glob("model-*.safetensors"))
    assert len(files) > 2
    shards = {name: tensor for path in files for name, tensor in load_file(path).items()}
    for written in (load_file(tmp_path / "whole/model.safetensors"), shards):
        assert written.keys() == stored.keys()
        assert all(written[name].dtype == stored[name].dtype and torch.equal(written[name], stored[name]) for name in stored)
    for name in ("whole", "sharded"):
        assert open_drafter(str(tmp_path / name)).identity() == drafter.identity()
        assert open_drafter(str(tmp_path / name)).licence == "mit"
    assert conversion.carried == ("README.md",)
    record = json.loads((tmp_path / "sharded/conversion.json").read_text())
    assert record["identity"] == drafter.identity()
    assert record["source"] == str(tmp_path / "given")
    assert record["tensors"].keys() == stored.keys()
    assert record["fields"].keys() == layouts.read_config(tmp_path / "sharded").keys()


def test_conversion_replaces_only_conversions(drafters: Path, tmp_path: Path) -> None:
    drafter = open_drafter(str(drafters / "xpress"))
    convert_drafter(drafter, tmp_path / "out")
    assert_refused(lambda: convert_drafter(drafter, tmp_path / "out"), "exists already", "--force", error=OutputError)
    convert_drafter(drafter, tmp_path / "out", overwrite=True)
    for name in ("notes.txt", "README_mine.txt"):
        (tmp_path / "out" / name).write_text("mine")
        assert_refused(lambda: convert_drafter(drafter, tmp_path / "out", overwrite=True), name, error=OutputError)
        (tmp_path / "out" / name).unlink()
    # A checkpoint has files of the same names, and is no conversion.
    shutil.copytree(drafters / "dflash", tmp_path / "precious")
    assert_refused(lambda: convert_drafter(drafter, tmp_path / "precious", overwrite=True), "not replaced", error=OutputError)
    mine = open_drafter(str(tmp_path / "precious"))
    assert_refused(lambda: convert_drafter(mine, tmp_path / "precious", overwrite=True), "itself", error=OutputError)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "precious"]


def test_conversion_of_damaged_values_leaves_nothing(drafters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_arguments: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full_disk)
    drafter = open_drafter(str(drafters / "xpress"))
    assert_refused(lambda: convert_drafter(drafter, tmp_path / "out"), "disk", error=OutputError)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_line(drafters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: object, **_options: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    assert_refused(lambda: convert_drafter(open_drafter(str(drafters / "xpress")), tmp_path / "out"), "No space left", error=OutputError)
    assert list(tmp_path.iterdir()) == []


def test_values_that_are_not_finite_are_not_converted(drafters: Path, tmp_path: Path) -> None:
    shutil.copytree(drafters / "xpress", tmp_path / "given")
    held = load_file(tmp_path / "given/model.safetensors")
    held["norm.weight"][3] = float("nan")
    save_file(held, tmp_path / "given/model.safetensors")
    assert_refused(lambda: convert_drafter(open_drafter(str(tmp_path / "given")), tmp_path / "out"), "norm.weight", "not finite")


def test_options_of_a_conversion(drafters: Path, tmp_path: Path) -> None:
    bare, xpress = open_drafter(str(drafters / "dflash")), open_drafter(str(drafters / "xpress"))
    assert_refused(lambda: convert_drafter(bare, tmp_path / "out", num_passes=1), "--num-passes", "none", error=OptionError)
    assert_refused(lambda: convert_drafter(bare, tmp_path / "out", anchor_predecessor="anchor"), "--anchor-predecessor", error=OptionError)
    assert_refused(lambda: convert_drafter(xpress, tmp_path / "out", num_passes=4), "--num-passes is 4", "1 to 3", error=OptionError)
    assert not (tmp_path / "out").exists()
