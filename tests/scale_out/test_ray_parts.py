"""The parts of the Ray Serve application without a cluster: arguments, a replica's answers, the router's tries."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="Ray Serve is not installed (pip install 'ray[serve]')")

from ray.exceptions import ActorDiedError
from ray.serve.exceptions import BackPressureError
from starlette.requests import Request
from starlette.responses import Response

from deploy import ray_replica, ray_router, ray_serve
from deploy.ray_arguments import Arguments
from deploy.ray_replica import Replica, ReplicaFailed
from deploy.ray_router import Router, merged_metrics
from tests.conftest import Built
from xpress_runtime.errors import BundleError, OptionError

# Arguments.


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "argument 'bundle' is missing; give it as bundle=…"),
        ({"bundle": "b", "replica": "2"}, "argument 'replica' does not exist; there are: bundle, backend, replicas"),
        ({"bundle": "b", "replicas": "two"}, "argument 'replicas' is 'two': input should be a valid integer"),
        ({"bundle": "b", "slots": "0"}, "argument 'slots' is '0': input should be greater than or equal to 1"),
        ({"bundle": "b", "slots": "0", "cores": "-1"}, "argument 'cores' is '-1'"),
    ],
)
def test_wrong_arguments_are_named(given: dict[str, str], message: str) -> None:
    with pytest.raises(OptionError) as problem:
        Arguments.read(given)
    assert message in str(problem.value)
    assert "\n" not in str(problem.value)


def test_text_becomes_numbers() -> None:
    read = Arguments.read({"bundle": "b", "replicas": "2", "gpus": "0.5", "pin": "true", "timeout": "1.5"})
    assert (read.replicas, read.gpus, read.pin, read.timeout) == (2, 0.5, True, 1.5)


def test_a_missing_bundle_is_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="is not a bundle folder"):
        ray_serve.build({"bundle": str(tmp_path / "none")})


def test_main_says_what_is_wrong_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert ray_serve.main(["bundle"]) == 2
    assert ray_serve.main(["bundle=b", "port=x"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "ray_serve: argument 'bundle' is not of the form name=value",
        "ray_serve: argument 'port' is 'x', expected a number",
    ]


def test_every_replica_has_room_for_its_slots_and_its_queue(tiny: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny.bundle.folder.parent)
    application = ray_serve.build({"bundle": tiny.bundle.folder.name, "replicas": "3", "slots": "4", "max_queue": "10", "cores": "2"})
    router: Any = application._bound_deployment
    replica = router.init_args[0]._bound_deployment
    assert replica.num_replicas == 3
    assert replica.max_ongoing_requests >= 14
    assert router.max_ongoing_requests >= 3 * replica.max_ongoing_requests
    assert replica.ray_actor_options["num_cpus"] == 2
    # Workers have another working directory.
    assert replica.init_args[0]["bundle"] == str(tiny.bundle.folder)


# A replica.


@dataclass
class FakeStatus:
    failed: str | None = None
    running: int = 1


class FakeSession:
    def __init__(self) -> None:
        self.failed: str | None = None
        self.calls: list[str] = []

    def status(self) -> FakeStatus:
        return FakeStatus(self.failed)

    def drain(self, timeout: float) -> bool:
        self.calls.append(f"drain {timeout:.0f}")
        return True

    def close(self) -> None:
        self.calls.append("close")


Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]


def _replica(monkeypatch: pytest.MonkeyPatch, app: Any) -> tuple[Replica, FakeSession]:
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="r1"), rank=SimpleNamespace(local_rank=0))
    monkeypatch.setattr("ray.serve.get_replica_context", lambda: context)
    session = FakeSession()
    return Replica({"bundle": "b", "drain_seconds": 7}, lambda _: (session, app)), session  # type: ignore[arg-type, return-value]


CALL = ("POST", "/generate", b"a=1", [(b"content-type", b"application/json")], b"{}")


async def _echo(scope: dict[str, Any], receive: Receive, send: Send) -> None:
    message = await receive()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-path", scope["path"].encode())]})
    await send({"type": "http.response.body", "body": message["body"], "more_body": True})
    await send({"type": "http.response.body", "body": scope["query_string"]})


def test_a_replica_answers_and_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    replica, _ = _replica(monkeypatch, _echo)
    name, status, headers, body = asyncio.run(replica.page(*CALL))
    assert (name, status, body) == ("r1", 200, b"{}a=1")
    assert headers == [(b"x-path", b"/generate"), (b"x-replica", b"r1")]


def test_a_failed_session_is_no_answer_and_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(_scope: Any, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 503, "headers": []})
        await send({"type": "http.response.body", "body": b"failed"})

    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(ray_replica, "TIME_TO_END", 0.01)
    replica, session = _replica(monkeypatch, refuse)

    async def scenario() -> None:
        assert (await replica.page(*CALL))[1] == 503
        session.failed = "out of memory"
        for _ in range(2):
            with pytest.raises(ReplicaFailed, match="out of memory"):
                await replica.page(*CALL)
        await asyncio.sleep(0.05)

    asyncio.run(scenario())
    assert ended == [1]
    with pytest.raises(ReplicaFailed):
        replica.check_health()


def test_an_abandoned_answer_disconnects_the_application(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    async def endless(_scope: Any, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        seen.append((await receive())["type"])

    replica, _ = _replica(monkeypatch, endless)

    async def scenario() -> None:
        answer = replica.answer(*CALL)
        assert (await anext(answer))[0] == 200
        assert await anext(answer) == b"one"
        await answer.aclose()  # type: ignore[attr-defined]
        await asyncio.sleep(0.01)

    asyncio.run(scenario())
    assert seen == ["http.disconnect"]


def test_a_replica_drains_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    replica, session = _replica(monkeypatch, _echo)
    replica.__del__()
    assert session.calls == ["drain 7", "close"]
    replica.__del__()
    assert session.calls == ["drain 7", "close"]


# The router.


class FakeAnswer:
    """What a replica yields; an exception among it is raised."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = list(parts)
        self.cancelled = False

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if not self.parts:
            raise StopAsyncIteration
        if isinstance(part := self.parts.pop(0), BaseException):
            raise part
        return part

    def cancel(self) -> None:
        self.cancelled = True


