"""What a user can get wrong, and what a machine can: one line each, and nothing that was made before is lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from examples.distill import features, loop
from examples.distill.losses import Losses
from examples.distill.train import check_mask_token
from tests.distill.runs import recipe, refused, tiny_sections, write_prompts, write_settings, write_speaking_target
from xpress_runtime.errors import OptionError
from xpress_runtime.jobs.lock import Lock


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, and a run up to its features; it must not be changed."""
    folder = tmp_path_factory.mktemp("bad")
    write_speaking_target(folder / "target")
    write_prompts(folder / "prompts.jsonl", 24)
    settings = write_settings(folder / "settings.toml", **tiny_sections(folder / "target", folder / "prompts.jsonl", steps=12))
    for stage in ("prompts", "generate", "features"):
        recipe(stage, settings, folder / "run").assert_done()
    return folder


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    """A copy of the run folder, to be spoilt."""
    shutil.copytree(made / "run", tmp_path / "run")
    return tmp_path / "run"


def settings_with(made: Path, path: Path, **changes: dict[str, Any]) -> Path:
    sections = tiny_sections(made / "target", made / "prompts.jsonl", steps=12)
    for section, values in changes.items():
        sections[section] = sections.get(section, {}) | values
    return write_settings(path, **sections)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": "cut', "prompts.jsonl, line 2: not valid JSON"),
        ("[1]", "prompts.jsonl, line 2: a JSON list, expected an object"),
        ('{"text": "no prompt"}', "line 2: expected 'prompt' with text or 'messages' with roles and contents"),
        ('{"prompt": ""}', "line 2: expected 'prompt'"),
        ('{"messages": [{"role": "user"}]}', "line 2: expected 'prompt'"),
        ("\xff", "is not UTF-8 at byte 19"),
    ],
)
def test_broken_line_of_prompts(made: Path, tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "good"}\n' + line.encode("latin-1") + b"\n")
    settings = settings_with(made, tmp_path / "settings.toml", prompts={"files": [str(path)]})
    assert says in refused("prompts", settings, tmp_path / "run")
    assert not (tmp_path / "run" / "prompts.jsonl").exists()


def test_settings_that_do_not_exist(tmp_path: Path) -> None:
    assert "does not exist; the presets lie in" in refused("prompts", tmp_path / "no.toml", tmp_path / "run")


