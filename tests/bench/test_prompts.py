"""Prompt sets: the built-in ones, files of every accepted form, and one error line for each defect."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from xpress_export.bench.prompts import BUILT_IN_SETS, built_in_prompts, read_prompts
from xpress_runtime.errors import OptionError, PromptError


def write(folder: Path, *lines: str) -> Path:
    path = folder / "mine.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", BUILT_IN_SETS)
def test_built_in_sets_hold_enough_different_short_prompts(name: str) -> None:
    lines = built_in_prompts([name], 20)
    assert {line.family for line in lines} == {name}
    assert len({json.dumps(line.content) for line in lines}) == 20
    # No tokenizer makes more tokens than bytes, and the demo's bundle has room for 1024.
    assert max(len(json.dumps(line.content).encode()) for line in lines) < 600


def test_built_in_sets_hold_plain_prompts_and_conversations() -> None:
    kinds = Counter(type(line.content) for line in built_in_prompts(["chat"], 24))
    assert kinds[str] >= 10
    assert kinds[list] >= 3


def test_ten_of_each_set_by_default() -> None:
    assert Counter(line.family for line in built_in_prompts(BUILT_IN_SETS)) == dict.fromkeys(BUILT_IN_SETS, 10)


def test_a_set_named_twice_is_taken_once() -> None:
    assert len(built_in_prompts(["math", "math"], 3)) == 3


def test_unknown_set_names_the_known_ones() -> None:
    with pytest.raises(OptionError, match=r"--set poetry does not exist; choose among math, code, chat"):
        built_in_prompts(["poetry"])


def test_more_prompts_than_a_set_has() -> None:
    with pytest.raises(OptionError, match=r"--num-prompts is 99, and math has 24 prompts"):
        built_in_prompts(["math"], 99)


def test_every_form_of_a_line(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    path = write(
        tmp_path,
        '{"prompt": "Why?", "id": 7}',
        "",
        "   ",
        json.dumps({"messages": chat, "family": "talk"}),
        '{"tokens": [1, 2, 3]}',
    )
    lines = read_prompts(path)
    assert [(line.family, line.content) for line in lines] == [("mine", "Why?"), ("talk", chat), ("mine", [1, 2, 3])]
    assert [line.where for line in lines] == [f"{path}, line 1", f"{path}, line 4", f"{path}, line 5"]


def test_byte_order_mark_carriage_returns_and_line_separators_within_text(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "one"}\r\n' + '{"prompt": "two\u2028lines"}\r\n'.encode())
    assert [line.content for line in read_prompts(path)] == ["one", "two\u2028lines"]


def test_first_prompts_of_each_family(tmp_path: Path) -> None:
    path = write(tmp_path, *(json.dumps({"prompt": f"{family} {number}", "family": family}) for number in range(3) for family in "ab"))
    assert [line.content for line in read_prompts(path, 2)] == ["a 0", "b 0", "a 1", "b 1"]
    with pytest.raises(OptionError, match="--num-prompts is 4, and a has 3 prompts"):
        read_prompts(path, 4)
    with pytest.raises(OptionError, match="--num-prompts is 0"):
        read_prompts(path, 0)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("Why?", "is not a JSON object"),
        ('"Why?"', "is not a JSON object"),
        ("[1]", "is not a JSON object"),
        ('{"prompt": "Why?"', "is not a JSON object"),
        ("[" * 100_000, "is not a JSON object"),
        ("{}", "has none of them, expected one of prompt, messages and tokens"),
        ('{"prompt": "a", "tokens": [1]}', "has prompt and tokens, expected one of"),
        ('{"prompt": "  "}', 'prompt is "  ", expected text'),
        ('{"prompt": 5}', "prompt is 5, expected text"),
        ('{"messages": []}', "messages is [], expected a list"),
        ('{"messages": ["Hi"]}', 'a message is "Hi", expected'),
        ('{"messages": [{"role": "user"}]}', "a message is"),
        ('{"tokens": []}', "tokens is [], expected a list of token ids"),
        ('{"tokens": [true]}', "tokens is [true], expected"),
        ('{"tokens": [1.5]}', "tokens is [1.5], expected"),
        ('{"prompt": "a", "family": 3}', "family is 3, expected"),
        ('{"prompt": "a", "family": "=SUM(A1)"}', "family is"),
        ('{"prompt": "a", "family": "<b>"}', "family is"),
        ('{"prompt": "a", "family": ""}', 'family is "", expected'),
    ],
)
def test_a_broken_line_is_named_by_its_number(tmp_path: Path, line: str, named: str) -> None:
    path = write(tmp_path, '{"prompt": "fine"}', "", line)
    with pytest.raises(PromptError) as refused:
        read_prompts(path)
    message = str(refused.value)
    assert f"{path}, line 3" in message
    assert named in message
    assert "\n" not in message
    assert len(message) < 400


def test_empty_file(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="holds no prompts, expected one a line"):
        read_prompts(write(tmp_path, "", "  "))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be read: No such file"):
        read_prompts(tmp_path / "absent.jsonl")
    with pytest.raises(OptionError, match="is not a file, expected one with a prompt a line"):
        read_prompts(tmp_path)
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9"}')
    with pytest.raises(OptionError, match="is not UTF-8 text"):
        read_prompts(tmp_path / "latin.jsonl")
