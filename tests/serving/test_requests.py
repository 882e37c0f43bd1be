"""Requests come and go: queue, limits, cancellation, time-outs, draining, failure. Nothing is lost, and every slot comes free again."""

from __future__ import annotations

import gc
import shutil
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.serving.conftest import open_batch, plainly, some_prompts
from xpress_runtime.bundle import Bundle
from xpress_runtime.errors import BundleError, OptionError, PromptError, XpressError
from xpress_runtime.generation import GenerationConfig
from xpress_runtime.progress import RequestProgress
from xpress_runtime.serving import (
    BatchSession,
    Draining,
    Limits,
    QueueFull,
    Request,
    RequestCancelled,
    RequestTimedOut,
    SessionFailed,
    Step,
)
from xpress_runtime.serving.queue import FairQueue
from xpress_runtime.session import Session
from xpress_runtime.stats import GenerationStats

LONG = GenerationConfig(100, ignore_stop=True)


def _wait_for(condition: Callable[[], bool]) -> None:
    event = threading.Event()
    for _ in range(1000):
        if condition():
            return
        event.wait(0.01)
    raise AssertionError("it did not happen within 10 s")


def _held(session: BatchSession) -> threading.Event:
    """Stops the session's thread before its next tick until the event is set."""
    go, real = threading.Event(), session._scheduler.tick

    def tick() -> None:
        go.wait(30)
        real()

    session._scheduler.tick = tick  # type: ignore[method-assign]
    return go


def test_a_cancelled_request_frees_its_slot(bundle: Bundle, alone: Session) -> None:
    prompts = some_prompts(3, bundle.manifest.target.vocab_size)
    with open_batch(bundle, 1) as session:
        go = _held(session)
        running, queued, kept = (session.submit(prompt, LONG) for prompt in prompts)
        queued.cancel()
        running.cancel()
        go.set()
        for request in (running, queued):
            with pytest.raises(RequestCancelled):
                request.result(60)
            assert request.state == "cancelled"
        assert kept.result(60).tokens == alone.generate(prompts[2], plainly(LONG)).tokens
        assert session.status().running == session.status().queued == 0


def test_a_stream_may_be_cancelled_in_the_middle(bundle: Bundle, alone: Session) -> None:
    prompts = some_prompts(2, bundle.manifest.target.vocab_size)
    with open_batch(bundle, 2) as session:
        request, other = (session.submit(prompt, LONG) for prompt in prompts)
        seen: list[int] = []

        def read() -> None:
            for step in request:
                seen.extend(token.id for token in step.tokens)
                request.cancel()

        with pytest.raises(RequestCancelled):
            read()
        assert seen == list(request.tokens) == list(alone.generate(prompts[0], plainly(LONG)).tokens[: len(seen)])
        assert other.result(60).tokens == alone.generate(prompts[1], plainly(LONG)).tokens


def test_time_outs_end_running_and_queued_requests(bundle: Bundle) -> None:
    prompts = some_prompts(2, bundle.manifest.target.vocab_size)
    with open_batch(bundle, 1, limits=Limits(timeout=30)) as session:
        go = _held(session)
        running, queued = (session.submit(prompt, LONG, timeout=0.05) for prompt in prompts)
        threading.Event().wait(0.1)
        go.set()
        for request in (running, queued):
            with pytest.raises(RequestTimedOut, match=r"has not ended within 0\.05 s"):
                request.result(60)
        assert session.submit([1, 2], LONG).result(60).finish_reason == "length"


def test_a_full_queue_says_when_to_come_again(bundle: Bundle) -> None:
    with open_batch(bundle, 1, limits=Limits(max_queue=2)) as session:
        go = _held(session)
        requests = [session.submit([1, 2], LONG) for _ in range(3)]
        with pytest.raises(QueueFull, match="the queue is full: 2 requests wait") as refused:
            session.submit([1, 2], LONG)
        assert refused.value.retry_after >= 1
        go.set()
        assert len({request.result(60).tokens for request in requests}) == 1


def test_draining_finishes_what_is_there_and_takes_nothing_new(bundle: Bundle) -> None:
    with open_batch(bundle, 1) as session:
        requests = [session.submit([1, 2], LONG) for _ in range(3)]
        assert session.drain()
        assert [request.state for request in requests] == ["finished"] * 3
        with pytest.raises(Draining):
            session.submit([1, 2])


