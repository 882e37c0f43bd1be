"""A batching session without a model: it says what a test scripts, as slowly as the test likes, and fails on demand."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from xpress_runtime.errors import OptionError, PromptError, XpressError
from xpress_runtime.generation import FinishReason, GenerationConfig, GenerationResult
from xpress_runtime.serving import (
    Draining,
    Limits,
    QueueFull,
    RequestCancelled,
    RequestTimedOut,
    RoundReport,
    Status,
    Step,
    StepToken,
)
from xpress_runtime.stats import GenerationStats, Stage

NUM_PROPOSALS = 3
NUM_PASSES = (2, 0, 1)
VOCABULARY = 1000
CAPACITY = 256
# Every step but the prompt's says as many.
STEP_TOKENS = 2
MODEL = "owner/fake-1b"


class FakeTokenizer:
    """Characters are tokens; the template writes roles and contents."""

    def __init__(self, *, template: bool = True, switch: bool = True) -> None:
        self.has_chat_template = template
        self._switch = switch

    def render_chat(self, messages: Any, /, *, add_generation_prompt: bool = True, **variables: Any) -> str:
        if not self.has_chat_template:
            raise PromptError("the bundle has no chat template, so it takes no chat messages; pass a prompt as text or token ids")
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        thinks = "<think>" if self._switch and variables.get("enable_thinking", True) else ""
        return text + ("<assistant>" if add_generation_prompt else "") + thinks


def _nobody(step: Step | None) -> None:
    """Who listens where no one does."""


class FakeRequest:
    """One request; a thread of its own plays the session's."""

    def __init__(
        self, session: FakeSession, number: int, tokens: int, config: GenerationConfig, client: str, timeout: float | None
    ) -> None:
        self.id = f"r{number}"
        self.config = config
        self.client = client
        self.prompt_tokens = tokens
        self.state = "queued"
        self.stats = GenerationStats(tokens, NUM_PROPOSALS, 1, speculation=config.speculation, drafter="block", shortlist=0, draft_steps=1)
        self.queued_seconds: float | None = None
        self.first_token_seconds: float | None = None
        self.total_seconds: float | None = None
        self.text = ""
        self.tokens: tuple[int, ...] = ()
        self.finish_reason: FinishReason | None = None
        self.error: XpressError | None = None
        self.timeout = timeout
        self._session = session
        self._began = time.monotonic()
        self._cancelled = threading.Event()
        self._ended = threading.Event()

    def cancel(self) -> None:
        self._cancelled.set()
        self._session.wake()

    @property
    def was_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def result(self, timeout: float | None = None) -> GenerationResult:
        if not self._ended.wait(timeout):
            raise TimeoutError
        if self.error is not None:
            raise self.error
        assert self.finish_reason is not None
        return GenerationResult(self.text, self.tokens, self.finish_reason, self.stats)

    def wait(self, seconds: float = 5.0) -> bool:
        return self._ended.wait(seconds)

    def play(self, on_step: Callable[[Step | None], None] | None) -> None:
        """What the session's thread does for a request."""
        tell = on_step or _nobody
        try:
            self._play(tell)
        except XpressError as problem:
            self.error = problem
        self.total_seconds = time.monotonic() - self._began
        self._session.left(self)
        self._ended.set()
        tell(None)

    def _play(self, tell: Callable[[Step | None], None]) -> None:
        session = self._session
        if session.admit(self):
            self.queued_seconds = time.monotonic() - self._began
            self.state = "running"
        words = (f" w{number}" for number in itertools.count())
        first = True
        while self.finish_reason is None:
            self._check()
            session.wait_for_step(self)
            self._check()
            if session.failure is not None and not first:
                self.state = "failed"
                raise session.failure
            left = self.config.max_new_tokens - len(self.tokens)
            count = min(1 if first else STEP_TOKENS, left)
            tokens = tuple(StepToken(len(self.tokens) + index, next(words), self._origin(first, index)) for index in range(count))
            text = "".join(token.text for token in tokens)
            self.tokens += tuple(token.id for token in tokens)
            self.text += text
            if first:
                self.first_token_seconds = time.monotonic() - self._began
                self.stats.prefill_seconds = 0.001
                step = Step(tokens=tokens, proposed=0, accepted=0, seconds={Stage.PREFILL: 0.001})
            else:
                step = self._round(tokens)
            first = False
            if len(self.tokens) >= self.config.max_new_tokens:
                self.finish_reason = session.finish_reason
                self.state = "finished"
            tell(step)

    @staticmethod
    def _origin(first: bool, index: int) -> Any:
        return "drafter" if not first and index == 0 else "target"

    def _round(self, tokens: tuple[StepToken, ...]) -> Step:
        seconds = {Stage.DRAFT: 0.001, Stage.REFINE: 0.002, Stage.VERIFY: 0.003}
        stats = self.stats
        stats.proposals.append(NUM_PROPOSALS)
        stats.acceptance_lengths.append(STEP_TOKENS)
        stats.kept_lengths.append(len(tokens))
        stats.decode_seconds += 0.006
        for stage, value in seconds.items():
            stats.stage_seconds[stage] += value
        report = RoundReport(1, NUM_PROPOSALS, (STEP_TOKENS - 1,), (len(tokens),), seconds)
        self._session.report(report)
        return Step(tokens=tokens, proposed=NUM_PROPOSALS, accepted=STEP_TOKENS - 1, seconds=seconds)

    def _check(self) -> None:
        if self._cancelled.is_set():
            self.state = "cancelled"
            raise RequestCancelled("the request was cancelled")
        if self.timeout is not None and time.monotonic() - self._began > self.timeout:
            self.state = "timed out"
            raise RequestTimedOut(f"the request took longer than {self.timeout:g} seconds")