class FakeHandle:
    def __init__(self, *answers: list[Any]) -> None:
        self.answers = [FakeAnswer(parts) for parts in answers]
        self.num_calls = 0

    def options(self, **_: Any) -> FakeHandle:
        return self

    def remote(self, *_: Any) -> FakeAnswer:
        self.num_calls += 1
        return self.answers[self.num_calls - 1]


def _routed(handle: FakeHandle, *, retries: int = 2, path: str = "/generate", body: bytes = b"{}") -> tuple[Response, bytes]:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def run() -> tuple[Response, bytes]:
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": [(b"connection", b"close")]}
        response = await Router(handle, retries, max_body=1000)(Request(scope, receive))  # type: ignore[arg-type]
        parts = [part async for part in response.body_iterator] if hasattr(response, "body_iterator") else [response.body]
        return response, b"".join(parts)

    return asyncio.run(run())


OK = (200, [(b"content-type", b"application/json"), (b"x-replica", b"r2")])
EVENTS = (200, [(b"content-type", b"text/event-stream; charset=utf-8")])


@pytest.mark.parametrize(
    "lost", [[ActorDiedError()], [OK, ActorDiedError()], [EVENTS, ActorDiedError()]], ids=["at once", "json", "events"]
)
def test_a_request_that_no_byte_was_sent_of_is_sent_again(lost: list[Any]) -> None:
    handle = FakeHandle(lost, [OK, b"answer"])
    response, body = _routed(handle)
    assert (response.status_code, body, handle.num_calls) == (200, b"answer", 2)
    assert response.headers["x-replica"] == "r2"