def test_draining_cancels_what_takes_too_long(bundle: Bundle) -> None:
    with open_batch(bundle, 1) as session:
        go = _held(session)
        requests = [session.submit([1, 2], LONG) for _ in range(2)]
        threading.Timer(0.2, go.set).start()
        assert not session.drain(0.01)
        assert [request.state for request in requests] == ["cancelled"] * 2


def test_closing_ends_every_request(bundle: Bundle) -> None:
    session = open_batch(bundle, 1)
    go = _held(session)
    requests = [session.submit([1, 2], LONG) for _ in range(3)]
    go.set()
    session.close()
    assert all(request.ended for request in requests)
    with pytest.raises(Draining):
        session.submit([1, 2])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_defect_ends_every_request_with_its_reason(bundle: Bundle) -> None:
    with open_batch(bundle, 1) as session:
        go = _held(session)
        requests = [session.submit([1, 2], LONG) for _ in range(2)]

        def broken() -> None:
            raise RuntimeError("the\ndevice is gone")

        session._scheduler._read_chunk = broken  # type: ignore[method-assign]
        go.set()
        for request in requests:
            with pytest.raises(SessionFailed, match="RuntimeError: the device is gone"):
                request.result(60)
        assert session.status().failed is not None
        with pytest.raises(SessionFailed):
            session.submit([1, 2])


def test_what_is_told_of_each_step_ends_with_none(bundle: Bundle) -> None:
    told: list[Step | None] = []
    with open_batch(bundle, 2) as session:
        request = session.submit([1, 2], LONG, on_step=told.append)
        request.result(60)
        _wait_for(lambda: bool(told) and told[-1] is None)
    assert [token.id for step in told[:-1] if step is not None for token in step.tokens] == list(request.tokens)
    assert told.count(None) == 1
    times = (request.queued_seconds, request.first_token_seconds, request.total_seconds)
    assert all(time is not None for time in times)
    assert sorted(times, key=lambda time: time or 0) == list(times)


def test_a_callback_that_fails_costs_its_own_request_alone(bundle: Bundle, alone: Session) -> None:
    def fails(step: Step | None) -> None:  # noqa: ARG001
        raise ValueError("a defect of the caller")

    with open_batch(bundle, 2) as session:
        broken, other = session.submit([1, 2], LONG, on_step=fails), session.submit([3, 4], LONG)
        with pytest.raises(RequestCancelled):
            broken.result(60)
        assert other.result(60).tokens == alone.generate([3, 4], plainly(LONG)).tokens
        go = _held(session)
        queued = [session.submit([1, 2], LONG, on_step=fails) for _ in range(4)]
        threading.Timer(0.1, go.set).start()
        session.close()
    assert [request.ended for request in queued] == [True] * 4


def test_an_observer_that_fails_is_told_nothing_more(bundle: Bundle) -> None:
    class Broken:
        told = 0

        def round(self, report: object) -> None:  # noqa: ARG002
            self.told += 1
            raise ValueError("a defect of the observer")

        def finished(self, request: Request) -> None:  # noqa: ARG002
            raise AssertionError

    broken = Broken()
    with open_batch(bundle, 1) as session:
        session.observe(broken)
        session.submit([1, 2], LONG).result(60)
    assert broken.told == 1


def test_a_request_whose_graph_is_gone_fails_alone(bundle: Bundle, alone: Session, tmp_path: Path) -> None:
    shutil.copytree(bundle.folder, tmp_path / "copy")
    with open_batch(Bundle.open(tmp_path / "copy"), 2) as session:
        running = session.submit([1, 2], LONG)
        (refiner,) = (tmp_path / "copy").glob("graphs/*/refiner-k2-sampled.onnx")
        refiner.unlink()
        failing = session.submit([3, 4], GenerationConfig(10, temperature=1.0))
        with pytest.raises(BundleError, match="refiner-k2-sampled"):
            failing.result(60)
        assert failing.state == "failed"
        assert running.result(60).tokens == alone.generate([1, 2], plainly(LONG)).tokens


