"""One replica: a session and the HTTP application over it, called by Ray. Knows nothing about other replicas."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import serve

from deploy.ray_arguments import Arguments
from xpress_runtime.errors import XpressError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from xpress_runtime.serving import BatchSession

logger = logging.getLogger("ray.serve")

# What a session lets wait beyond what Ray sends it: one that was just cancelled is gone for Ray, and for the session at its next round.
_SLACK = 32
# Seconds that an application has to notice that its client is gone before it is cancelled.
TIME_TO_LEAVE = 5.0
# Seconds in which the last words of a failed replica reach the router, which does not ask again before.
TIME_TO_END = 0.3

RawHeaders = list[tuple[bytes, bytes]]


class ReplicaFailed(Exception):
    """The session of a replica has ended by itself; another replica can answer."""


Opener = Callable[[Arguments], "tuple[BatchSession, FastAPI]"]


def open_service(arguments: Arguments) -> tuple[BatchSession, FastAPI]:
    """The session of a replica and the application over it, as ``xpress-export serve`` has them."""
    from xpress_runtime.server import ServerSettings, create_app
    from xpress_runtime.server.settings import read_keys
    from xpress_runtime.serving import BatchSession, Limits

    limits = Limits(max_queue=arguments.max_queue + _SLACK, max_new_tokens=arguments.max_tokens, timeout=arguments.timeout)
    keys = () if arguments.api_key_file is None else read_keys(Path(arguments.api_key_file))
    settings = ServerSettings(api_keys=keys, max_body_bytes=arguments.max_body, model_name=arguments.model_name)
    session = BatchSession.open(arguments.bundle, arguments.backend, slots=arguments.slots, threads=arguments.cores, limits=limits)
    return session, create_app(session, settings)


class Replica:
    """One session and its application. Ray calls it; requests come from the router."""

    def __init__(self, arguments: Mapping[str, Any], opener: Opener = open_service) -> None:
        context = serve.get_replica_context()
        self._arguments = Arguments.read(arguments)
        self._name = context.replica_id.unique_id
        if self._arguments.pin:
            _pin(context.rank.local_rank, self._arguments.cores)
        try:
            self._session, self._app = opener(self._arguments)
        except XpressError as problem:
            # As text: Ray shows the error of a constructor with its whole traceback, and the message should be the last line.
            raise RuntimeError(str(problem)) from None
        self._ending = False
        self._leaving: set[asyncio.Task[None]] = set()

    async def answer(self, method: str, path: str, query: bytes, headers: RawHeaders, body: bytes) -> AsyncIterator[Any]:
        """Answer one HTTP request: yields (status, headers), then the parts of the body as they come.

        Raises ReplicaFailed instead of an answer that only says that the session is dead. A caller that cancels is a client that went away.
        """
        messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        inbox = [{"type": "http.request", "body": body, "more_body": False}]
        gone = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if inbox:
                return inbox.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            messages.put_nowait(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query,
            "root_path": "",
            "headers": headers,
            "client": None,
            "server": None,
        }
        task = asyncio.ensure_future(self._app(scope, receive, send))
        task.add_done_callback(lambda _: messages.put_nowait(None))
        started = False
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    if message["status"] >= 500 and (reason := self._session.status().failed):
                        self._give_up()
                        raise ReplicaFailed(f"replica {self._name}: {reason}")
                    started = True
                    yield message["status"], [*message.get("headers", ()), (b"x-replica", self._name.encode())]
                elif message["type"] == "http.response.body" and message.get("body"):
                    yield message["body"]
            if (problem := task.exception()) is not None:
                if not started:
                    raise problem
                logger.error("after the answer had begun", exc_info=problem)
        finally:
            gone.set()
            if not task.done():
                self._leaving.add(task)
                task.add_done_callback(self._leaving.discard)
                asyncio.get_running_loop().call_later(TIME_TO_LEAVE, task.cancel)

    async def page(self, method: str, path: str, query: bytes, headers: RawHeaders, body: bytes) -> tuple[str, int, RawHeaders, bytes]:
        """The answer in one piece, after the name of the replica: status, headers, body."""
        (status, answered), *parts = [part async for part in self.answer(method, path, query, headers, body)]
        return self._name, status, answered, b"".join(parts)

    async def describe(self) -> dict[str, Any]:
        """For operators: which process this is and what its session does."""
        return {"replica": self._name, "pid": os.getpid(), **asdict(self._session.status())}

    def check_health(self) -> None:
        """Ray replaces a replica for which this raises."""
        if reason := self._session.status().failed:
            raise ReplicaFailed(f"replica {self._name}: {reason}")

    def _give_up(self) -> None:
        """End the process once its answers are on their way: a replica that refuses fast would draw all requests until Ray's next check."""
        if not self._ending:
            self._ending = True
            logger.error("replica %s ends, because its session has failed", self._name)
            asyncio.get_running_loop().call_later(TIME_TO_END, os._exit, 1)

    def __del__(self) -> None:
        # Ray has waited for what ran; what is left has had its time. Not there where the constructor failed.
        if (session := self.__dict__.pop("_session", None)) is not None:
            session.drain(timeout=self._arguments.drain_seconds)
            session.close()


def _pin(rank: int, cores: int) -> None:
    """Keep the threads that this one starts to the cores of its rank on the machine; nothing where there are too few."""
    if not hasattr(os, "sched_setaffinity"):
        return
    own = sorted(os.sched_getaffinity(0))[rank * cores : (rank + 1) * cores]
    if len(own) == cores:
        os.sched_setaffinity(0, own)
    else:
        logger.warning("replica %d is not pinned: the machine has too few cores for %d of them", rank, cores)