MODEL = '[target]\ncheckpoint = "x"\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[target", "is not valid TOML"),
        ("[training]\nsteps = 3", "target: field required"),
        (MODEL + "[training]\nstep = 3", "training.step: there is no such setting; did you mean steps?"),
        (MODEL + "[trainig]\nsteps = 3", "trainig: there is no such setting; did you mean training?"),
        (MODEL + "[training]\nqqq = 3", "training.qqq: there is no such setting; settings.py lists all"),
        (MODEL + '[training]\nlearning_rate = "a"', "training.learning_rate: input should be a valid number, found 'a'"),
        (MODEL + "[training]\nlearning_rate = nan", "training.learning_rate: input should be less than or equal to 1, found nan"),
        (MODEL + "[drafter]\nblock_size = 1", "drafter.block_size: input should be greater than or equal to 2, found 1"),
        (MODEL + "[prompts]\nfamilies = { poems = 3 }", "there is no prompt family 'poems'; there are arithmetic, chat"),
        (MODEL, "no prompt is held out to measure on; name families or files under [prompts]"),
    ],
)
def test_wrong_settings(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(text, encoding="utf-8")
    assert says in refused("prompts", path, tmp_path / "run")
    assert not (tmp_path / "run" / "prompts.json").exists(), "settings that gave nothing would bind the next ones"


@pytest.mark.parametrize(
    ("stage", "says"),
    [
        ("generate", "run 'prompts' first"),
        ("train", "run 'prompts' first"),
        ("evaluate", "training.json does not exist; run 'train' first"),
    ],
)
def test_stages_out_of_order(made: Path, tmp_path: Path, stage: str, says: str) -> None:
    assert "run does not exist; run 'prompts' first" in refused(stage, made / "settings.toml", tmp_path / "run")
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    assert says in refused(stage, made / "settings.toml", tmp_path / "run")


def test_training_without_features(made: Path, copy: Path) -> None:
    shutil.rmtree(copy / "features")
    assert "holds no answer of two tokens or more; run 'features' first" in refused("train", made / "settings.toml", copy)


def test_target_without_a_chat_template(tmp_path: Path) -> None:
    """One line that says what to do; and doing it helps, to the end: prompts stay plain text in the measurement too."""
    write_speaking_target(tmp_path / "target", chat_template=None)
    sections = tiny_sections(tmp_path / "target", write_prompts(tmp_path / "prompts.jsonl", 10), steps=4)
    settings = write_settings(tmp_path / "settings.toml", **sections)
    recipe("prompts", settings, tmp_path / "run").assert_done()
    assert 'has no chat template; set format = "text" under [prompts]' in refused("generate", settings, tmp_path / "run")
    sections["prompts"]["format"] = "text"
    settings = write_settings(tmp_path / "settings.toml", **sections)
    recipe("all", settings, tmp_path / "again").assert_done()
    rows = (tmp_path / "again" / "answers" / "train" / "process-0.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(json.loads(rows[0])["answer"]) > 0
    report = json.loads(next((tmp_path / "again").glob("evaluation/*/report/report.json")).read_text(encoding="utf-8"))
    answers = (tmp_path / "again" / "answers" / "held_out" / "process-0.jsonl").read_text(encoding="utf-8").splitlines()
    assert [prompt["input_tokens"] for prompt in report["prompts"]] == [len(json.loads(answer)["prompt"]) for answer in answers]


def test_thinking_that_nothing_can_switch(made: Path, tmp_path: Path) -> None:
    """Taken silently, the drafter would learn and be measured under a name that is not its own."""
    settings = settings_with(made, tmp_path / "settings.toml", prompts={"thinking": False})
    recipe("prompts", settings, tmp_path / "run").assert_done()
    assert "cannot switch thinking; leave out thinking under [prompts]" in refused("generate", settings, tmp_path / "run")
    settings = settings_with(made, tmp_path / "settings.toml", prompts={"thinking": False, "format": "text"})
    assert 'prompts.thinking: only a chat template can switch it, and format is "text"' in refused("generate", settings, tmp_path / "run")


def test_vocabulary_larger_than_the_head(tmp_path: Path) -> None:
    write_speaking_target(tmp_path / "target", vocab_size=200)
    settings = write_settings(
        tmp_path / "settings.toml", **tiny_sections(tmp_path / "target", write_prompts(tmp_path / "prompts.jsonl", 10))
    )
    recipe("prompts", settings, tmp_path / "run").assert_done()
    line = refused("generate", settings, tmp_path / "run")
    assert "the tokenizer has" in line and "embedding and head have 200 rows" in line


def test_answers_of_another_head(made: Path, copy: Path) -> None:
    """Features that hold a token which the head has no row for: another target's, or damaged ones."""
    path = sorted((copy / "features" / "train").glob("*.safetensors"))[0]
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    with safe_open(path, framework="pt") as shard:
        metadata = shard.metadata()
    tensors = load_file(path)
    tensors["tokens"][-1] = 999
    save_file(tensors, path, metadata)
    assert "the answers hold token 999, and the head of" in refused("train", made / "settings.toml", copy)


def test_mask_token_outside_of_the_embedding(made: Path, copy: Path, tmp_path: Path) -> None:
    settings = settings_with(made, tmp_path / "settings.toml", drafter={"mask_token_id": 430})
    assert "mask_token_id is 430, and the target's embedding has 430 rows" in refused("train", settings, copy)


def test_taps_that_the_target_lacks(made: Path, tmp_path: Path) -> None:
    settings = settings_with(made, tmp_path / "settings.toml", drafter={"tap_layers": [0, 2]})
    assert "tap_layers are [0, 2], expected ascending layers from 0 to 1" in refused("features", settings, made / "run")


def test_default_mask_token_that_answers_hold(made: Path, copy: Path, tmp_path: Path) -> None:
    """Nobody chose it, so nobody would look for it; one that was chosen is pointed out."""
    answers = [json.loads(line)["answer"] for line in (copy / "answers" / "train" / "process-0.jsonl").read_text().splitlines()]
    held = answers[0][0]
    settings = settings_with(made, tmp_path / "settings.toml", drafter={"mask_token_id": held})
    times = sum(answer.count(held) for answer in answers)
    assert f"the mask token, id {held}, occurs {times} times in the answers" in recipe("train", settings, copy).assert_done().err
    with pytest.raises(OptionError, match="is missing, and the tokenizer's mask or padding token, id 3, occurs 5 times in the answers"):
        check_mask_token(3, torch.tensor([0, 0, 0, 5]), is_stated=False, say=print)
    check_mask_token(3, torch.tensor([0, 1]), is_stated=False, say=print)


def test_a_warm_start_that_fails_binds_nothing(made: Path, copy: Path, tmp_path: Path) -> None:
    wrong = settings_with(made, tmp_path / "wrong.toml", training={"warm_start": str(tmp_path / "nothing")})
    assert "nothing" in refused("train", wrong, copy)
    recipe("train", made / "settings.toml", copy).assert_done()


def test_two_heads(made: Path, tmp_path: Path) -> None:
    settings = settings_with(made, tmp_path / "settings.toml", drafter={"markov_rank": 4})
    assert "a drafter has one head" in refused("train", settings, made / "run")
    settings = settings_with(made, tmp_path / "settings.toml", drafter={"refiner_rank": 0, "markov_rank": 4, "draft_vocab_size": 100})
    assert "a Markov head drafts all tokens" in refused("train", settings, made / "run")


def test_changed_settings_do_not_mix_with_what_is_there(made: Path, copy: Path, tmp_path: Path) -> None:
    for stage, change in (
        ("prompts", {"prompts": {"seed": 1}}),
        ("generate", {"answers": {"max_new_tokens": 8}}),
        ("features", {"features": {"cache": "bfloat16"}}),
    ):
        settings = settings_with(made, tmp_path / "settings.toml", **change)
        line = refused(stage, settings, copy)
        assert "was made with" in line and "or use another run folder" in line
    recipe("train", made / "settings.toml", copy).assert_done()
    settings = settings_with(made, tmp_path / "settings.toml", training={"learning_rate": 0.1})
    assert "was made with learning_rate = 0.0006, now it is 0.1" in refused("train", settings, copy)


@pytest.mark.parametrize(("stage", "name"), [("prompts", "prompts.json"), ("generate", "answers/held_out/answers.json")])
@pytest.mark.parametrize("content", ['{"a": ', "[]", "\xff"])
def test_damaged_notes_of_a_stage(made: Path, copy: Path, stage: str, name: str, content: str) -> None:
    (copy / name).write_bytes(content.encode("latin-1"))
    assert f"remove it and run '{stage}' again" in refused(stage, made / "settings.toml", copy)


def test_two_runs_in_one_folder(made: Path, copy: Path) -> None:
    """The second one leaves at once, and the folder is free when the first one is done."""
    lock = Lock(copy)
    try:
        assert "is being written by another run" in refused("train", made / "settings.toml", copy)
    finally:
        lock.release()
    recipe("train", made / "settings.toml", copy).assert_done()


def test_too_little_space_for_features(made: Path, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known before the target is loaded."""
    shutil.rmtree(copy / "features")
    monkeypatch.setattr(features.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    line = refused("features", made / "settings.toml", copy)
    assert "has 0.0 GB of space and the features need" in line


def test_disk_full_while_caching(made: Path, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shards before stay, nothing half written does, and the stage goes on when there is room again."""
    shutil.rmtree(copy / "features" / "train")
    save = features.save_file
    written: list[Path] = []

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        if len(written) == 1:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        save(tensors, path, metadata)
        written.append(path)

    settings = settings_with(made, copy / "settings.toml", features={"shard_sequences": 8})
    with monkeypatch.context() as patch:
        patch.setattr(features, "save_file", full)
        line = refused("features", settings, copy)
    assert "No space left on device" in line and "the shards before it are kept" in line
    left = sorted(path.name for path in (copy / "features" / "train").iterdir())
    assert left == ["features.json", "process-0-00000.safetensors"]
    before = (copy / "features" / "train" / "process-0-00000.safetensors").read_bytes()
    recipe("features", settings, copy).assert_done()
    assert (copy / "features" / "train" / "process-0-00000.safetensors").read_bytes() == before
    recipe("train", settings, copy).assert_done()


@pytest.mark.parametrize(
    ("name", "stage", "line", "says"),
    [
        ("prompts.jsonl", "generate", "{}", "line 2: 'id' is None; remove the line and run 'prompts' again"),
        ("prompts.jsonl", "train", '{"id": 3}', "line 2: 'id' is 3; remove the line and run 'prompts' again"),
        (
            "answers/train/process-0.jsonl",
            "features",
            '{"id": "x", "family": "a", "prompt": "b"}',
            "line 2: 'prompt' is 'b'; remove the line",
        ),
        ("answers/train/process-0.jsonl", "generate", "{", "line 2: not valid JSON"),
    ],
)
def test_damaged_rows(made: Path, copy: Path, name: str, stage: str, line: str, says: str) -> None:
    rows = (copy / name).read_text(encoding="utf-8").splitlines()
    (copy / name).write_text("\n".join([rows[0], line, *rows[1:]]) + "\n", encoding="utf-8")
    assert says in refused(stage, made / "settings.toml", copy)


def test_answers_that_are_a_folder(made: Path, copy: Path) -> None:
    path = copy / "answers" / "train" / "process-0.jsonl"
    path.unlink()
    path.mkdir()
    assert "process-0.jsonl cannot be read and written: Is a directory" in refused("generate", made / "settings.toml", copy)


def test_damaged_shard(made: Path, copy: Path) -> None:
    path = sorted((copy / "features" / "train").glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:100])
    assert "is no shard of features" in refused("train", made / "settings.toml", copy)


def test_cut_line_of_answers_is_made_again(made: Path, copy: Path) -> None:
    """A kill in the middle of a line costs that answer only."""
    path = copy / "answers" / "train" / "process-0.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    recipe("generate", made / "settings.toml", copy).assert_done()
    assert sorted(path.read_bytes().splitlines()) == sorted(whole.splitlines())


def test_damaged_checkpoint(made: Path, copy: Path) -> None:
    recipe("train", made / "settings.toml", copy).assert_done()
    state = copy / "training" / "latest.pt"
    state.write_bytes(state.read_bytes()[:1000])
    assert "is no checkpoint of this recipe" in refused("train", made / "settings.toml", copy)


def test_checkpoint_of_another_model(made: Path, copy: Path) -> None:
    recipe("train", made / "settings.toml", copy).assert_done()
    path = copy / "training" / "latest.pt"
    state = torch.load(path, weights_only=True)
    del state["model"]["drafter.backbone.fc.weight"]
    torch.save(state, path)
    assert "latest.pt is of another model (" in refused("train", made / "settings.toml", copy)


def test_measuring_without_a_prompt(made: Path, copy: Path) -> None:
    recipe("train", made / "settings.toml", copy).assert_done()
    (copy / "held_out.jsonl").write_text("")
    assert "held_out.jsonl holds no prompt; remove it and run 'prompts' again" in refused("evaluate", made / "settings.toml", copy)


def test_damaged_notes_of_a_drafter(made: Path, copy: Path) -> None:
    """Known before a bundle is built and measured."""
    recipe("train", made / "settings.toml", copy).assert_done()
    (copy / "drafter" / "training.json").write_text("{}")
    assert "training.json is not what 'train' writes" in refused("evaluate", made / "settings.toml", copy)
    assert not (copy / "evaluation").exists()


@pytest.mark.parametrize(
    ("drafter", "says"),
    [
        ({"num_passes": 0}, "field 'xpress_num_passes' is 0, expected an integer from 1"),
        ({"block_size": 2}, "xpress_num_passes is 2, expected at most 1"),
        ({"num_heads": 3, "num_kv_heads": 2}, "field 'num_key_value_heads' is 2, expected a divisor of num_attention_heads (3)"),
        ({"head_dim": 7}, "head_dim is 7, expected an even number"),
    ],
)
def test_drafter_that_could_not_be_built(made: Path, copy: Path, tmp_path: Path, drafter: dict[str, Any], says: str) -> None:
    """Known before it is trained."""
    line = refused("train", settings_with(made, tmp_path / "settings.toml", drafter=drafter), copy)
    assert line.startswith("the config.json that [drafter] gives: ") and says in line
    assert not (copy / "training").exists()


def test_loss_without_a_part(made: Path, copy: Path, tmp_path: Path) -> None:
    settings = settings_with(made, tmp_path / "settings.toml", training={"base_weight": 0, "refined_weight": 0, "free_weight": 0})
    assert "no part of the loss has a weight" in refused("train", settings, copy)


def test_damaged_curve(made: Path, copy: Path) -> None:
    recipe("train", made / "settings.toml", copy).assert_done()
    (copy / "training" / "curve.csv").write_text("step,loss\n3,much\n")
    assert "curve.csv is no curve of this recipe" in refused("train", made / "settings.toml", copy)


def test_fewer_steps_than_were_made(made: Path, copy: Path, tmp_path: Path) -> None:
    recipe("train", made / "settings.toml", copy).assert_done()
    settings = settings_with(made, tmp_path / "settings.toml", training={"steps": 6})
    assert "stands at step 12, and steps is 6; set more steps" in refused("train", settings, copy)


def test_loss_that_is_not_finite(made: Path, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training stops there, says so, and what the last checkpoint and the best drafter hold is from before."""
    from examples.distill import train

    settings = settings_with(made, tmp_path / "settings.toml", training={"evaluate_steps": 4, "steps": 20})
    losses, calls = train.block_losses, []

    def broken(*arguments: Any) -> Losses:
        calls.append(1)
        found = losses(*arguments)
        if len(calls) <= 7:
            return found
        values = {name: getattr(found, name) for name in found.__dataclass_fields__}
        return Losses(**(values | {"total": found.total * float("nan")}))

    with monkeypatch.context() as patch:
        patch.setattr(train, "block_losses", broken)
        line = refused("train", settings, copy, code=1)
    assert "the loss is nan at step 7" in line
    assert f"{copy / 'training' / loop.STATE_NAME} holds the last good checkpoint" in line
    state = torch.load(copy / "training" / loop.STATE_NAME, weights_only=True)
    assert state["progress"]["step"] == 4
    assert all(tensor.isfinite().all() for tensor in state["model"].values())
    assert json.loads((copy / "drafter" / "training.json").read_text(encoding="utf-8"))["step"] == 4
    recipe("train", settings, copy).assert_done()
