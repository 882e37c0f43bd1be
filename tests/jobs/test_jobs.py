"""Lines of a batch: what is taken, and what is refused by name before anything runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.conftest import Batch, Files
from xpress_runtime.errors import OptionError
from xpress_runtime.jobs import intake
from xpress_runtime.jobs.intake import InputProblems, JobFile
from xpress_runtime.jobs.job import Job, JobError, parse_job, read_line


def parsed(line: str | bytes) -> Job:
    return parse_job(read_line(line if isinstance(line, bytes) else line.encode()))


def chat(**body: Any) -> str:
    messages = [{"role": "user", "content": "x"}]
    return json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": messages, **body}})


def test_every_field_reaches_the_configuration() -> None:
    fields = {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "seed": 3, "stop": "x", "stop_token_ids": [1]}
    more = {"ignore_stop": True, "repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.2, "draft_steps": 2}
    job = parsed(
        json.dumps({"id": 7, "prompt": "hello", **fields, **more, "speculation": "on", "num_passes": 1, "shortlist": 0, "raw": True})
    )
    config = job.config
    assert (job.id, job.prompt, job.raw, config.max_new_tokens, config.stop) == (7, "hello", True, 5, ["x"])
    for name, value in {**fields, **more, "speculation": "on", "num_passes": 1, "shortlist": 0}.items():
        if name not in ("max_tokens", "stop"):
            assert getattr(config, name) == value


def test_null_is_the_default_and_speculation_is_auto() -> None:
    job = parsed('{"id": "a", "prompt": [1, 2], "top_k": null, "draft_steps": null, "stop": null, "raw": null, "thinking": null}')
    assert (job.prompt, job.config.draft_steps, job.config.speculation, job.config.temperature) == ([1, 2], 1, "auto", 0)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('{"id": 1, "prompt": "x"', "not JSON"),
        ('{"id": 1, "prompt": "x", "top_p": NaN}', "NaN is no number"),
        ('{"id": 1, "prompt": "x", "top_p": 1e999}', "top_p is inf"),
        ('{"id": 1, "prompt": "x", "prompt": "y"}', "'prompt' is given twice"),
        ("[1]", "a JSON list"),
        ('{"id": 1, "prompt": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
        ('{"id": ' + "1" * 5000 + "}", "thousands of digits"),
        (b'{"id": 1, "prompt": "\xff"}', "not UTF-8: invalid start byte at byte 22"),
        (r'{"id": 1, "prompt": "\ud800"}', "surrogate"),
        ('{"prompt": "x"}', "no id"),
        ('{"id": true, "prompt": "x"}', "id is true"),
        ('{"id": "", "prompt": "x"}', 'id is ""'),
        ('{"id": 1}', "neither prompt nor messages"),
        ('{"id": 1, "prompt": "x", "messages": [{"role": "user", "content": "x"}]}', "both prompt and messages"),
        ('{"id": 1, "prompt": ""}', "empty"),
        ('{"id": 1, "prompt": [1, -2]}', "prompt item 1 is -2"),
        ('{"id": 1, "messages": [1]}', "message 0 is 1"),
        ('{"id": 1, "prompt": "x", "max_token": 3}', "unknown field 'max_token'"),
        ('{"id": 1, "prompt": "x", "max_tokens": 0}', "max_tokens is 0"),
        ('{"id": 1, "prompt": "x", "ignore_stop": "no"}', "ignore_stop is"),
        ('{"id": 1, "prompt": "x", "speculation": "off", "num_passes": 1}', "speculation is off"),
        ('{"id": 1, "prompt": [1], "raw": true}', "raw is for"),
        ('{"id": 1, "prompt": "x", "raw": true, "thinking": false}', "thinking is for chats"),
        (chat(n=2), "'n'"),
        (chat(logprobs=True), "'logprobs'"),
        (chat(tools=[{"type": "function"}]), "'tools'"),
        (chat(invented=1), "'invented'"),
        (chat(max_tokens=1, max_completion_tokens=2), "disagree"),
        ('{"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {}}', "url is '/v1/embeddings'"),
        ('{"custom_id": "a", "method": "GET", "url": "/v1/completions", "body": {"prompt": "x"}}', "method is 'GET'"),
        ('{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": ["x", "y"]}}', "a list of prompts"),
        ('{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": 3}', "body is of type int"),
    ],
)
def test_what_is_no_job_is_refused_by_name(line: str | bytes, named: str) -> None:
    with pytest.raises(JobError, match=r"^.") as refused:
        parsed(line)
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


def test_openai_chat_line_is_a_job() -> None:
    body = {
        "model": "m",
        "max_completion_tokens": 9,
        "temperature": 0.5,
        "stop": ["a"],
        "n": 1,
        "logprobs": False,
        "tools": [],
        "user": "u",
    }
    job = parsed(chat(**body, chat_template_kwargs={"enable_thinking": False}, top_k=3))
    assert job.id == "a"
    assert job.prompt == [{"role": "user", "content": "x"}]
    assert (job.config.max_new_tokens, job.config.stop, job.config.top_k, job.variables) == (9, ["a"], 3, {"enable_thinking": False})


@pytest.mark.parametrize(("prompt", "expected"), [("x", "x"), (["x"], "x"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2])])
def test_openai_completion_is_raw(prompt: Any, expected: Any) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt}}
    job = parsed(json.dumps(line))
    assert (job.prompt, job.raw) == (expected, isinstance(expected, str))


def test_digest_is_of_what_is_asked_for() -> None:
    same = [parsed(line).digest for line in ('{"id": 1, "prompt": "x", "seed": 2}', '{ "seed":2, "prompt":"x", "id":"b"}')]
    other = parsed('{"id": 1, "prompt": "x", "seed": 3}').digest
    assert same[0] == same[1] != other


def test_file_is_read_by_number_past_bom_blank_lines_and_carriage_returns(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"id": 1, "prompt": "\xc3\xa4"}\r\n\n  \n{"id": "1", "prompt": "b"}')
    with JobFile.open(path) as jobs:
        assert jobs.ids == [1, "1"]
        assert [jobs.read(number)["prompt"] for number in (1, 0)] == ["b", "ä"]


def test_file_that_changes_under_way_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"id": 1, "prompt": "aa"}\n')
    with JobFile.open(path) as jobs:
        path.write_text('{"id": 1, "prompt": "bb"}\n')
        with pytest.raises(OptionError, match=r"changed while its jobs ran \(line 1\)"):
            jobs.read(0)


def test_lines_beyond_the_limit_are_refused_and_the_next_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "MAX_LINE_BYTES", 40)
    path = tmp_path / "in.jsonl"
    path.write_text('{"id": 1, "prompt": "' + 200 * "a" + '"}\n{"id": 2, "prompt": "a"}\nx\n')
    with pytest.raises(InputProblems) as refused:
        JobFile.open(path)
    assert [line.split(":")[0] for line in refused.value.lines] == ["line 1", "line 3"]


def test_every_bad_line_is_listed_and_nothing_written(files: Files, batch: Batch) -> None:
    good = '{"id": 1, "prompt": "steps 1"}'
    files.jobs.write_text("\n".join([good, good, "", "{", '{"id": 2}', *(["[]"] * 20)]))
    result = batch()
    lines = result.err.splitlines()
    assert result.exit_code == 2
    assert [line.split(":")[0] for line in lines[:4]] == ["line 2", "line 4", "line 5", "line 6"]
    assert lines[0].endswith("id 1 is that of line 1; ids must differ")
    assert lines[20:] == ["and 3 more", f"xpress-export: {files.jobs}: 23 lines cannot be used, so nothing was run; correct or remove them"]
    assert list(files.folder.iterdir()) == [files.jobs]


@pytest.mark.parametrize(("content", "named"), [(None, "cannot be read"), (b"\n\n", "holds no job")])
def test_file_without_jobs_is_refused(files: Files, batch: Batch, content: bytes | None, named: str) -> None:
    if content is not None:
        files.jobs.write_bytes(content)
    batch().assert_refused(2, str(files.jobs), named)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes of POSIX")
def test_pipe_of_jobs_is_refused(files: Files, batch: Batch) -> None:
    os.mkfifo(files.jobs)
    batch().assert_refused(2, str(files.jobs), "no regular file")
