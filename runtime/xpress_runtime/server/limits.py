"""What stands before the routes, as plain ASGI: keys, the size and time of a body, HEAD, and a line in log and metrics for each request."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xpress_runtime.server.metrics import Metrics
from xpress_runtime.server.problems import CLIENT_GONE, ApiError, shown

logger = logging.getLogger("xpress_runtime.server")

OPEN_PATHS = ("/", "/health", "/ready")
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT")


class Observed:
    """Counts and logs every request; bodies and keys are never logged."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        method = scope["method"] if scope["method"] in _METHODS else "other"
        status, has_begun = 500, False

        async def note(message: Message) -> None:
            nonlocal status, has_begun
            if message["type"] == "http.response.start":
                status, has_begun = message["status"], True
            await send(message)

        try:
            await self._app(scope, receive, note)
            if not has_begun:
                # Nobody was left to answer.
                status = CLIENT_GONE
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.http(route, method, status)
            logger.info("%s %s %d in %.0f ms", method, shown(scope["path"]), status, 1e3 * (time.perf_counter() - started))


class HeadAsGet:
    """HEAD is GET without its body, wherever there is a GET."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        # The same scope: what routes note in it is read outside.
        scope["method"] = "GET"
        await self._app(scope, receive, without_body)


class KeyRequired:
    """Refuses what brings none of the keys, in ``Authorization: Bearer`` or ``X-API-Key``; some paths are open to all."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = tuple(key.encode("ascii") for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._keys or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        number = self._number(scope)
        if number is None:
            challenge = {"WWW-Authenticate": "Bearer"}
            message = "no valid API key came with the request; send one as Authorization: Bearer … or X-API-Key"
            await ApiError(401, message, code="invalid_api_key", headers=challenge).response()(scope, receive, send)
            return
        scope.setdefault("state", {})["api_key"] = number
        await self._app(scope, receive, send)

    def _number(self, scope: Scope) -> int | None:
        """Which key was brought; None for none."""
        offered = []
        for name, value in scope["headers"]:
            scheme, _space, credentials = value.partition(b" ")
            if name == b"x-api-key":
                offered.append(value.strip())
            elif name == b"authorization" and scheme.lower() == b"bearer":
                offered.append(credentials.strip())
        found = None
        # All with all: how long it takes tells nothing about which one it was.
        for number, key in enumerate(self._keys):
            for value in offered:
                if hmac.compare_digest(key, value):
                    found = number
        return found


class BodyLimit:
    """Reads a body whole before anything else does, up to a size and a time, whether its length was announced or not."""

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._seconds):
                body = await self._read(scope, receive)
        except TimeoutError:
            problem = ApiError(
                408, f"the body did not arrive within {self._seconds:g} seconds", code="timeout", headers={"Connection": "close"}
            )
            await problem.response()(scope, receive, send)
            return
        except ApiError as problem:
            await problem.response()(scope, receive, send)
            return
        if body is None:
            return
        replayed = False

        async def replay() -> Any:
            nonlocal replayed
            if replayed:
                return await receive()
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body; None where the client went away in the middle of it."""
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
        if announced.isdigit() and int(announced[:20]) > self._max_bytes:
            raise self._too_large(announced[:20].decode("ascii"))
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > self._max_bytes:
                raise self._too_large(f"at least {size}")
            if not message.get("more_body", False):
                return b"".join(chunks)

    def _too_large(self, size: str) -> ApiError:
        # What is left of it is not read, so the connection cannot go on.
        message = f"the body has {size} bytes, expected at most {self._max_bytes}"
        return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})
