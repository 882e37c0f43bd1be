"""Answers, features and batches against what they are made from; warm starts from other formats; several processes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples.distill.answers import read_answers
from examples.distill.batches import FeatureSet, Sampler
from examples.distill.run_folder import RunFolder
from tests.distill.runs import ROOT, recipe, refused, tiny_sections, write_prompts, write_settings, write_speaking_target
from tests.distill.test_drafter import opened, settings_of
from tests.layouts import speculators, training_checkpoint


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, and a run up to its features; it must not be changed."""
    folder = tmp_path_factory.mktemp("stages")
    write_speaking_target(folder / "target")
    sections = tiny_sections(folder / "target", write_prompts(folder / "prompts.jsonl", 30), steps=12)
    sections["answers"] |= {"batch_size": 7}
    settings = write_settings(folder / "settings.toml", **sections)
    for stage in ("prompts", "generate", "features"):
        recipe(stage, settings, folder / "run").assert_done()
    return folder


@torch.no_grad()
def test_answers_are_the_targets_own_greedy_ones(made: Path) -> None:
    """One prompt at a time, without padding or a cache."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(made / "target", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(made / "target")
    rows = {row["id"]: row for row in map(json.loads, (made / "run" / "prompts.jsonl").read_text().splitlines())}
    answers = read_answers(RunFolder(made / "run"), "train")
    assert {answer.id for answer in answers} == rows.keys()
    for answer in answers[:8]:
        expected = tokenizer.apply_chat_template(rows[answer.id]["messages"], add_generation_prompt=True, return_dict=False)
        assert answer.prompt == expected
        text = list(answer.prompt)
        while (len(text) < len(answer.prompt) + 24 and text[-1] != 2) or len(text) == len(answer.prompt):
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
        assert answer.answer == text[len(answer.prompt) :]


@torch.no_grad()
def test_features_are_the_targets_hidden_states(made: Path) -> None:
    """Within half precision, one sequence at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(made / "target", dtype=torch.float32)
    answers = {answer.id: answer for answer in read_answers(RunFolder(made / "run"), "train")}
    found = FeatureSet(RunFolder(made / "run"), "train")
    assert len(found) == len(answers)
    for sequence in found.all():
        answer = answers[sequence.span.id]
        assert sequence.tokens.tolist() == answer.prompt + answer.answer
        assert sequence.span.start == len(answer.prompt)
        output = model.model(sequence.tokens.long()[None], output_hidden_states=True)
        # The last layer's is behind the final norm, as transformers lists it.
        taps = torch.cat([output.hidden_states[1], output.hidden_states[2]], dim=-1)[0]
        torch.testing.assert_close(sequence.taps.float(), taps, atol=5e-3, rtol=2e-3)
        assert sequence.final is not None
        torch.testing.assert_close(sequence.final.float(), output.last_hidden_state[0], atol=5e-3, rtol=2e-3)


def sampler(made: Path, process: int = 0, num_processes: int = 1, seed: int = 0) -> Sampler:
    features = FeatureSet(RunFolder(made / "run"), "train")
    shares = {"revealed_share": 0.5, "process": process, "num_processes": num_processes, "seed": seed}
    return Sampler(features, block_size=4, mask_token_id=0, sequences=3, blocks=5, **shares)  # type: ignore[arg-type]


def test_batches_depend_on_seed_step_and_process_only(made: Path) -> None:
    first, other = sampler(made), sampler(made)
    other.batch(9)
    for step in (0, 5):
        assert torch.equal(first.batch(step).blocks.shown, other.batch(step).blocks.shown)
        assert torch.equal(first.batch(step).taps, other.batch(step).taps)
    assert not torch.equal(sampler(made, seed=1).batch(0).blocks.anchors, first.batch(0).blocks.anchors)


