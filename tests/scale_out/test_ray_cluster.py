"""Two replicas under Ray Serve on this machine: they share a load, and what one of them had when it was killed is not lost."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="Ray Serve is not installed (pip install 'ray[serve]')")

import ray
from ray import serve

from deploy.ray_serve import build
from tests.conftest import Built
from xpress_runtime.generation import GenerationConfig
from xpress_runtime.session import Session

ROOT = Path(__file__).resolve().parents[2]
NUM_REQUESTS = 40
MAX_TOKENS = 50
PROMPTS = [[2 + number % 50, 5 + number // 50, 7] for number in range(NUM_REQUESTS)]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system cannot kill a process outright")]


@pytest.fixture(scope="module")
def url(tiny: Built) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        # Of the processes that Ray starts.
        patch.setenv("PYTHONPATH", os.pathsep.join(str(folder) for folder in (ROOT, ROOT / "engines", ROOT / "runtime")))
        ray.init(num_cpus=2, include_dashboard=False, configure_logging=False, log_to_driver=False)
        try:
            with socket.socket() as found:
                found.bind(("127.0.0.1", 0))
                port = found.getsockname()[1]
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            serve.run(build(_arguments(tiny, replicas=2)), name="xpress")
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()
            ray.shutdown()


def _arguments(built: Built, **more: Any) -> dict[str, Any]:
    return {"bundle": str(built.bundle.folder), "backend": "ort-cpu", "slots": 4, "drain_seconds": 20, **more}


def _replicas() -> dict[str, dict[str, Any]]:
    """What the replicas say of themselves, by name."""
    handle = serve.get_deployment_handle("Replica", "xpress")
    found = handle.broadcast("describe").results(timeout_s=20, return_exceptions=True)
    return {one["replica"]: one for one in found if isinstance(one, dict)}


def _post(url: str, **body: Any) -> tuple[int, str | None, str]:
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers["x-replica"], answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.headers["x-replica"], refused.read().decode()


def _ask(url: str, prompt: list[int]) -> tuple[int, str | None, Any]:
    status, replica, body = _post(url, prompt=prompt, max_tokens=MAX_TOKENS, ignore_stop=True)
    return status, replica, json.loads(body)


def _until_replaced(lost: str) -> None:
    deadline = time.monotonic() + 60
    while len(there := _replicas()) != 2 or lost in there:
        assert time.monotonic() < deadline, "the replica was not replaced"
        time.sleep(0.2)


def test_none_is_lost_when_a_replica_is_killed(url: str, tiny: Built) -> None:
    before = _replicas()
    assert len(before) == 2
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        asked = [pool.submit(_ask, url, prompt) for prompt in PROMPTS]
        # Some are answered, and all others are under way.
        for number, one in enumerate(as_completed(asked)):
            if number == 3:
                victim = one.result()[1]
                break
        assert victim is not None
        os.kill(before[victim]["pid"], signal.SIGKILL)
        open_then = sum(not one.done() for one in asked)
        answers = [one.result() for one in asked]
    assert open_then > NUM_REQUESTS // 2
    assert {status for status, _, _ in answers} == {200}
    with Session.open(tiny.bundle.folder, "ort-cpu", threads=1) as session:
        config = GenerationConfig(max_new_tokens=MAX_TOKENS, ignore_stop=True)
        expected = [list(session.generate(prompt, config).tokens) for prompt in PROMPTS]
    assert [body["tokens"] for _, _, body in answers] == expected
    assert set(before) <= {replica for _, replica, _ in answers}
    _until_replaced(victim)


def test_a_stream_that_had_begun_ends_with_an_error(url: str) -> None:
    request = json.dumps({"prompt": PROMPTS[0], "max_tokens": 60, "ignore_stop": True, "stream": True}).encode()
    there = _replicas()
    for _ in range(20):
        # So small a model may be done before it is killed; then once more.
        with urllib.request.urlopen(urllib.request.Request(f"{url}/generate", request, {"Content-Type": "application/json"})) as answer:
            replica = answer.headers["x-replica"]
            os.kill(there[replica]["pid"], signal.SIGKILL)
            body = answer.read().decode()
        _until_replaced(replica)
        if "event: done" not in body:
            break
        there = _replicas()
    *_, last = body.strip().split("\n\n")
    kind, data = last.split("\n")
    assert kind == "event: error"
    assert "lost in the middle of the answer" in json.loads(data.removeprefix("data: "))["error"]["message"]


def test_both_are_in_the_metrics_and_refusals_come_through(url: str) -> None:
    for prompt in PROMPTS[:4]:
        assert _ask(url, prompt)[0] == 200
    with urllib.request.urlopen(f"{url}/metrics", timeout=20) as answer:
        page = answer.read().decode()
    assert all(f'replica="{name}"' in page for name in _replicas())
    status, _, body = _post(url, prompt=[1000])
    assert status == 400
    assert "prompt item 0 is 1000" in json.loads(body)["error"]["message"]
    with urllib.request.urlopen(f"{url}/v1/models", timeout=20) as answer:
        assert json.load(answer)["object"] == "list"


def test_a_replica_that_is_taken_away_finishes_what_it_has(url: str, tiny: Built) -> None:
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        asked = [pool.submit(_ask, url, prompt) for prompt in PROMPTS]
        next(as_completed(asked))
        serve.run(build(_arguments(tiny, replicas=1)), name="xpress")
        answers = [one.result() for one in asked]
    assert {status for status, _, _ in answers} == {200}
    assert len({replica for _, replica, _ in answers}) == 2
    deadline = time.monotonic() + 30
    while len(_replicas()) != 1:
        assert time.monotonic() < deadline, "the replica is still there"
        time.sleep(0.2)