def test_a_failed_session_is_another_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_router, "TIME_TO_END", 0.001)
    assert _routed(FakeHandle([ReplicaFailed("gone")], [OK, b"answer"]))[1] == b"answer"


def test_a_request_that_ends_every_replica_is_given_up() -> None:
    handle = FakeHandle(*[[ActorDiedError()]] * 5)
    response, body = _routed(handle, retries=2)
    assert (response.status_code, handle.num_calls) == (503, 3)
    assert b"3 replicas were lost" in body


@pytest.mark.parametrize(("path", "beginning"), [("/generate", b"event: error\ndata: {"), ("/v1/completions", b"data: {")])
def test_a_stream_that_has_begun_ends_with_an_error_event(path: str, beginning: bytes) -> None:
    handle = FakeHandle([EVENTS, b"data: 1\n\n", ActorDiedError()])
    _, body = _routed(handle, path=path)
    assert handle.num_calls == 1
    assert body.startswith(b"data: 1\n\n" + beginning)
    assert body.endswith(b"}\n\n")


def test_what_is_no_stream_breaks_off() -> None:
    with pytest.raises(ActorDiedError):
        _routed(FakeHandle([OK, b"part", ActorDiedError()]))


def test_a_router_that_drains_refuses_new_requests_and_waits_for_those_there_are() -> None:
    released = asyncio.Event()

    class SlowAnswer(FakeAnswer):
        async def __anext__(self) -> Any:
            await released.wait()
            return await super().__anext__()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def scenario() -> None:
        handle = FakeHandle()
        handle.answers = [SlowAnswer([OK, b"answer"])]
        router = Router(handle, 0, 1000)  # type: ignore[arg-type]
        request = Request({"type": "http", "method": "POST", "path": "/generate", "query_string": b"", "headers": []}, receive)
        first = asyncio.ensure_future(router(request))
        await asyncio.sleep(0.01)
        assert not await router.drain(0)
        draining = asyncio.ensure_future(router.drain(5))
        await asyncio.sleep(0.01)
        assert (await router(request)).status_code == 503
        released.set()
        assert (await first).status_code == 200
        assert await draining

    asyncio.run(scenario())


def test_defects_are_not_tried_again() -> None:
    handle = FakeHandle([ValueError("a defect")], [OK, b"answer"])
    with pytest.raises(ValueError, match="a defect"):
        _routed(handle)
    assert handle.num_calls == 1


def test_a_full_queue_says_when_to_come_back() -> None:
    response, body = _routed(FakeHandle([BackPressureError(num_queued_requests=3, max_queued_requests=3)]))
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert b"rate_limit_error" in body


def test_a_body_that_is_too_large_goes_nowhere() -> None:
    handle = FakeHandle()
    response, _ = _routed(handle, body=b"x" * 1001)
    assert (response.status_code, handle.num_calls) == (413, 0)


def test_metrics_of_replicas_are_told_apart() -> None:
    page = '# HELP a_total A.\n# TYPE a_total counter\na_total{k="v"} %d\n'
    page += '# HELP h H.\n# TYPE h histogram\nh_bucket{le="+Inf"} 2\nh_sum 3\nh_count 2\n'
    merged = merged_metrics({"r1": page % 1, "r2": page % 2}).decode()
    assert merged.count("# TYPE a_total counter") == 1
    assert 'a_total{k="v",replica="r1"} 1.0' in merged and 'a_total{k="v",replica="r2"} 2.0' in merged
    assert 'h_bucket{le="+Inf",replica="r2"} 2.0' in merged


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_replicas_keep_to_their_own_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[list[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 3, 5, 7})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: kept.append(cores))
    for rank in range(3):
        ray_replica._pin(rank, 2)
    assert kept == [[1, 3], [5, 7]]
