"""Clients of applications over fake sessions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from tests.server.fake import FakeSession, FakeTokenizer
from xpress_runtime.server import ServerSettings, create_app


def app_of(session: Any, settings: ServerSettings | None = None) -> FastAPI:
    """An application over a session, fake or real."""
    return create_app(session, settings)


def client_of(session: Any, settings: ServerSettings | None = None) -> TestClient:
    """A client in this process; defects of the server become answers, as they do for everybody."""
    return TestClient(app_of(session, settings), raise_server_exceptions=False)


def events_of(text: str) -> list[tuple[str, Any]]:
    """Server-sent events as (name, data); comments are left out."""
    events = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if line and not line.startswith(":"))
        if "data" in fields:
            data = fields["data"]
            events.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return events


@pytest.fixture
def session() -> Iterator[FakeSession]:
    fake = FakeSession(tokenizer=FakeTokenizer())
    yield fake
    fake.go()
    fake.close()


@pytest.fixture
def client(session: FakeSession) -> TestClient:
    return client_of(session)
