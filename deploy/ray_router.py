"""The router in front of the replicas: HTTP requests in, answers out, and another try where a replica dies before it began to answer.

Holds no model, and knows nothing about what requests mean.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from deploy.ray_replica import TIME_TO_END, RawHeaders, ReplicaFailed

logger = logging.getLogger("ray.serve")

_RETRY_AFTER = "1"
# Headers that belong to one connection, not to the request.
_OF_CONNECTION = frozenset({b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"})
# What a call to a replica that is lost may raise; of RayTaskError its cause decides.
_LOSSES = (RayActorError, RayTaskError, ReplicaFailed)


class Router:
    """Passes requests on to replicas, and once more where one died before a byte of its answer was sent."""

    def __init__(self, replicas: DeploymentHandle[Any], retries: int, max_body: int) -> None:
        self._replicas = replicas
        self._answers: Any = replicas.options(method_name="answer", stream=True)
        self._retries = retries
        self._max_body = max_body
        self._waiting = 0
        self._draining = False

    async def __call__(self, request: Request) -> Response:
        if self._draining:
            return _error(503, "the service ends and takes no new requests; try again later", "server_error")
        self._waiting += 1
        try:
            return await self._route(request)
        finally:
            self._waiting -= 1

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests, and wait until a replica has begun to answer each that there is: Ray waits for those itself."""
        self._draining = True
        deadline = time.monotonic() + seconds
        while self._waiting and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return not self._waiting

    async def _route(self, request: Request) -> Response:
        body = b""
        try:
            async for part in request.stream():
                body += part
                if len(body) > self._max_body:
                    return _error(413, f"the request has more than {self._max_body} bytes; send a shorter one", "invalid_request_error")
        except ClientDisconnect:
            return Response(status_code=499)
        headers = [(name, value) for name, value in request.headers.raw if name.lower() not in _OF_CONNECTION]
        call = (request.method, request.url.path, request.scope.get("query_string", b""), headers, body)
        if request.url.path == "/metrics" and request.method == "GET":
            return await self._metrics(call)
        for left in reversed(range(self._retries + 1)):
            answer = self._answers.remote(*call)
            try:
                status, answered = await anext(answer)
                # Held back until there is some of the body: the first token may be what a replica dies of.
                first = await anext(answer, b"")
            except BackPressureError:
                return _error(429, "every replica is busy and the queue is full; try again later", "rate_limit_error")
            except DeploymentUnavailableError:
                return _error(503, "no replica runs; try again later", "server_error")
            except _LOSSES as problem:
                if not _replica_is_gone(problem):
                    raise
                logger.warning("a replica was lost before it answered %s; %d more tries", request.url.path, left)
                if left and not isinstance(problem, RayActorError):
                    await asyncio.sleep(2 * TIME_TO_END)
                continue
            except asyncio.CancelledError:
                answer.cancel()
                raise
            response = StreamingResponse(_rest(first, answer, _has_events(answered), call[1]), status_code=status)
            response.raw_headers = answered
            return response
        return _error(503, f"{self._retries + 1} replicas were lost while they answered; not tried again", "server_error")

    async def _metrics(self, call: tuple[Any, ...]) -> Response:
        """The metrics of all replicas, each sample with the label ``replica``."""
        from prometheus_client import CONTENT_TYPE_LATEST

        try:
            answers = await self._replicas.broadcast("page", *call).results_async(return_exceptions=True)
        except DeploymentUnavailableError:
            return _error(503, "no replica runs; try again later", "server_error")
        # One that is about to be replaced has none.
        pages = [answer for answer in answers if not isinstance(answer, BaseException)]
        for _name, status, headers, body in pages:
            if status != 200:
                response = Response(body, status)
                response.raw_headers = headers
                return response
        return Response(merged_metrics({name: body.decode() for name, _status, _headers, body in pages}), media_type=CONTENT_TYPE_LATEST)


async def _rest(first: bytes, answer: Any, has_events: bool, path: str) -> AsyncIterator[bytes]:
    """The body from its first part on. An event stream whose replica dies ends with an error event: its client has had a part of it."""
    try:
        yield first
        async for part in answer:
            yield part
    except _LOSSES as problem:
        if not (has_events and _replica_is_gone(problem)):
            raise
        body = json.dumps(_error_body("the replica was lost in the middle of the answer; send the request again", "server_error"))
        yield (f"data: {body}\n\n" if path.startswith("/v1/") else f"event: error\ndata: {body}\n\n").encode()
    finally:
        answer.cancel()


def _has_events(headers: RawHeaders) -> bool:
    return any(name.lower() == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)


def _replica_is_gone(problem: BaseException) -> bool:
    return isinstance(problem, RayActorError | ReplicaFailed) or isinstance(getattr(problem, "cause", None), RayActorError | ReplicaFailed)


def _error_body(message: str, kind: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def _error(status: int, message: str, kind: str) -> Response:
    return JSONResponse(_error_body(message, kind), status, {"Retry-After": _RETRY_AFTER} if status in (429, 503) else None)


def merged_metrics(pages: Mapping[str, str]) -> bytes:
    """Prometheus pages by replica as one page; every sample gets the label ``replica``."""
    from prometheus_client import generate_latest
    from prometheus_client.metrics_core import Metric
    from prometheus_client.parser import text_string_to_metric_families

    families: dict[str, Metric] = {}
    for replica, page in pages.items():
        for family in text_string_to_metric_families(page):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                merged.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)

    class Collected:
        def collect(self) -> list[Metric]:
            return list(families.values())

    return generate_latest(Collected())