def test_more_steps_than_slots_draft_alike(bundle: Bundle) -> None:
    with open_batch(bundle, 2) as session:
        assert len({session._variant(GenerationConfig(draft_steps=steps)) for steps in (3, 4, 50, 1024)}) == 1
        assert session._variant(GenerationConfig(draft_steps=2)).draft_steps == 2


def test_a_session_is_not_drained_by_its_own_thread(bundle: Bundle) -> None:
    refused: list[str] = []
    with open_batch(bundle, 1) as session:

        def drain(step: Step | None) -> None:  # noqa: ARG001
            try:
                session.drain(1)
            except OptionError as problem:
                refused.append(str(problem))

        session.submit([1, 2], GenerationConfig(3), on_step=drain).result(60)
    assert refused
    assert "another thread" in refused[0]


def test_a_closed_session_gives_its_memory_back(bundle: Bundle) -> None:
    session = open_batch(bundle, 1)
    session.submit([1, 2], GenerationConfig(3)).result(60)
    caches = weakref.ref(session._scheduler._plan)
    gc.disable()
    try:
        session.close()
        assert caches() is None
    finally:
        gc.enable()
    assert session.status().running == 0
    session.close()


@pytest.mark.parametrize(
    ("prompt", "options", "kind", "message"),
    [
        ([], {}, PromptError, "the prompt is empty"),
        ([10**9], {}, PromptError, "expected a token id"),
        ([1] * 51, {}, PromptError, "51 tokens, and 50 are allowed here"),
        ("text", {}, PromptError, "no tokenizer"),
        ([1], {"config": GenerationConfig(101)}, OptionError, "max_new_tokens is 101, and at most 100"),
        ([1], {"config": GenerationConfig(9, drafter="lookup")}, OptionError, "drafter is 'lookup'"),
        ([1], {"config": GenerationConfig(9, num_passes=3)}, OptionError, "num_passes is 3"),
        ([1], {"config": GenerationConfig(9, num_passes=3, temperature=1.0, speculation="auto")}, OptionError, "num_passes is 3"),
        ([1], {"config": GenerationConfig(9, stop=["x"])}, OptionError, "stop strings need a tokenizer"),
        ([1], {"timeout": 0}, OptionError, "timeout is 0"),
        ([1], {"timeout": float("nan")}, OptionError, "timeout is nan"),
        ([1], {"timeout": 1e300}, OptionError, "timeout is 1e"),
    ],
)
def test_bad_requests_are_refused_where_they_are_made(
    small: BatchSession, prompt: object, options: dict[str, object], kind: type[XpressError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        small.submit(prompt, **options)  # type: ignore[arg-type]
    assert small.status().queued == 0


@pytest.fixture(scope="module")
def small(bundle: Bundle) -> object:
    with open_batch(bundle, 1, limits=Limits(max_new_tokens=100, max_prompt_tokens=50)) as session:
        yield session


@pytest.mark.parametrize("limits", [{"max_queue": -1}, {"max_new_tokens": 0}, {"max_prompt_tokens": 0}, {"timeout": 0}, {"timeout": -1}])
def test_limits_that_allow_nothing_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(OptionError, match=next(iter(limits))):
        Limits(**limits)  # type: ignore[arg-type]


def test_a_session_has_at_least_one_slot(bundle: Bundle) -> None:
    with pytest.raises(OptionError, match="slots is 0"):
        open_batch(bundle, 0)


def _request(client: str) -> Request:
    config = GenerationConfig()
    progress = RequestProgress(config, stop_token_ids=(), room=1, tokenizer=None)
    return Request([1], config, progress, GenerationStats(1, 0, None), client=client, deadline=None, on_step=None)


def test_clients_take_turns() -> None:
    queue = FairQueue()
    requests = [_request(client) for client in "aaabbc"]
    for request in requests:
        queue.append(request)
    unwanted = requests[1]
    asked: list[Request] = []

    def once(request: Request) -> bool:
        asked.append(request)
        return request is unwanted

    assert queue.take(once) == [unwanted]
    # A request may run out of time between two questions.
    assert len(asked) == len(requests)
    assert len(queue) == 5
    order = [queue.pop() for _ in range(len(queue))]
    assert [request.client for request in order] == ["a", "b", "c", "a", "b"]
    assert [request for request in order if request.client == "a"] == [requests[0], requests[2]]
    assert queue.first() is None