class FakeSession:
    """The interface of a batching session. ``hold`` keeps every request before its next step until :meth:`go`.

    ``slow``: every step takes a while.
    """

    def __init__(
        self,
        *,
        slots: int = 2,
        limits: Limits | None = None,
        tokenizer: FakeTokenizer | None = None,
        hold: bool = False,
        slow: bool = False,
        finish_reason: FinishReason = "length",
        failure: XpressError | None = None,
    ) -> None:
        self.slots = slots
        self.limits = limits or Limits(max_queue=2)
        self.tokenizer = tokenizer
        origin = SimpleNamespace(source=MODEL)
        target = SimpleNamespace(origin=origin, vocab_size=VOCABULARY)
        self.bundle = SimpleNamespace(
            manifest=SimpleNamespace(
                target=target,
                capacity=CAPACITY,
                drafter=SimpleNamespace(num_proposals=NUM_PROPOSALS),
                num_passes=NUM_PASSES,
                shortlists=(0,),
            )
        )
        self.backend = SimpleNamespace(name="fake")
        self.failed: str | None = None
        self.failure = failure
        self.finish_reason: FinishReason = finish_reason
        self.requests: list[FakeRequest] = []
        self.prompts: list[Any] = []
        self.variables: list[Mapping[str, Any] | None] = []
        self.draining = False
        self._holding = hold
        self._slow = slow
        self._changed = threading.Condition()
        self._running: list[FakeRequest] = []
        self._queued: list[FakeRequest] = []
        self._observers: list[Any] = []

    def submit(
        self,
        prompt: Any,
        config: GenerationConfig | None = None,
        *,
        chat_variables: Mapping[str, Any] | None = None,
        client: str = "",
        timeout: float | None = None,
        on_step: Callable[[Step | None], None] | None = None,
    ) -> FakeRequest:
        config = config or GenerationConfig()
        tokens = self._num_tokens(prompt, chat_variables)
        if config.num_passes is not None and config.num_passes not in NUM_PASSES:
            raise OptionError(f"num_passes is {config.num_passes}, and the bundle was built for 0, 1, 2")
        limits = [limit for limit in (timeout, self.limits.timeout) if limit is not None]
        with self._changed:
            if self.draining:
                raise Draining("the server is draining and takes no new requests")
            if len(self._queued) >= self.limits.max_queue and len(self._running) >= self.slots:
                raise QueueFull(len(self._queued), 1.5)
            request = FakeRequest(self, len(self.requests), tokens, config, client, min(limits, default=None))
            self.requests.append(request)
            self.prompts.append(prompt)
            self.variables.append(chat_variables)
            (self._running if len(self._running) < self.slots else self._queued).append(request)
        threading.Thread(target=request.play, args=(on_step,), daemon=True).start()
        return request

    def _num_tokens(self, prompt: Any, variables: Mapping[str, Any] | None) -> int:
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], Mapping)):
            if self.tokenizer is None:
                raise PromptError("this bundle has no tokenizer, so it takes token ids only")
            text = prompt if isinstance(prompt, str) else self.tokenizer.render_chat(prompt, **(variables or {}))
            text.encode("utf-8")
            count = len(text)
        else:
            bad = [token for token in prompt if token >= VOCABULARY]
            if bad:
                raise PromptError(f"prompt item 0 is {bad[0]}, expected a token id from 0 to {VOCABULARY - 1}")
            count = len(prompt)
        if not count:
            raise PromptError("the prompt is empty; give at least one token")
        if count >= CAPACITY:
            raise PromptError(f"the prompt has {count} tokens and the bundle's capacity is {CAPACITY}")
        return count

    def admit(self, request: FakeRequest) -> bool:
        """Wait for a slot; False where the request ended first."""
        with self._changed:
            self._changed.wait_for(lambda: request in self._running or request.was_cancelled or self._late(request), 10)
            return request in self._running

    def wait_for_step(self, request: FakeRequest) -> None:
        if self._slow:
            time.sleep(0.05)
        with self._changed:
            while self._holding and not request.was_cancelled and not self._late(request):
                self._changed.wait(0.02)

    @staticmethod
    def _late(request: FakeRequest) -> bool:
        return request.timeout is not None and time.monotonic() - request._began > request.timeout

    def left(self, request: FakeRequest) -> None:
        with self._changed:
            for place in (self._running, self._queued):
                if request in place:
                    place.remove(request)
            while self._queued and len(self._running) < self.slots:
                self._running.append(self._queued.pop(0))
            self._changed.notify_all()
        for observer in self._observers:
            observer.finished(request)

    def report(self, report: RoundReport) -> None:
        for observer in self._observers:
            observer.round(report)

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def go(self) -> None:
        with self._changed:
            self._holding = False
            self._changed.notify_all()

    def status(self) -> Status:
        with self._changed:
            return Status(
                slots=self.slots,
                running=len(self._running),
                reading=0,
                queued=len(self._queued),
                draining=self.draining,
                uptime_seconds=1.0,
                failed=self.failed,
            )

    def observe(self, observer: Any) -> None:
        self._observers.append(observer)

    def drain(self, timeout: float | None = None) -> bool:
        with self._changed:
            self.draining = True
            if self._changed.wait_for(lambda: not (self._running or self._queued), timeout):
                return True
            left = [*self._running, *self._queued]
        for request in left:
            request.cancel()
            request.wait()
        return False

    def close(self) -> None:
        self.drain(0)
