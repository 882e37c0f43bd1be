"""Keys, sizes, times, queues: what a server refuses before and beside its work."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.server.conftest import app_of, client_of
from tests.server.fake import FakeSession, FakeTokenizer
from xpress_runtime.errors import OptionError
from xpress_runtime.server import ServerSettings
from xpress_runtime.server.settings import read_keys

BODY = {"prompt": "hi", "max_tokens": 1}


@pytest.fixture
def locked(session: FakeSession) -> TestClient:
    return client_of(session, ServerSettings(api_keys=("first-key", "second-key")))


@pytest.mark.parametrize("path", ["/generate", "/v1/models", "/metrics", "/openapi.json", "/nope"])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Basic first-key"},
        {"authorization": "first-key"},
        {"x-api-key": ""},
        {"x-api-key": "first-ke"},
        {"x-api-key": "first-key2"},
        {"x-api-key": "\xff"},
    ],
)
def test_without_a_key_nothing_is_told(locked: TestClient, path: str, headers: dict[str, str]) -> None:
    answer = locked.get(path, headers=[(name.encode(), value.encode("latin-1")) for name, value in headers.items()])
    assert answer.status_code == 401
    assert answer.json()["error"]["type"] == "authentication_error"
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "headers", [{"authorization": "Bearer first-key"}, {"authorization": "bearer second-key"}, {"x-api-key": "second-key"}]
)
def test_with_a_key(locked: TestClient, headers: dict[str, str]) -> None:
    assert locked.get("/v1/models", headers=headers).status_code == 200
    assert locked.get("/metrics", headers=headers).status_code == 200
    assert locked.post("/generate", json=BODY, headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ready", "/"])
def test_open_paths_need_no_key(locked: TestClient, path: str) -> None:
    assert locked.get(path).status_code == 200
    assert locked.head(path).status_code == 200


def test_keys_are_clients_of_their_own(locked: TestClient, session: FakeSession) -> None:
    for key in ("first-key", "second-key"):
        locked.post("/generate", json=BODY, headers={"x-api-key": key})
    first, second = (request.client for request in session.requests)
    assert first != second
    assert "key" not in first


def test_settings_do_not_show_keys() -> None:
    assert "secret" not in repr(ServerSettings(api_keys=("secret",)))


@pytest.mark.parametrize("key", ["", "a b", "é", "a\n"])
def test_keys_that_no_header_can_hold(key: str) -> None:
    with pytest.raises(OptionError, match="expected printable ASCII"):
        ServerSettings(api_keys=(key,))


def test_key_files(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# clients\n\nfirst\n second \n")
    assert read_keys(file) == ("first", "second")
    for content, named in (
        (b"", "holds no key"),
        (b"# x\n", "holds no key"),
        (b"\xff", "not text"),
        (b"ok\na b\n", "line 2"),
        (b"x" * 2**21, "larger"),
    ):
        file.write_bytes(content)
        with pytest.raises(OptionError, match=named):
            read_keys(file)
    with pytest.raises(OptionError, match="cannot be read"):
        read_keys(tmp_path)


def test_large_bodies(session: FakeSession) -> None:
    client = client_of(session, ServerSettings(max_body_bytes=100))
    headers = {"content-type": "application/json"}

    def chunks() -> Iterator[bytes]:
        for _ in range(20):
            yield b" " * 10

    for content in (b" " * 101, chunks()):
        answer = client.post("/generate", content=content, headers=headers)
        assert answer.status_code == 413
        assert "at most 100" in answer.json()["error"]["message"]
    assert client.post("/generate", content=b'{"prompt":"hi","max_tokens":1}' + b" " * 70, headers=headers).status_code == 200


async def _answer(app: Any, receive: Any, **scope: Any) -> list[Any]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json"), *scope.pop("headers", [])]
    fields = {
        "type": "http",
        "method": "POST",
        "path": "/generate",
        "query_string": b"",
        "root_path": "",
        "client": ("a", 1),
        "server": ("b", 2),
    }
    await app({**fields, "scheme": "http", "http_version": "1.1", "headers": headers, **scope}, receive, send)
    return sent


def test_a_body_that_does_not_come(session: FakeSession) -> None:
    app = app_of(session, ServerSettings(body_seconds=0.05))

    async def never() -> None:
        await asyncio.sleep(60)

    sent = asyncio.run(_answer(app, never))
    assert sent[0]["status"] == 408


def test_a_client_that_leaves_in_its_body(session: FakeSession) -> None:
    async def leave() -> dict[str, str]:
        return {"type": "http.disconnect"}

    app = app_of(session)
    assert asyncio.run(_answer(app, leave)) == []
    assert session.requests == []
    # Nobody's defect.
    counted = 'xpress_http_requests_total{method="POST",path="other",status="499"} 1.0'
    assert counted in TestClient(app).get("/metrics").text


@pytest.mark.parametrize("length", [b"1" * 5000, b"-1", b"x", b"\xb2"])
def test_lengths_that_are_no_lengths(session: FakeSession, length: bytes) -> None:
    async def body() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    sent = asyncio.run(_answer(app_of(session), body, headers=[(b"content-length", length)]))
    assert sent[0]["status"] in (400, 413)


def test_a_full_queue() -> None:
    held = FakeSession(tokenizer=FakeTokenizer(), hold=True)
    client = client_of(held)
    for _ in range(held.slots + held.limits.max_queue):
        held.submit([1])
    answer = client.post("/generate", json=BODY)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
    assert answer.json()["error"]["type"] == "rate_limit_error"
    # The header alone says how long: a text that rounds otherwise would contradict it.
    assert not re.search(r"\d s\b", answer.json()["error"]["message"])
    assert client.post("/generate", json={**BODY, "stream": True}).status_code == 429
    assert 'xpress_requests_total{outcome="queue_full"} 2.0' in client.get("/metrics").text
    held.close()


def test_draining(client: TestClient, session: FakeSession) -> None:
    session.drain(0)
    for answer in (client.get("/ready"), client.post("/generate", json={**BODY, "stream": True})):
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
        assert int(answer.headers["retry-after"]) > 0
    assert client.get("/health").status_code == 200


def test_a_session_that_failed(client: TestClient, session: FakeSession) -> None:
    session.failed = "the device is gone"
    for answer in (client.get("/ready"), client.get("/health"), client.post("/generate", json=BODY)):
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "failed")
