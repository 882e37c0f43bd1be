"""The server over a real session: the same tokens as without a server, alone and together, and the command that starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient

from tests.conftest import Built
from tests.server.conftest import client_of, events_of
from xpress_export.cli.main import cli
from xpress_runtime.errors import EnvironmentProblem, OptionError
from xpress_runtime.generation import GenerationConfig
from xpress_runtime.server.run import listen
from xpress_runtime.serving import BatchSession, Limits
from xpress_runtime.session import Session

PROMPTS = ([1, 2, 3], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 12], [5])
TOKENS = 12


@pytest.fixture(scope="module")
def real(tiny: Built) -> Iterator[TestClient]:
    with BatchSession.open(tiny.bundle.folder, "ort-cpu", slots=2, threads=1, limits=Limits(timeout=60, max_queue=8)) as session:
        yield client_of(session)


@pytest.fixture(scope="module")
def expected(tiny: Built) -> list[tuple[int, ...]]:
    with Session.open(tiny.bundle.folder, "ort-cpu", threads=1) as session:
        config = GenerationConfig(max_new_tokens=TOKENS, ignore_stop=True, speculation="off")
        return [session.generate(prompt, config).tokens for prompt in PROMPTS]


@pytest.mark.parametrize("speculation", ["on", "auto", "off"])
@pytest.mark.parametrize("stream", [False, True])
def test_tokens_are_those_of_a_session(real: TestClient, expected: list[tuple[int, ...]], speculation: str, stream: bool) -> None:
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        body = {"prompt": prompt, "max_tokens": TOKENS, "ignore_stop": True, "speculation": speculation, "stream": stream}
        answer = real.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        if stream:
            *steps, (_name, done) = events_of(answer.text)
            assert tuple(token["id"] for _event, step in steps for token in step["tokens"]) == tokens
            assert steps[0][1].keys() >= {"prefill_ms"}
        else:
            done = answer.json()
        assert tuple(done["tokens"]) == tokens
        assert done["stats"]["output_tokens"] == done["output_tokens"] == TOKENS


def test_usage_is_that_of_the_statistics(real: TestClient) -> None:
    model = real.get("/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": [1, 2, 3], "max_tokens": TOKENS, "ignore_eos": True, "speculation": "on"}
    usage = real.post("/v1/completions", json=body).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, TOKENS)
    assert usage["speculation"]["rounds"] > 0
    chunks = events_of(real.post("/v1/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}}).text)
    streamed = chunks[-2][1]["usage"]
    assert {name: streamed[name] for name in ("prompt_tokens", "completion_tokens")} == {"prompt_tokens": 3, "completion_tokens": TOKENS}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt": "text"}, "token ids only"),
        ({"prompt": [10**6]}, "expected a token id"),
        ({"prompt": [1] * 64}, "capacity"),
        ({"num_passes": 7}, "num_passes"),
        ({"stop": "x"}, "stop"),
        ({"temperature": 1}, "sampling"),
    ],
)
def test_what_the_bundle_has_not_is_refused(real: TestClient, fields: dict[str, Any], named: str) -> None:
    answer = real.post("/generate", json={"prompt": [1], "max_tokens": 2, **fields})
    assert answer.status_code == 400, answer.text
    assert named in answer.json()["error"]["message"]


def test_metrics_of_a_real_session(real: TestClient) -> None:
    real.post("/generate", json={"prompt": [1], "max_tokens": 4, "speculation": "on", "ignore_stop": True})
    text = real.get("/metrics").text
    assert 'xpress_drafts_verified_total{position="1"}' in text
    assert "xpress_slots 2.0" in text


# The command.


def refusal(*arguments: object, environment: dict[str, str] | None = None) -> str:
    result = CliRunner().invoke(cli, ["serve", *(str(argument) for argument in arguments)], env=environment)
    assert isinstance(result.exception, OptionError | EnvironmentProblem), result.output
    message = str(result.exception)
    assert "\n" not in message
    return message


def test_the_command_refuses_before_it_loads_a_model(tiny: Built, tmp_path: Path) -> None:
    folder = tiny.bundle.folder
    with listen("127.0.0.1", 0) as taken:
        taken.listen()
        assert "the port is taken" in refusal(folder, "--port", taken.getsockname()[1])
    assert "cannot be read" in refusal(folder, "--api-key-file", tmp_path / "none")
    assert "XPRESS_API_KEY is empty" in refusal(folder, environment={"XPRESS_API_KEY": ""})
    assert "expected an address" in refusal(folder, "--host", "no.such.host.invalid")
    assert "printable" in refusal(folder, "--model-name", "a\nb")


@pytest.mark.skipif(sys.platform == "win32", reason="SIGTERM ends a process at once there")
def test_the_command_serves_until_a_signal(tiny: Built, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("from-file\n")
    program = "from xpress_export.cli.serve import command; command()"
    options = [
        "--port",
        "0",
        "--threads",
        "1",
        "--backend",
        "ort-cpu",
        "--api-key-file",
        str(keys),
        "--model-name",
        "mine",
        "--host",
        "0.0.0.0",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "XPRESS_API_KEY": "from-environment"}
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tiny.bundle.folder), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("serving mine at http://127.0.0.1:"), process.communicate(timeout=10)[1]
        url = line.split(" at ")[1].split()[0]
        assert httpx.get(f"{url}/v1/models").status_code == 401
        for key in ("from-file", "from-environment"):
            answer = httpx.post(f"{url}/generate", json={"prompt": [1, 2], "max_tokens": 3}, headers={"x-api-key": key}, timeout=30)
            assert json.loads(answer.text)["prompt_tokens"] == 2
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out) == (0, "")
        assert err.startswith("draining: no new requests")
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(sys.platform == "win32", reason="SIGTERM ends a process at once there")
def test_a_server_open_to_all_warns(tiny: Built) -> None:
    program = "from xpress_export.cli.serve import command; command()"
    environment = {name: value for name, value in os.environ.items() if name != "XPRESS_API_KEY"} | {
        "PYTHONPATH": os.pathsep.join(sys.path)
    }
    arguments = [str(tiny.bundle.folder), "--port", "0", "--host", "0.0.0.0", "--threads", "1", "--backend", "ort-cpu"]
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("serving ")
        process.send_signal(signal.SIGTERM)
        _out, err = process.communicate(timeout=30)
        warned, draining = err.splitlines()
        assert warned.startswith("warning: 0.0.0.0 is open to other machines")
        assert "draining: no new requests" in draining
    finally:
        process.kill()
        process.wait()