def test_processes_see_every_sequence_once_an_epoch(made: Path) -> None:
    size = len(FeatureSet(RunFolder(made / "run"), "train"))
    samplers = [sampler(made, process, 2) for process in range(2)]
    seen = [index for step in range(size) for each in samplers for index in each.indices(step)]
    for epoch in range(6):
        assert sorted(seen[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_blocks_show_what_they_should(made: Path) -> None:
    """Anchors lie in the answer; half of the blocks show one to P-2 further tokens; labels are the true ones."""
    features = FeatureSet(RunFolder(made / "run"), "train")
    revealed = []
    for step in range(40):
        batch = sampler(made)
        found = batch.batch(step)
        for row, sequence in enumerate(features.read(batch.indices(step))):
            for block, anchor in enumerate(found.blocks.anchors[row].tolist()):
                assert sequence.span.start <= anchor < len(sequence.tokens) - 1
                true = sequence.tokens[anchor : anchor + 4].tolist()
                shown = found.blocks.shown[row, block].tolist()
                assert shown[0] == true[0]
                inside = len(true) - 1
                is_shown = [not counted for counted in found.blocks.counted[row, block].tolist()[:inside]]
                assert shown[1 : 1 + inside] == [token if known else 0 for token, known in zip(true[1:], is_shown, strict=True)]
                if inside == 3:
                    revealed.append(sum(is_shown))
    assert max(revealed) == 2
    assert 0.4 < sum(count > 0 for count in revealed) / len(revealed) < 0.6


@pytest.mark.parametrize("layout", ["speculators", "training checkpoint"])
def test_warm_start_from_other_formats(tiny_folders: tuple[Path, Path], tmp_path: Path, layout: str) -> None:
    """Whatever the exporter reads, under whatever names."""
    target, drafter = tiny_folders
    if layout == "speculators":
        speculators(drafter, tmp_path / "other")
        place = tmp_path / "other"
    else:
        training_checkpoint(drafter, tmp_path / "other" / "step.pt")
        place = tmp_path / "other" / "step.pt"
    settings = settings_of(target, drafter)
    expected = opened(settings)[0].serving_state()
    training = settings.training.model_copy(update={"warm_start": str(place)})
    found = opened(settings.model_copy(update={"training": training}))[0].serving_state()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_warm_start_of_other_sizes_is_refused(made: Path, tiny_folders: tuple[Path, Path], tmp_path: Path) -> None:
    sections = tiny_sections(made / "target", made / "prompts.jsonl", steps=12, warm_start=str(tiny_folders[1]))
    settings = write_settings(tmp_path / "settings.toml", **sections)
    line = refused("train", settings, made / "run")
    assert "vocabulary size" in line


def test_answers_to_prompts_that_were_taken_away_are_not_trained_on(made: Path, tmp_path: Path) -> None:
    """Answers and features stay on disk, and count no more."""
    run = tmp_path / "run"
    shutil.copytree(made / "run", run)
    rows = (run / "prompts.jsonl").read_text().splitlines(keepends=True)
    (run / "prompts.jsonl").write_text("".join(rows[3:]))
    kept = {json.loads(row)["id"] for row in rows[3:]}
    assert {answer.id for answer in read_answers(RunFolder(run), "train")} == kept
    assert {sequence.span.id for sequence in FeatureSet(RunFolder(run), "train").all()} == kept


@pytest.mark.slow
def test_two_processes_share_the_work(made: Path, tmp_path: Path) -> None:
    """Under ``torchrun``: every prompt answered once, and training ends with one drafter."""
    sections = tiny_sections(made / "target", made / "prompts.jsonl", steps=12, evaluate_steps=6)
    settings = write_settings(tmp_path / "settings.toml", **sections)
    run = tmp_path / "run"
    recipe("prompts", settings, run).assert_done()
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "examples.distill"]
    for stage in ("generate", "features", "train"):
        done = subprocess.run([*launch, stage, settings, run], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
    ids = [json.loads(line)["id"] for path in (run / "answers" / "train").glob("*.jsonl") for line in path.read_text().splitlines()]
    assert len(list((run / "answers" / "train").glob("*.jsonl"))) == 2
    assert len(ids) == len(set(ids)) == len((run / "prompts.jsonl").read_text().splitlines())
    assert (run / "drafter" / "model.safetensors").is_file()
    assert len((run / "training" / "evaluations.csv").read_text().splitlines()) == 3
