"""Clients that go away, by the interface itself: what they asked for is cancelled, streaming or not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.server.conftest import app_of
from tests.server.fake import MODEL, FakeSession, FakeTokenizer
from xpress_runtime.errors import BundleError
from xpress_runtime.server.problems import refused

CALLS = [
    ("/generate", {"prompt": "hi"}),
    ("/v1/completions", {"model": MODEL, "prompt": "hi"}),
    ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}),
]


class Client:
    """One request of a client that leaves when the test says so."""

    def __init__(self, path: str, body: dict[str, Any]) -> None:
        self.gone = asyncio.Event()
        self.sent: list[Any] = []
        self._body: bytes | None = json.dumps(body).encode()
        headers = [(b"content-type", b"application/json")]
        self._scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "root_path": "", "headers": headers}
        self._scope |= {"scheme": "http", "http_version": "1.1", "client": ("a", 1), "server": ("b", 2)}

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    async def call(self, app: Any) -> None:
        await app(self._scope, self._receive, self._send)


async def _submitted(session: FakeSession, count: int = 1) -> None:
    async with asyncio.timeout(5):
        while len(session.requests) < count:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), CALLS)
def test_a_client_that_leaves_cancels_its_request(path: str, body: dict[str, Any], stream: bool) -> None:
    session = FakeSession(tokenizer=FakeTokenizer(), hold=True)

    async def leave() -> Client:
        client = Client(path, {**body, "stream": stream})
        call = asyncio.create_task(client.call(app_of(session)))
        await _submitted(session)
        assert not session.requests[0].was_cancelled
        client.gone.set()
        async with asyncio.timeout(5):
            await call
        return client

    client = asyncio.run(leave())
    assert session.requests[0].wait()
    assert session.requests[0].state == "cancelled"
    assert session.status().running == 0
    assert client.sent[0]["status"] == (200 if stream else 499)


def test_a_client_that_leaves_while_it_waits_frees_its_place() -> None:
    session = FakeSession(slots=1, hold=True)
    session.submit([1])

    async def leave() -> None:
        client = Client("/generate", {"prompt": [1]})
        call = asyncio.create_task(client.call(app_of(session)))
        await _submitted(session, 2)
        assert session.status().queued == 1
        client.gone.set()
        await call

    asyncio.run(leave())
    assert session.requests[1].wait()
    assert (session.status().running, session.status().queued) == (1, 0)
    session.close()


def test_clients_at_once_get_their_own() -> None:
    session = FakeSession(slots=3, tokenizer=FakeTokenizer())

    async def together() -> list[Client]:
        app = app_of(session)
        clients = [Client("/generate", {"prompt": [1], "max_tokens": count}) for count in range(1, 5)]
        await asyncio.gather(*(client.call(app) for client in clients))
        return clients

    for count, client in enumerate(asyncio.run(together()), start=1):
        assert json.loads(client.sent[1]["body"])["output_tokens"] == count


def test_all_can_be_cancelled() -> None:
    session = FakeSession(hold=True)

    async def cancelled() -> tuple[list[Client], int]:
        app = app_of(session)
        clients = [Client("/generate", {"prompt": [1], "stream": stream}) for stream in (False, True)]
        calls = [asyncio.create_task(client.call(app)) for client in clients]
        await _submitted(session, 2)
        # Until both are known to the application, not to the session alone.
        await asyncio.sleep(0.1)
        app.state.service.cancel_all()
        await asyncio.gather(*calls)
        return clients, len(app.state.service._active)

    (plain, streamed), _left = asyncio.run(cancelled())
    assert plain.sent[0]["status"] == 503
    assert b'"code":"cancelled"' in b"".join(message.get("body", b"") for message in streamed.sent)


def test_a_damaged_bundle_is_not_the_clients_fault(caplog: pytest.LogCaptureFixture) -> None:
    problem = refused(BundleError("bundle/graphs/head.onnx is missing"))
    assert problem.status_code == 500
    assert "head.onnx" not in str(problem.body())
    assert "head.onnx" in caplog.text
