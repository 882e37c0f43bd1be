"""The command with a real bundle and the real worker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cli.invoke import Result, invoke
from tests.conftest import Built
from tests.jobs.conftest import Files
from xpress_export.cli.main import COMMANDS
from xpress_runtime.errors import OptionError
from xpress_runtime.generation import GenerationConfig
from xpress_runtime.jobs.job import Job, parse_job
from xpress_runtime.jobs.results import bundle_identity
from xpress_runtime.jobs.worker import prompt_of
from xpress_runtime.session import Session


def run(files: Files, bundle: Path, *options: object) -> Result:
    return invoke("batch", files.jobs, files.results, "--bundle", bundle, "--threads", 1, "--log", files.log, *options)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "batch", ("batch", "Run a file of jobs."))


@pytest.fixture(scope="module")
def session(tiny: Built) -> Iterator[Session]:
    with Session.open(tiny.bundle.folder, threads=1, verify=False) as opened:
        yield opened


def test_rows_say_what_a_session_says(files: Files, tiny: Built, session: Session) -> None:
    prompts = {number: [(7 * number + index) % 61 for index in range(3 + number)] for number in range(6)}
    lines: list[dict[str, Any]] = [
        {"id": number, "prompt": prompt, "max_tokens": 10 + number, "ignore_stop": True, "speculation": "on"}
        for number, prompt in prompts.items()
    ]
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "stop_token_ids": [3]}
    lines += [
        {"custom_id": "openai", "method": "POST", "url": "/v1/completions", "body": body},
        {"id": "long", "prompt": [1] * 64},
        {"id": "text", "prompt": "hello"},
        {"id": "passes", "prompt": [1], "num_passes": 9},
        {"id": "vocabulary", "prompt": [61]},
    ]
    files.write(lines)
    result = run(files, tiny.bundle.folder, "--json")
    assert result.exit_code == 1, result.err
    rows = files.by_id()
    for number, prompt in prompts.items():
        expected = session.generate(prompt, GenerationConfig(max_new_tokens=10 + number, ignore_stop=True))
        row = rows[number]
        assert (row["status"], tuple(row["tokens"]), row["finish_reason"]) == ("finished", expected.tokens, "length")
        assert (row["input_tokens"], row["output_tokens"], row["rounds"]) == (len(prompt), 10 + number, expected.stats.rounds)
        assert row["mean_acceptance_length"] == expected.stats.mean_acceptance_length
        assert row["total_ms"] >= row["prefill_ms"] > 0 < row["verify_ms"]
    assert {row["bundle"] for row in rows.values()} == {bundle_identity(tiny.bundle.manifest)}
    expected = session.generate([5, 6, 7], GenerationConfig(max_new_tokens=4, stop_token_ids=[3]))
    assert tuple(rows["openai"]["tokens"]) == expected.tokens
    for name, named in (("long", "capacity is 64"), ("text", "no tokenizer"), ("passes", "num_passes"), ("vocabulary", "61")):
        assert (rows[name]["status"], rows[name]["attempts"]) == ("failed", 1)
        assert named in rows[name]["error"]
    assert json.loads(result.out)["finished"] == 7
    assert files.events("worker ready")[0]["max_in_flight"] == 8


def test_identity_is_that_of_the_content(tiny: Built) -> None:
    manifest = tiny.bundle.manifest
    same = bundle_identity(manifest)
    assert len(same) == 16
    moved = replace(manifest.target, origin=replace(manifest.target.origin, source="elsewhere"))
    for changed in ({"parity": {"fp32": {}}}, {"built_with": {"torch": "0"}}, {"target": moved}):
        assert bundle_identity(replace(manifest, **changed)) == same
    other = replace(manifest.drafter, origin=replace(manifest.drafter.origin, identity="0" * 64))
    name, record = next(iter(manifest.files.items()))
    files = {**manifest.files, name: replace(record, sha256="0" * 64)}
    for changed in ({"drafter": other}, {"files": files}, {"capacity": manifest.capacity + 1}):
        assert bundle_identity(replace(manifest, **changed)) != same


def test_bundle_that_is_none_is_refused_before_anything_is_read(files: Files) -> None:
    run(files, files.folder / "none").assert_refused(2, "is not a bundle folder")
    assert list(files.folder.iterdir()) == []


def test_backend_that_is_not_there_ends_the_run_at_once(files: Files, tiny: Built) -> None:
    files.write([{"id": 1, "prompt": [1]}])
    result = run(files, tiny.bundle.folder, "--backend", "invented")
    result.assert_refused(2, "invented")
    assert len(files.events("worker started")) == 1


def _job(**fields: Any) -> Job:
    return parse_job({"id": 1, **fields})


def test_text_becomes_a_chat_where_there_is_a_template() -> None:
    chat, plain = (SimpleNamespace(has_chat_template=has, render_chat=lambda _chat, **given: str(given)) for has in (True, False))
    message = [{"role": "user", "content": "x"}]
    assert prompt_of(_job(prompt="x"), chat) == (message, {})
    assert prompt_of(_job(prompt="x", raw=True), chat) == ("x", {})
    assert prompt_of(_job(prompt="x"), plain) == ("x", {})
    assert prompt_of(_job(prompt="x"), None) == ("x", {})
    assert prompt_of(_job(messages=message, thinking=False), chat) == (message, {"enable_thinking": False})
    deaf = SimpleNamespace(has_chat_template=True, render_chat=lambda _chat, **_given: "")
    for tokenizer in (plain, deaf, None):
        with pytest.raises(OptionError, match="cannot switch thinking"):
            prompt_of(_job(messages=message, thinking=True), tokenizer)
