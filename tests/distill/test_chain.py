"""The whole recipe on a tiny random target, by its commands; and training that is killed and taken up again."""

from __future__ import annotations

import csv
import functools
import itertools
import json
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.distill.answers import prompt_ids
from examples.distill.batches import FeatureSet
from examples.distill.run_folder import PARTS, RunFolder
from tests.cli.invoke import invoke
from tests.distill.runs import ROOT, recipe, tiny_sections, write_prompts, write_settings, write_speaking_target
from xpress_export.checkpoints import open_drafter

# A random target's answers have no rule, so they can only be learned by heart, and what is best on others says nothing.
BY_HEART = {"steps": 800, "evaluate_steps": 800, "learning_rate": 5e-3, "sequences": 8, "blocks": 8, "dropout": 0.0, "feature_noise": 0.0}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder after ``all``, with its settings beside it; it must not be changed."""
    folder = tmp_path_factory.mktemp("distill")
    target = write_speaking_target(folder / "target")
    sections = tiny_sections(target, write_prompts(folder / "prompts.jsonl", 60), **BY_HEART)
    sections["draft_model"] = {"num_layers": 1, "steps": 40}
    recipe("all", write_settings(folder / "settings.toml", **sections), folder / "run").assert_done()
    return folder / "run"


def test_drafts_what_it_was_trained_on(run: Path, tmp_path: Path) -> None:
    """The benchmark over the training prompts: τ over 1.5, and the tokens are plain decoding's."""
    bundle = next(run.glob("evaluation/step-*/bundle"))
    words = ("--prompts", run / "prompts.jsonl", "--groups", "D", "--max-new-tokens", 24, "--output", tmp_path / "report")
    invoke("bench", bundle, *words, "--fail-under-tau", "1.5").assert_done()
    report = json.loads((tmp_path / "report" / "report.json").read_text(encoding="utf-8"))
    figures = report["modes"]["steps1-k2"]["figures"]
    assert figures["num_same_tokens"] == figures["num_prompts"] > 40


