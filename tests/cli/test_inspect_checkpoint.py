"""`xpress-export inspect` of checkpoints: what it explains, and whether they can be built."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from tests import layouts
from tests.cli.invoke import invoke
from tests.conftest import Built
from tests.tiny import edit_json, write_drafter, write_markov_drafter, write_target
from xpress_export.checkpoints import open_drafter, open_target


def explained(*arguments: object, exit_code: int = 0) -> dict[str, Any]:
    result = invoke("inspect", *arguments, "--json")
    assert result.exit_code == exit_code, result.err
    values: dict[str, Any] = json.loads(result.out)
    return values


def test_drafter(tiny_folders: tuple[Path, Path]) -> None:
    target, drafter = tiny_folders
    shown = invoke("inspect", drafter).assert_done().out
    config = layouts.read_config(drafter)
    for part in ("drafter ", "xPress serving format", f"{config['block_size']} slots", "the real previous token", "can be built"):
        assert part in shown
    values = explained(drafter, "--identity", "--target", target)
    assert values["identity"] == open_drafter(str(drafter)).identity()
    assert values["pairing"] == {"target": str(target), "fits": True, "reason": None}
    assert values["tap_layers"] == config["dflash_config"]["target_layer_ids"]
    assert values["head"]["rank"] == config["xpress_rank"]
    assert "identity" not in explained(drafter)


def test_layers_and_factors(tiny_folders: tuple[Path, Path], tmp_path: Path) -> None:
    layers: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    own: dict[str, Any] = {
        "input_embedding_scale": 4.0,
        "final_logit_softcapping": 30.0,
        "enable_thinking": True,
        "anchor_predecessor": "anchor",
    }
    write_drafter(tmp_path / "drafter", tiny_folders[0], rope_scaling=rope, **layers, **own)
    shown = invoke("inspect", tmp_path / "drafter").assert_done().out
    for part in (
        "1 × the last 6 positions, causal, rotary embedding yarn",
        "1 × all positions, both ways within the block",
        "embedding scale 4, logit cap 30",
        "thinking on",
        "the anchor itself",
    ):
        assert part in shown


def test_heads_and_vocabularies(tiny_folders: tuple[Path, Path], tmp_path: Path) -> None:
    import torch

    target, drafter = tiny_folders
    write_markov_drafter(tmp_path / "markov", target)
    assert "Markov head, rank 8" in invoke("inspect", tmp_path / "markov").assert_done().out
    write_drafter(tmp_path / "bare", target, refiner=False)
    assert "none (bare DFlash)" in invoke("inspect", tmp_path / "bare").assert_done().out
    hidden = layouts.read_config(drafter)["hidden_size"]
    layouts.speculators(drafter, tmp_path / "reduced", draft_token_ids=(1, 4, 9), own_head=torch.ones(3, hidden))
    shown = invoke("inspect", tmp_path / "reduced").assert_done().out
    assert "3 of the tokens, through a head of its own" in shown
    assert "example/target: hidden" in shown
    layouts.training_checkpoint(drafter, tmp_path / "step.pt")
    assert "training checkpoint" in invoke("inspect", tmp_path / "step.pt").assert_done().out


def test_base_model_and_licence_of_the_card(tiny_folders: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(tiny_folders[1], tmp_path / "drafter")
    for front, name in (("base_model: org/target", "org/target"), ("base_model:\n- org/first\n- org/second", "org/first"), ("", None)):
        (tmp_path / "drafter/README.md").write_text(f"---\nlicense: mit\n{front}\n---\nbase_model: org/below\n")
        values = explained(tmp_path / "drafter")
        assert (values["target"]["name"], values["licence"]) == (name, "mit")


def test_target(tiny_folders: tuple[Path, Path], tmp_path: Path) -> None:
    values = explained(tiny_folders[0], "--identity")
    assert (values["kind"], values["can_be_built"]) == ("target", True)
    assert values["identity"] == open_target(str(tiny_folders[0])).identity()
    write_target(tmp_path / "gemma", "gemma2", sliding_window=4, tie_word_embeddings=True)
    shown = invoke("inspect", tmp_path / "gemma").assert_done().out
    for part in ("family gemma2", "2 × the last 4 positions", "attention cap 50, logit cap 30", "tied to the embedding"):
        assert part in shown
    alone = explained(tmp_path / "gemma/config.json")
    assert (alone["judged_by"], alone["family"]) == ("config.json", "gemma2")
    invoke("inspect", tiny_folders[0], "--target", tiny_folders[0]).assert_refused(2, "--target", "target itself")


@pytest.mark.parametrize(
    ("changes", "kind", "reason"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "drafter", "dynamic convolutions"),
        ({"xpress_rank": 9}, "drafter", "asks for"),
        ({"block_size": 1}, "drafter", "block_size"),
        ({"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "dflash_config": ...}, "target", "mixture of experts"),
    ],
)
def test_what_cannot_be_built_is_explained(
    changes: dict[str, Any], kind: str, reason: str, tiny_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    shutil.copytree(tiny_folders[1], tmp_path / "given")
    edit_json(tmp_path / "given/config.json", **changes)
    shown = invoke("inspect", tmp_path / "given").assert_done().out
    assert "cannot be built: " in shown
    assert reason in shown
    values = explained(tmp_path / "given", "--identity")
    assert (values["kind"], values["can_be_built"], values["identity"]) == (kind, False, None)
    assert reason in values["reason"]
    assert values["stated"]["hidden_size"] == layouts.read_config(tmp_path / "given")["hidden_size"]


def test_another_target(tiny_folders: tuple[Path, Path], tmp_path: Path) -> None:
    write_target(tmp_path / "other", "qwen3", hidden_size=48)
    result = invoke("inspect", tiny_folders[1], "--target", tmp_path / "other")
    assert result.exit_code == 1
    hidden = layouts.read_config(tiny_folders[1])["hidden_size"]
    for text in (result.out, result.err):
        assert f"hidden size: {hidden} in drafter" in text
        assert "48 in target" in text
    values = explained(tiny_folders[1], "--target", tmp_path / "other", exit_code=1)
    assert values["can_be_built"]
    assert not values["pairing"]["fits"]


def test_neither_bundle_nor_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, content in (("notes.txt", b"hello"), ("step.pt", b"hello"), ("model.gguf", b"hello"), ("config.json", b"{}")):
        (tmp_path / name).write_bytes(content)
        invoke("inspect", tmp_path / name).assert_refused(2, name)
    invoke("inspect", tmp_path / "empty").assert_refused(2, "neither a bundle")
    invoke("inspect", tmp_path / "nowhere").assert_refused(2, "nowhere")
    (tmp_path / "empty/config.json").write_text("[")
    invoke("inspect", tmp_path / "empty").assert_refused(2, "config.json", "JSON")


def test_a_hub_id_is_explained_by_its_config(tiny_folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def download(hub_id: str, **options: Any) -> str:
        asked.append((hub_id, options["allow_patterns"]))
        (tmp_path / "c0ffee").mkdir(exist_ok=True)
        shutil.copy(tiny_folders[1] / "config.json", tmp_path / "c0ffee")
        return str(tmp_path / "c0ffee")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    values = explained("org/drafter")
    assert (values["revision"], values["can_be_built"], values["judged_by"]) == ("c0ffee", True, "config.json")
    assert set(map(str, asked)) == {str(("org/drafter", ["config.json"]))}

    def offline(_hub_id: str, **_options: Any) -> str:
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    invoke("inspect", "org/drafter").assert_refused(3, "org/drafter", "network")


def test_options_of_the_other_kind(tiny: Built, tiny_folders: tuple[Path, Path]) -> None:
    for option in (("--capacity", "9"), ("--batch", "2"), ("--no-verify",)):
        invoke("inspect", tiny_folders[1], *option).assert_refused(2, option[0], "bundles")
    for option in (("--revision", "main"), ("--identity",)):
        invoke("inspect", tiny.bundle.folder, *option).assert_refused(2, option[0], "checkpoints")
    invoke("inspect", tiny_folders[1], "--drafter", "x").assert_refused(2, "--drafter", "--estimate")
