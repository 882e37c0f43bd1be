"""A packaged bundle in a real Triton server, where one is installed.

``tritonserver`` is looked for on PATH; TRITON_BACKENDS names the folder of its backends where it is not the usual one. Its Python backend
takes the packages of the Python on PATH, so the runtime must be installed there.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.conftest import Built
from xpress_export.triton import PackageOptions, write_model
from xpress_runtime.generation import GenerationConfig
from xpress_runtime.session import Session

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("tritonserver") is None, reason="tritonserver is not on PATH"),
]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def url(tiny: Built, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("triton")
    write_model(tiny.bundle, folder / "repository", PackageOptions("ort-cpu", slots=4, threads=1), name="tiny")
    port = _free_port()
    command = ["tritonserver", "--model-repository", str(folder / "repository"), "--http-address", "127.0.0.1", "--http-port", str(port)]
    command += ["--allow-grpc", "false", "--allow-metrics", "false", "--exit-timeout-secs", "20"]
    if (backends := os.environ.get("TRITON_BACKENDS")) is not None:
        command += ["--backend-directory", backends]
    log = folder / "log"
    with log.open("w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 60
        while not _ready(port):
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v2/models/tiny"
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0, log.read_text()[-4000:]
    finally:
        server.kill()
        server.wait()


def _ready(port: int) -> bool:
    try:
        return bool(urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5).status == 200)
    except OSError:
        return False


def _post(url: str, **inputs: Any) -> tuple[int, str]:
    request = urllib.request.Request(url, json.dumps(inputs).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()


def _expected(built: Built, prompts: list[list[int]]) -> list[list[int]]:
    with Session.open(built.bundle.folder, "ort-cpu", threads=1) as session:
        return [list(session.generate(prompt, GenerationConfig(max_new_tokens=24)).tokens) for prompt in prompts]


def test_many_clients_get_the_tokens_of_a_session(url: str, tiny: Built) -> None:
    prompts = [[2 + number, 5, 7] for number in range(20)]
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda prompt: _post(f"{url}/generate", INPUT_IDS=prompt, MAX_TOKENS=24), prompts))
    assert {status for status, _ in answers} == {200}
    assert [json.loads(body)["TOKEN_IDS"] for _, body in answers] == _expected(tiny, prompts)


def test_a_stream_of_events(url: str, tiny: Built) -> None:
    status, body = _post(f"{url}/generate_stream", INPUT_IDS=[3, 4, 5], MAX_TOKENS=24, STREAM=True)
    assert status == 200
    events = [json.loads(line.removeprefix("data: ")) for line in body.splitlines() if line.startswith("data: ")]
    assert len(events) > 2
    # Triton writes a list of one as its item.
    ids = [event["TOKEN_IDS"] for event in events]
    assert [[token for part in ids for token in (part if isinstance(part, list) else [part])]] == _expected(tiny, [[3, 4, 5]])
    assert events[-1]["FINISH_REASON"] == "length"


def test_refusals_say_why(url: str) -> None:
    assert "prompt item 0 is 99" in _post(f"{url}/generate", INPUT_IDS=[99, 4])[1]
    assert "the input is MAX_TOKENS" in _post(f"{url}/generate", INPUT_IDS=[3, 4], max_tokens=3)[1]
    assert _post(f"{url}/generate", INPUT_IDS=[3, 4], MAX_TOKENS=2)[0] == 200
