"""Runs an application until it is told to end: it listens, and at the first signal finishes what it has.

SIGTERM, Ctrl-C or SIGHUP: no new requests, those that are there go on, then the end. A second one, a moment later, cancels them.
Knows uvicorn and signals.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import uvicorn
from fastapi import FastAPI
from sse_starlette.sse import AppStatus

from xpress_runtime.errors import EnvironmentProblem, OptionError
from xpress_runtime.server.connections import Room, connection_limits
from xpress_runtime.server.work import Service

logger = logging.getLogger("xpress_runtime.server")

# Seconds for answers that are complete to reach their clients.
_FLUSH_SECONDS = 5
# Within which the same signal again is the same wish.
_SAME_SIGNAL_SECONDS = 0.5
# Not every system has it.
_HANGUP: int | None = getattr(signal, "SIGHUP", None)
_REASONS = {
    errno.EADDRINUSE: "the port is taken",
    errno.EACCES: "this user may not",
    errno.EADDRNOTAVAIL: "this machine has no such address",
}


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound; port 0 takes a free one. Raises EnvironmentProblem, OptionError."""
    try:
        family, kind, protocol, _name, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "no host name"
        raise OptionError(f"the host is {host!r}, expected an address or a name of this machine: {reason}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Nobody gets a connection before somebody can answer: listening begins with the server.
        listener.bind(address)
    except OSError as problem:
        listener.close()
        raise _cannot_listen(problem, host, port) from None
    listener.setblocking(False)
    return listener


def _cannot_listen(problem: OSError, host: str, port: int) -> EnvironmentProblem:
    reason = _REASONS.get(problem.errno or 0, problem.strerror)
    return EnvironmentProblem(f"cannot listen on {host} port {port}: {reason}; choose another port or host")


def url_of(host: str, listener: socket.socket) -> str:
    """Where a browser finds what listens; an address that stands for all of them becomes this machine's own."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://{f'[{shown}]' if ':' in shown else shown}:{listener.getsockname()[1]}"


def is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine reaches it."""
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def serve(app: FastAPI, listener: socket.socket, *, drain_seconds: float, on_listening: Callable[[], None] | None = None) -> None:
    """Serve ``app`` on ``listener`` until a signal ends it; returns when it has drained. Call it on the main thread.

    ``drain_seconds``: how long requests may go on after the signal. ``on_listening`` is called once requests are taken.
    """
    service = app.state.service
    assert isinstance(service, Service)
    # It would cut event streams at the first signal; here they end with their requests.
    AppStatus.enable_automatic_graceful_drain = False
    max_connections, backlog = connection_limits()
    room = Room(service.settings.max_connections or max_connections, service.settings.head_seconds)
    config = uvicorn.Config(
        app,
        # Over the one of uvicorn's readers that bounds the size of headers.
        http=room.protocol(),
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        backlog=backlog,
        timeout_graceful_shutdown=_FLUSH_SECONDS,
    )
    _DrainingServer(config, service, drain_seconds, on_listening).run(sockets=[listener])


@contextmanager
def _hangup_as(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    # Ignored is how nohup keeps a server alive. Only the main thread may set what signals do.
    if _HANGUP is None or threading.current_thread() is not threading.main_thread() or signal.getsignal(_HANGUP) in (signal.SIG_IGN, None):
        yield
        return
    former = signal.signal(_HANGUP, handler)
    try:
        yield
    finally:
        signal.signal(_HANGUP, former)


class _DrainingServer(uvicorn.Server):
    """Goes on to answer, with 503, while it drains; uvicorn's own would stop to listen first, and would end with the signal."""

    def __init__(self, config: uvicorn.Config, service: Service, drain_seconds: float, on_listening: Callable[[], None] | None) -> None:
        super().__init__(config)
        self._service = service
        self._drain_seconds = drain_seconds
        self._on_listening = on_listening
        self._num_signals = 0
        self._last_signal: int | None = None
        self._last_time = 0.0
        self._draining: asyncio.Task[None] | None = None
        self._cancelled = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as problem:
            # Two can be bound to a port, and only one can listen.
            host, port = sockets[0].getsockname()[:2] if sockets else ("?", 0)
            raise _cannot_listen(problem, host, port) from None
        if self._on_listening is not None:
            self._on_listening()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        with _hangup_as(self.handle_exit), super().capture_signals():
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        # In the middle of whatever runs, so it only takes note; a tick follows within a tenth of a second.
        now = time.monotonic()
        if sig == _HANGUP:
            # A service manager may send both, one after the other.
            sig = signal.SIGTERM
        # A terminal signals the server and whatever started it, which passes the same one on.
        if sig != self._last_signal or now - self._last_time > _SAME_SIGNAL_SECONDS:
            self._num_signals += 1
        self._last_signal, self._last_time = sig, now

    async def on_tick(self, counter: int) -> bool:
        if self._num_signals and self._draining is None:
            logger.warning("draining: no new requests, at most %.0f seconds for those that run", self._drain_seconds)
            self._draining = asyncio.create_task(self._drain())
        if self._num_signals > 1 and not self._cancelled:
            self._cancelled = True
            logger.warning("a second signal: what runs is cancelled")
            self._service.cancel_all()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self._draining is not None:
            with suppress(asyncio.CancelledError):
                await self._draining

    async def _drain(self) -> None:
        try:
            complete = await asyncio.to_thread(self._service.session.drain, self._drain_seconds)
            if not complete:
                logger.warning("some requests were cancelled after %.0f seconds of draining", self._drain_seconds)
        finally:
            self.should_exit = True
