"""Server-sent events that end with their request: a client that goes away cancels what it asked for. Knows nothing of what is sent."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Receive, Scope, Send

from xpress_runtime.server.work import Work

# Seconds between comments that keep proxies from giving up on a request in the queue.
PING_SECONDS = 15
_LINE_END = "\n"


class EventStream(EventSourceResponse):
    """The events of one request."""

    def __init__(self, events: AsyncIterator[ServerSentEvent], work: Work) -> None:
        super().__init__(events, ping=PING_SECONDS, ping_message_factory=_ping, sep=_LINE_END)
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # Here and not in the generator, which may never have been started.
            self._work.request.cancel()


def event(value: Any, name: str | None = None) -> ServerSentEvent:
    """One event with JSON in it; without a name as OpenAI's are."""
    return ServerSentEvent(json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")), event=name, sep=_LINE_END)


def done() -> ServerSentEvent:
    """What ends a stream of OpenAI's."""
    return ServerSentEvent("[DONE]", sep=_LINE_END)


def _ping() -> ServerSentEvent:
    return ServerSentEvent(comment="still here", sep=_LINE_END)
