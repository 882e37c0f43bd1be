"""Connections: how many there may be, how long one may take to bring the head of a request, and answers to what is no HTTP.

Knows uvicorn's reader of HTTP/1.1 and what it calls when; knows nothing of routes and of the session.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from xpress_runtime.server.problems import RETRY_SECONDS, ApiError

logger = logging.getLogger("xpress_runtime.server")

# Files of the process that are no connections: the model's, its libraries', the log.
_OTHER_FILES = 64
# Connections over the limit that may bring a request, and be told that there is no room for it.
_MAX_SURPLUS = 16
_SURPLUS_SECONDS = 2.0
# A connection that is younger has its request on the way, most likely.
_GRACE_SECONDS = 0.5
_MAX_CONNECTIONS = 16_384
_MAX_BACKLOG = 1024
_WARN_EVERY_SECONDS = 60.0


def connection_limits(open_files: int | None = None) -> tuple[int, int]:
    """How many connections a process may hold, and how many may wait to be taken, for its limit of open files (default: its own)."""
    files = _file_limit() if open_files is None else open_files
    # asyncio takes all that wait before it looks at any of them, so those need files too.
    backlog = max(1, min(_MAX_BACKLOG, files // 8))
    return max(1, min(_MAX_CONNECTIONS, files - backlog - _MAX_SURPLUS - _OTHER_FILES)), backlog


def _file_limit() -> int:
    if sys.platform == "win32":
        return _MAX_CONNECTIONS
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 2 * _MAX_CONNECTIONS if limit == resource.RLIM_INFINITY else limit


class Room:
    """What the connections of one server share: a limit, and which of them wait for a request, the longest first."""

    def __init__(self, max_connections: int, head_seconds: float) -> None:
        self.max_connections = max_connections
        self.head_seconds = head_seconds
        # Since when.
        self.waiting: dict[BoundedProtocol, float] = {}
        self.surplus: dict[BoundedProtocol, float] = {}
        self._warned = -_WARN_EVERY_SECONDS

    def protocol(self) -> type[BoundedProtocol]:
        """What a server of uvicorn's makes its connections of."""
        return type("BoundedProtocol", (BoundedProtocol,), {"room": self})

    def admit(self, open_connections: int, now: float) -> bool:
        """Whether one more may stay; one that waits for a request may have had to go for it. ``now``: seconds."""
        if open_connections <= self.max_connections:
            return True
        if now - self._warned >= _WARN_EVERY_SECONDS:
            self._warned = now
            logger.warning(
                "%d connections are open, as many as may: those that wait for a request are closed, others are refused with 503",
                self.max_connections,
            )
        oldest, since = next(iter(self.waiting.items()), (None, now))
        if oldest is not None and now - since >= _GRACE_SECONDS:
            oldest.drop()
            return True
        if len(self.surplus) >= _MAX_SURPLUS:
            next(iter(self.surplus)).drop()
        return False


class BoundedProtocol(H11Protocol):
    """A connection that has so long to bring the head of its first request, and of every further one."""

    room: Room
    _timer: asyncio.TimerHandle | None = None
    _is_surplus = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self.room.admit(len(self.connections), self.loop.time()):
            self._is_surplus = True
            self.app = _no_room
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop()

    def handle_events(self) -> None:
        super().handle_events()
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        # Called where the reader's complaint is handled, which says more than ``msg``.
        reason = sys.exception() or msg
        self._end_with(ApiError(400, f"the request is not valid HTTP: {reason}", code="invalid_http"))

    def drop(self) -> None:
        """Close it, with nothing said."""
        self._stop()
        # What its client has not read by now is not waited for.
        self.transport.abort()

    def _watch(self) -> None:
        is_busy = self.cycle is not None and not self.cycle.response_complete
        if is_busy or self.transport.is_closing():
            self._stop()
        elif self._timer is None:
            seconds = min(self.room.head_seconds, _SURPLUS_SECONDS) if self._is_surplus else self.room.head_seconds
            self._timer = self.loop.call_later(seconds, self._on_time, seconds)
            (self.room.surplus if self._is_surplus else self.room.waiting)[self] = self.loop.time()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.room.waiting.pop(self, None)
        self.room.surplus.pop(self, None)

    def _on_time(self, seconds: float) -> None:
        self._stop()
        has_begun = bool(self.conn.trailing_data[0])
        if not has_begun or self.conn.our_state is not h11.IDLE or self.transport.get_write_buffer_size():
            self.drop()
        else:
            self._end_with(ApiError(408, f"the head of the request did not arrive within {seconds:g} seconds", code="timeout"))

    def _end_with(self, problem: ApiError) -> None:
        """Answer, where nothing has been answered yet, and close."""
        if self.cycle is not None and not self.cycle.response_complete:
            # Its application need not answer any more.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            content = json.dumps(problem.body(), ensure_ascii=False).encode()
            headers = [
                *self.server_state.default_headers,
                (b"content-type", b"application/json"),
                (b"content-length", str(len(content)).encode()),
                (b"connection", b"close"),
            ]
            status = problem.status_code
            parts = (
                h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status]),
                h11.Data(content),
                h11.EndOfMessage(),
            )
            for part in parts:
                self.transport.write(self.conn.send(part) or b"")
        self.transport.close()


async def _no_room(scope: Scope, receive: Receive, send: Send) -> None:
    # What is left of its body is not read, so the connection cannot go on.
    headers = {"Connection": "close"}
    problem = ApiError(
        503, "the server has as many connections as it may", code="too_many_connections", retry_after=RETRY_SECONDS, headers=headers
    )
    await problem.response()(scope, receive, send)
