"""Prompts: the families that come with the recipe, and files of one's own."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from examples.distill.families import FOLDER, read_family
from examples.distill.prompts import read_prompts, write_prompts
from examples.distill.run_folder import RunFolder
from examples.distill.settings import PromptSettings, read_settings
from xpress_runtime.errors import OptionError

NAMES = sorted(path.stem for path in FOLDER.glob("*.toml"))
PRESETS = sorted((FOLDER.parent / "presets").glob("*.toml"))


def write(folder: Path, **settings: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows to train on and rows held out."""
    written = RunFolder(folder)
    write_prompts(PromptSettings(**settings), written, lambda _: None)
    return tuple(
        [json.loads(line) for line in path.read_text().splitlines()] for path in (written.prompts("train"), written.prompts("held_out"))
    )  # type: ignore[return-value]


def test_there_are_families_that_servers_see() -> None:
    assert set(NAMES) == {"arithmetic", "chat", "code", "json", "lists", "rewriting"}


@pytest.mark.parametrize("name", NAMES)
def test_family_gives_thousands_of_prompts_without_placeholders(name: str) -> None:
    family = read_family(name)
    train, held_out = family.prompts(2500, held_out=False, seed=0), family.prompts(40, held_out=True, seed=0)
    assert len(set(train)) == 2500
    assert len(set(held_out)) == 40
    assert not set(train) & set(held_out)
    for text in (*train, *held_out):
        assert not re.search(r"<[a-z_]+(:\d+)?>", text), text
    assert family.prompts(2500, held_out=False, seed=0) == train
    assert family.prompts(2500, held_out=False, seed=1) != train


@pytest.mark.parametrize("name", NAMES)
def test_held_out_prompts_are_of_words_that_no_training_prompt_has(name: str) -> None:
    """Nearly each holds a held-out word of a list as it stands there; the others hold one that is itself made of words."""
    family = read_family(name)
    reserved = [word for slot in family.slots.values() if slot.splits for word in slot.held_out if "<" not in word]
    found = Counter(
        any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) for word in reserved) for text in family.prompts(60, held_out=True, seed=3)
    )
    assert found[True] >= 50, found


def test_words_made_of_parts(tmp_path: Path) -> None:
    """One of each part, two placeholders never the same."""
    slots = 'm = { parts = [["Ba", "Ce"], ["", "lo"], ["n"]] }\nw = { train = ["x"], held_out = ["y"] }\n'
    (tmp_path / "made.toml").write_text(f'about = "x"\ntemplates = ["<w>: <m>, <m:2>"]\n[slots]\n{slots}')
    family = read_family("made", tmp_path)
    drawn = {tuple(text.removeprefix("x: ").split(", ")) for text in family.prompts(12, held_out=False, seed=0)}
    words = {"Ban", "Balon", "Cen", "Celon"}
    assert drawn == {(first, second) for first in words for second in words if first != second}


def test_a_list_that_is_in_both_parts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text('about = "x"\ntemplates = ["<a>"]\n[slots]\na = { train = ["x", "y"], held_out = ["Y"] }\n')
    with pytest.raises(OptionError, match="slot 'a' has 'y' in train and in held_out"):
        read_family("bad", tmp_path)


def test_a_template_that_nothing_is_held_out_from_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text('about = "x"\ntemplates = ["Count to <n>."]\n[slots]\nn = { range = [1, 9] }\n')
    with pytest.raises(OptionError, match=r"'Count to <n>.' has no word that could be held out"):
        read_family("bad", tmp_path)


def test_lists_that_contain_each_other_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text('about = "x"\ntemplates = ["<a>"]\n[slots]\na = { train = ["<a> x"], held_out = ["<a> y"] }\n')
    with pytest.raises(OptionError, match="contain each other"):
        read_family("bad", tmp_path).prompts(1, held_out=False, seed=0)


def test_words_of_a_prompt_differ_and_may_be_named_again(tmp_path: Path) -> None:
    text = 'about = "x"\ntemplates = ["<w>-<w:2>-<w>"]\n[slots]\nw = { train = ["a", "b"], held_out = ["c", "d"] }\n'
    (tmp_path / "two.toml").write_text(text)
    assert set(read_family("two", tmp_path).prompts(2, held_out=False, seed=0)) == {"a-b-a", "b-a-b"}


def test_files_of_ones_own(tmp_path: Path) -> None:
    """``prompt``, ``messages`` and a list as ``prompt``; what is held out or forbidden is not trained on, and nothing comes twice."""
    rows: list[dict[str, Any]] = [{"prompt": f"Question {number}?"} for number in range(40)]
    rows += [{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]}, {"prompt": "Question 3?"}]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    (tmp_path / "never.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": "Question 7?"}]}))
    files = {"files": [str(tmp_path / "mine.jsonl")], "never": [str(tmp_path / "never.jsonl")]}
    train, held_out = write(tmp_path / "run", **files, held_out_share=0.25)
    texts = [row["messages"][-1]["content"] for row in train]
    assert "Question 7?" not in texts
    assert len(texts) == len(set(texts))
    assert not {row["id"] for row in train} & {row["id"] for row in held_out}
    assert 41 - 1 <= len(train) + len(held_out) <= 41
    assert {row["family"] for row in train} == {"mine"}
    assert any(len(row["messages"]) == 2 for row in (*train, *held_out))


def test_more_lines_keep_the_choice_of_the_others(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"Question {number}?"}) for number in range(60)]
    chosen = []
    for name, count in (("short", 40), ("long", 60)):
        (tmp_path / "mine.jsonl").write_text("\n".join(lines[:count]))
        _, held_out = write(tmp_path / name, files=[str(tmp_path / "mine.jsonl")], held_out_share=0.2)
        chosen.append({row["id"] for row in held_out})
    assert chosen[0] < chosen[1]


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_presets_are_valid_and_hold_the_benchmarks_prompts_out(preset: Path) -> None:
    settings = read_settings(preset)
    assert set(settings.prompts.families) <= set(NAMES)
    for name in settings.prompts.never:
        assert (FOLDER.parents[2] / name).is_file(), name


def test_the_demos_preset_trains_on_no_prompt_that_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = FOLDER.parents[2]
    monkeypatch.chdir(root)
    settings = read_settings(root / "examples" / "distill" / "presets" / "demo.toml").prompts
    train, held_out = write(tmp_path / "run", **settings.model_dump())
    texts = {row["messages"][-1]["content"] for row in train}
    for path in (root / "xpress_export" / "demo" / "prompts.jsonl", *(root / "xpress_export" / "bench" / "sets").glob("*.jsonl")):
        assert not {messages[-1]["content"] for messages in read_prompts(path)} & texts
    assert len(texts) > 9000
    assert Counter(row["family"] for row in held_out) == dict.fromkeys(settings.families, 20)