def test_evaluation_measures_every_mode(run: Path) -> None:
    made = json.loads((run / "evaluation" / "evaluation.json").read_text(encoding="utf-8"))
    modes = {row["mode"] for row in made["tables"]["All prompts"]}
    block = {"1 step, no refiner", "1 step, K=1", "1 step, K=2", "2 steps, no refiner", "2 steps, K=2"}
    assert modes == block | {"auto", "B: autoregressive drafter"}
    held_out = (run / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    assert made["prompts"] == len(held_out) > 4
    assert f"on {len(held_out)} of {len(held_out)} prompts" in made["agreement"]


def test_card_tells_how_it_was_made(run: Path) -> None:
    card = (run / "drafter" / "README.md").read_text(encoding="utf-8")
    made = json.loads((run / "drafter" / "training.json").read_text(encoding="utf-8"))
    assert f"step {made['step']:,} of {BY_HEART['steps']}" in card
    assert f"{made['answer_tokens']:,} tokens" in card
    assert "## Measured" in card
    assert str(run.parent) not in card


def test_a_second_time_nothing_is_made_again(run: Path) -> None:
    """Every stage finds its work done: no file of prompts, answers, features or training changes."""
    kept = ("prompts.jsonl", "answers/train/process-0.jsonl", "features/train/process-0-00000.safetensors", "training/curve.csv")
    before = [(run / name).read_bytes() for name in kept]
    for stage in ("prompts", "generate", "features", "train"):
        recipe(stage, run.parent / "settings.toml", run).assert_done()
    assert [(run / name).read_bytes() for name in kept] == before


def test_an_earlier_run_is_begun_with(run: Path, tmp_path: Path) -> None:
    """By the name of its folder, as the settings of that run name it."""
    sections = tiny_sections(run.parent / "target", run.parent / "prompts.jsonl", steps=2, warm_start=str(run))
    folder = tmp_path / "run"
    share_features(run, folder)
    said = recipe("train", write_settings(tmp_path / "settings.toml", **sections), folder).assert_done().err
    assert re.search(rf"begins with (\d+) of \1 tensors of '{re.escape(str(run / 'drafter'))}'", said)
    modes = {(folder / "drafter" / name).stat().st_mode & 0o777 for name in ("config.json", "model.safetensors")}
    assert modes == {(folder / "prompts.jsonl").stat().st_mode & 0o777}


def test_draft_vocabulary_to_the_end(run: Path, tmp_path: Path) -> None:
    """A drafter of some tokens is trained, built and measured: no proposal is outside, and the tokens are plain decoding's."""
    sections = tiny_sections(run.parent / "target", run.parent / "prompts.jsonl", **BY_HEART | {"steps": 300, "evaluate_steps": 300})
    sections["drafter"] |= {"draft_vocab_size": 40}
    settings = write_settings(tmp_path / "settings.toml", **sections)
    folder = tmp_path / "run"
    share_features(run, folder)
    assert "drafts 40 of 430 tokens" in recipe("train", settings, folder).assert_done().err
    recipe("evaluate", settings, folder).assert_done()
    assert "the 40 tokens that the answers hold most often" in (folder / "drafter" / "README.md").read_text(encoding="utf-8")
    made = json.loads((folder / "evaluation" / "evaluation.json").read_text(encoding="utf-8"))
    assert f"on {made['prompts']} of {made['prompts']} prompts" in made["agreement"]
    drafts = set(open_drafter(str(folder / "drafter")).draft_token_ids.tolist())  # type: ignore[union-attr]
    report = json.loads(next(folder.glob("evaluation/*/report/report.json")).read_text(encoding="utf-8"))
    accepted = 0
    for job in report["jobs"]:
        # The first token is prefill's; of each round the last is the target's own, those before it are drafts.
        ends = list(itertools.accumulate(job["acceptance_lengths"], initial=1))
        for begin, end in itertools.pairwise(ends):
            proposals = job["output"][begin : end - 1]
            assert drafts.issuperset(proposals)
            accepted += len(proposals)
    assert accepted > 0


def curve(folder: Path, name: str = "curve.csv") -> list[dict[str, str]]:
    with (folder / "training" / name).open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def without_time(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def share_features(run: Path, folder: Path) -> None:
    """Make a run folder that has what ``run`` had before training."""
    folder.mkdir()
    for name in ("prompts.jsonl", "held_out.jsonl", "prompts.json", "answers", "features"):
        (folder / name).symlink_to(run / name)


def start(stage: str, settings: Path, run: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "examples.distill", stage, str(settings), str(run)]
    # Where the tests run in the background, Ctrl-C is ignored, and processes would inherit that.
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, preexec_fn=heard)  # noqa: PLW1509


def kinds(run: Path) -> set[str]:
    """The files of a run folder, shards and evaluated steps taken together."""
    return {re.sub(r"\d{3,}", "#", path.relative_to(run).as_posix()) for path in run.rglob("*") if path.is_file()}


def kill_in_training(settings: Path, run: Path, randomness: random.Random) -> int:
    """Start training, kill it at a random moment behind its next checkpoint, and say at which step the curve stood."""
    process = start("train", settings, run)
    state = run / "training" / "latest.pt"
    written = state.stat().st_mtime_ns if state.is_file() else 0
    deadline = time.monotonic() + 120
    while not state.is_file() or state.stat().st_mtime_ns == written:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(randomness.uniform(0, 0.3))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return int(curve(run)[-1]["step"])


def test_killed_twice_it_ends_as_if_nothing_had_been(run: Path, tmp_path: Path) -> None:
    """The same checkpoints evaluated, the same curve, the same weights to the last bit."""
    sections: dict[str, Any] = tiny_sections(run.parent / "target", run.parent / "prompts.jsonl", steps=160, evaluate_steps=40)
    # Dropout and noise are on: what is random must be taken up again too.
    sections["training"] |= {"checkpoint_minutes": 0.0005, "learning_rate": 3e-3}
    settings = write_settings(tmp_path / "settings.toml", **sections)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        share_features(run, folder)
    recipe("train", settings, whole).assert_done()
    randomness = random.Random(7)
    stood = [kill_in_training(settings, killed, randomness) for _ in range(2)]
    assert stood[0] < 160 and stood[1] < 160, "training was over before it could be killed"
    assert "goes on at step" in recipe("train", settings, killed).assert_done().err
    assert without_time(curve(killed)) == without_time(curve(whole))
    assert [int(row["step"]) for row in curve(killed)] == list(range(161))
    assert without_time(curve(killed, "evaluations.csv")) == without_time(curve(whole, "evaluations.csv"))
    first, second = (torch.load(folder / "training" / "latest.pt", weights_only=True) for folder in (whole, killed))
    assert first["progress"]["evaluations"] == second["progress"]["evaluations"] == 4
    for name, tensor in first["model"].items():
        assert torch.equal(tensor, second["model"][name]), name


def interrupt(stage: str, settings: Path, run: Path, begun: str) -> None:
    """Press Ctrl-C as soon as the run folder has a file of the pattern ``begun``: one line, no traceback."""
    process = start(stage, settings, run)
    while not list(run.glob(begun)):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    stderr = process.communicate(timeout=60)[1]
    assert process.returncode == 130, stderr
    assert stderr.splitlines()[-1].startswith("interrupted; ")
    assert "Traceback" not in stderr


def test_interrupted_stages_are_finished_by_the_next_run(run: Path, tmp_path: Path) -> None:
    """Each stage is stopped in the middle and run again: every prompt is answered and cached once, and no half file stays."""
    sections = tiny_sections(run.parent / "target", write_prompts(tmp_path / "prompts.jsonl", 120), steps=200, checkpoint_minutes=0.0005)
    sections["answers"] |= {"max_new_tokens": 8, "batch_size": 2}
    sections["features"] |= {"shard_sequences": 1}
    settings = write_settings(tmp_path / "settings.toml", **sections)
    folder = RunFolder(tmp_path / "run")
    recipe("prompts", settings, folder.root).assert_done()
    begun = {
        "generate": "answers/train/process-0.jsonl",
        "features": "features/train/process-0-00001.safetensors",
        "train": "training/latest.pt",
        "evaluate": "evaluation/step-*",
    }
    for stage, pattern in begun.items():
        interrupt(stage, settings, folder.root, pattern)
        recipe(stage, settings, folder.root).assert_done()
    for part in PARTS:
        lines = [line for path in folder.answers(part).glob("*.jsonl") for line in path.read_text(encoding="utf-8").splitlines()]
        assert sorted(json.loads(line)["id"] for line in lines) == sorted(prompt_ids(folder, part))
        assert len(FeatureSet(folder, part)) == len(lines)
    assert [int(row["step"]) for row in curve(folder.root)] == list(range(201))
    assert kinds(folder.root) == {name for name in kinds(run) if not re.search("draft[-_]", name)}
