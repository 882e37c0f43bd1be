"""`xpress-export inspect --estimate`: what it prints, and how it is called."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from tests.cli.invoke import invoke
from tests.conftest import Built


@pytest.fixture
def configs(tiny_folders: tuple[Path, Path], tmp_path: Path) -> list[object]:
    """Arguments that name the tiny checkpoints by copies of their configs."""
    names = ("target.json", "drafter.json")
    for folder, name in zip(tiny_folders, names, strict=True):
        (tmp_path / name).write_bytes((folder / "config.json").read_bytes())
    return ["--target", tmp_path / names[0], "--drafter", tmp_path / names[1]]


def test_estimate(configs: list[object]) -> None:
    shown = invoke("inspect", "--estimate", *configs, "--num-passes", "3,1", "--capacity", "64", "--batch", "2").assert_done().out
    assert str(configs[1]) in shown
    assert "passes 3, 1, 0; shortlist off; sampling; capacity 64, batch 2, prefill chunk 64" in shown
    for graph in ("embed", "target", "head", "drafter", "refiner-k3", "refiner-k1", "refiner-k0-sampled", "accept", "filter-top-p"):
        assert f"\n{graph} " in shown
    for part in ("fp32-length, CPU", "fp16-mask engines, GPU", "assumed, not measured", "scaled from", "Added when a request first asks"):
        assert part in shown
    one = invoke("inspect", "--estimate", *configs, "--precision", "fp32").assert_done().out
    assert "engines" not in one


def test_estimate_with_a_draft_model(configs: list[object]) -> None:
    shown = invoke("inspect", "--estimate", *configs, "--draft-layers", "0-1", "--shortlist", "0,8", "--no-sampling").assert_done().out
    assert "draft    with the target's own: 2 layers, " in shown
    assert "shortlist off, 8; no sampling" in shown
    assert "\ndraft-decoder " in shown and "refiner-k2-c8 " in shown and "sampled" not in shown
    own = invoke("inspect", "--estimate", *configs, "--draft-model", configs[1], "--draft-layers", "2,0").assert_done().out
    assert "draft    with the target's own: 2 layers" in own
    invoke("inspect", "--estimate", *configs, "--draft-layers", "0-3").assert_refused(2, "layer 3 of the draft model does not exist")
    invoke("inspect", "--estimate", *configs, "--draft-model-revision", "main").assert_refused(2, "--draft-model-revision")


def test_estimate_with_a_profile(configs: list[object], tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text("capacity = 96\nbatch = 3\nprefill_chunk = 16\n", encoding="utf-8")
    shown = invoke("inspect", "--estimate", *configs, "--profile", mine, "--batch", "2").assert_done().out
    assert "capacity 96, batch 2, prefill chunk 16" in shown
    invoke("inspect", "--estimate", *configs, "--profile", "edge").assert_refused(2, "profile edge: capacity is 2048, expected 2 to 128")


def test_estimate_json(configs: list[object]) -> None:
    options = ("--precision", "bf16", "--precision", "fp32", "--shortlist", "8,0", "--draft-layers", "1")
    result = invoke("inspect", "--estimate", *configs, *options, "--json").assert_done()
    shown = json.loads(result.out)
    assert list(shown["sets"]) == ["bf16-mask", "fp32-length"]
    assert (shown["options"]["shortlists"], shown["options"]["capacity"]) == ([8, 0], 128)
    assert 0 < shown["draft_model_parameters"] < shown["target_parameters"]
    for made in shown["sets"].values():
        memory = made["memory"]
        assert memory["total"] == sum(memory[part] for part in ("weights", "target_caches", "drafter_caches", "working"))
        assert set(memory["on_demand"]) == {"sampling", "denoising", "lookup", "backlog", "draft_model"}
    assert [gpu["gib"] for gpu in shown["sets"]["bf16-mask"]["gpus"]] == [8, 12, 16, 24, 32, 48, 80]
    assert shown["export"]["peak_bytes"]["low"] <= shown["export"]["peak_bytes"]["high"]
    assert "SmolLM2-135M" in shown["build_scaled_from"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--precision", "int8"), "'int8'"),
        (("--capacity", "1000"), "--capacity"),
        (("--num-passes", "9"), "--num-passes"),
        (("--no-verify",), "--no-verify"),
        (("some-bundle",), "PATH"),
    ],
)
def test_estimate_refuses(arguments: tuple[str, ...], named: str, configs: list[object]) -> None:
    invoke("inspect", "--estimate", *configs, *arguments).assert_refused(2, named)


def test_estimate_needs_both_checkpoints(configs: list[object]) -> None:
    invoke("inspect", "--estimate", *configs[:2]).assert_refused(2, "--drafter")


@pytest.mark.parametrize("option", [("--target", "t"), ("--precision", "fp16"), ("--num-passes", "1")], ids=lambda option: option[0])
def test_options_of_an_estimate_are_not_ignored(option: tuple[str, str], tiny: Built) -> None:
    invoke("inspect", tiny.bundle.folder, *option).assert_refused(2, option[0], "--estimate")


def test_estimate_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(hub_id: str, **options: object) -> str:  # noqa: ARG001
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    invoke("inspect", "--estimate", "--target", "org/target", "--drafter", "org/drafter").assert_refused(3, "org/target", "network")
