"""`xpress-export convert`: what it writes, what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import layouts
from tests.cli.invoke import invoke, listing
from tests.tiny import edit_json
from xpress_export.checkpoints import open_drafter


@pytest.fixture
def given(tiny_folders: tuple[Path, Path], tmp_path: Path) -> Path:
    """The tiny drafter as the speculators library writes it."""
    layouts.speculators(tiny_folders[1], tmp_path / "given")
    (tmp_path / "given/LICENSE").write_text("MIT License\n")
    return tmp_path / "given"


def test_report(given: Path, tmp_path: Path) -> None:
    shown = invoke("convert", given, "--output", tmp_path / "out").assert_done().out
    for part in (
        "speculators xpress",
        "xpress_num_passes",
        "← num_jacobi_passes",
        "← aux_hidden_state_layer_ids less one",
        "← refiner_head.token_embed.weight",
        "carried over LICENSE",
    ):
        assert part.replace("← aux", "aux") in shown
    assert set(listing(tmp_path / "out")) == {"config.json", "model.safetensors", "conversion.json", "LICENSE"}
    assert open_drafter(str(tmp_path / "out")).identity() == open_drafter(str(given)).identity()


def test_names_from_the_checkpoint_are_escaped(given: Path, tmp_path: Path) -> None:
    (given / "README\n\x1b[31m.md").write_text("x")
    shown = invoke("convert", given, "--output", tmp_path / "out").assert_done().out
    assert "\x1b" not in shown
    assert "\\x1b[31m.md" in shown


def test_json(given: Path, tmp_path: Path) -> None:
    options = ("--num-passes", "1", "--anchor-predecessor", "anchor", "--json")
    values = json.loads(invoke("convert", given, "--output", tmp_path / "out", *options).assert_done().out)
    assert values.pop("folder") == str(tmp_path / "out")
    assert values == json.loads((tmp_path / "out/conversion.json").read_text())
    assert values["fields"]["xpress_num_passes"] == "--num-passes"
    assert values["tensors"]["xpress_head.mix.L"] == "refiner_head.mix_l"
    refiner = open_drafter(str(tmp_path / "out")).refiner
    assert refiner is not None
    assert (refiner.num_passes, refiner.anchor_predecessor) == (1, "anchor")


def test_training_checkpoint(tiny_folders: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "run/step.pt"
    layouts.training_checkpoint(tiny_folders[1], path, base=False)
    invoke("convert", path, "--output", tmp_path / "out").assert_refused(2, "config.json", "--base-config")
    assert not (tmp_path / "out").exists()
    layouts.write_config(tmp_path / "base", layouts.base_config(tiny_folders[1]))
    invoke("convert", path, "--output", tmp_path / "out", "--base-config", tmp_path / "base").assert_done()
    assert open_drafter(str(tmp_path / "out")).format == "xPress serving format"


def test_nothing_is_replaced_without_force(given: Path, tmp_path: Path) -> None:
    invoke("convert", given, "--output", tmp_path / "out").assert_done()
    before = (tmp_path / "out/model.safetensors").stat().st_ino
    invoke("convert", given, "--output", tmp_path / "out").assert_refused(2, "exists already", "--force")
    assert (tmp_path / "out/model.safetensors").stat().st_ino == before
    invoke("convert", given, "--output", tmp_path / "out", "--force").assert_done()
    assert (tmp_path / "out/model.safetensors").stat().st_ino != before
    invoke("convert", given, "--output", given, "--force").assert_refused(2, "not replaced")


def test_refused(given: Path, tiny_folders: tuple[Path, Path], tmp_path: Path) -> None:
    out = ("--output", tmp_path / "out")
    invoke("convert", tiny_folders[0], *out).assert_refused(2, "not a drafter")
    invoke("convert", given, *out, "--num-passes", "0").assert_refused(2, "--num-passes")
    invoke("convert", given, *out, "--num-passes", "9").assert_refused(2, "--num-passes is 9")
    invoke("convert", given, *out, "--anchor-predecessor", "next").assert_refused(2, "--anchor-predecessor")
    invoke("convert", given, *out, "--base-config", given).assert_refused(2, "--base-config")
    invoke("convert", given).assert_refused(2, "--output")
    edit_json(given / "config.json", sample_from_anchor=True)
    invoke("convert", given, *out).assert_refused(2, "sample_from_anchor")
    assert [path.name for path in tmp_path.iterdir()] == ["given"]
