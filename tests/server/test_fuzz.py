"""Whatever is sent, the server answers without a fault of its own: requests made from its description, and requests made to hurt."""

from __future__ import annotations

import gc
import json
import random
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance
from starlette.testclient import TestClient

from tests.conftest import Built
from tests.server.conftest import app_of
from xpress_runtime.serving import BatchSession, Limits

# What a tiny timeout of the request's own makes true.
MAY_TAKE_TOO_LONG = 504
ROUTES = ("/generate", "/v1/completions", "/v1/chat/completions")
# Of a process whose allocator has settled.
GROWTH_BYTES = 20_000_000


@pytest.fixture(scope="module")
def session(tiny: Built) -> Iterator[BatchSession]:
    with BatchSession.open(
        tiny.bundle.folder, "ort-cpu", slots=2, threads=1, verify=False, limits=Limits(max_new_tokens=3, timeout=20)
    ) as session:
        yield session


@pytest.fixture(scope="module")
def client(session: BatchSession) -> TestClient:
    return TestClient(app_of(session), raise_server_exceptions=False)


@pytest.mark.parametrize("examples", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_requests_made_from_the_description(session: BatchSession, examples: int) -> None:
    described = schemathesis.openapi.from_asgi("/openapi.json", app_of(session))
    operations = [found.ok() for found in described.get_all_operations()]
    assert {operation.path for operation in operations} > set(ROUTES)
    for operation in operations:

        @hypothesis.settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck))
        @hypothesis.given(case=operation.as_strategy())
        def check(case: schemathesis.Case) -> None:
            response = case.call()
            assert response.status_code < 500 or response.status_code == MAY_TAKE_TOO_LONG, response.text
            # Statuses, content types and bodies are those that the description lists.
            case.validate_response(response, checks=[content_type_conformance, response_schema_conformance, status_code_conformance])

        check()


def _malformed(count: int) -> Iterator[tuple[str, bytes]]:
    choice = random.Random(17)
    good: list[Any] = [
        {"prompt": [1, 2, 3], "max_tokens": 2},
        {"prompt": [4], "model": "x", "max_tokens": 1, "stop": ["a"]},
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    ]
    odd = [None, True, -1, 0, 1e308, 10**400, "", "\ud800", "\0", "x" * 5000, [], [[]], {}, {"a": {"b": []}}, [1, "a"], float("nan")]
    for _ in range(count):
        body = dict(choice.choice(good))
        kind = choice.randrange(4)
        if kind == 0:
            body[choice.choice([*body, "temperature", "seed", "stream", "top_p", "speculation", "surprise"])] = choice.choice(odd)
        text = json.dumps(body).encode()
        if kind == 1:
            text = text[: choice.randrange(len(text))]
        elif kind == 2:
            place = choice.randrange(len(text))
            text = text[:place] + bytes([choice.randrange(256)]) + text[place + 1 :]
        elif kind == 3:
            text = choice.choice((b"[" * 3000, b'{"prompt":' * 2000, bytes(choice.randrange(256) for _ in range(40)), b"", b"null"))
        yield choice.choice(ROUTES), text


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_malformed_requests_leave_nothing_behind(client: TestClient, session: BatchSession, count: int) -> None:
    headers = {"Content-Type": "application/json"}
    seen: dict[int, int] = {}
    before = 0
    for index, (route, content) in enumerate(_malformed(count)):
        if index == count // 2:
            gc.collect()
            before = _resident()
        status = client.post(route, content=content, headers=headers).status_code
        seen[status] = seen.get(status, 0) + 1
    assert all(status < 500 for status in seen), seen
    assert seen[400] > count / 2
    gc.collect()
    assert _resident() - before < GROWTH_BYTES
    status = session.status()
    assert (status.running, status.reading, status.queued, status.failed) == (0, 0, 0, None)
    assert client.post("/generate", json={"prompt": [1, 2, 3], "max_tokens": 2}).status_code == 200
