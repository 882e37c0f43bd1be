"""A bundle that serves many requests at once: submitted from any thread, generated in the fixed slots of one plan, by one thread.

Knows limits, the queue and its lock, and that thread's life; who runs in which round is the scheduler's.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from xpress_runtime.backends import Backend, open_backend
from xpress_runtime.bundle import Bundle
from xpress_runtime.errors import OptionError, PromptError
from xpress_runtime.generation import GenerationConfig
from xpress_runtime.loops import chosen_variant, sampling_form
from xpress_runtime.plan import Plan
from xpress_runtime.prompts import Prompt, Prompts, seeded
from xpress_runtime.serving.errors import Draining, QueueFull, SessionFailed
from xpress_runtime.serving.observers import Observer, Observers, RoundReport
from xpress_runtime.serving.queue import FairQueue
from xpress_runtime.serving.requests import Request, Step
from xpress_runtime.serving.rounds import Variant
from xpress_runtime.serving.scheduler import Scheduler
from xpress_runtime.stats import GenerationStats
from xpress_runtime.tokenizer import TextTokenizer

logger = logging.getLogger("xpress_runtime.serving")

# How often the thread looks for queued requests whose time is up while nothing runs.
_IDLE_SECONDS = 0.1
# Unless asked otherwise, where a round computes only the rows that there are.
_FLEXIBLE_SLOTS = 4
# What a caller is told to wait where no request has ended yet.
_FIRST_RETRY_SECONDS = 1.0


@dataclass(frozen=True)
class Limits:
    """Of one session. ``max_queue``: requests that wait for a slot. ``max_new_tokens``, ``max_prompt_tokens``: of a request, beside the
    bundle's capacity. ``timeout``: seconds of a request from submission to end; it may ask for less.
    """

    max_queue: int = 64
    max_new_tokens: int | None = None
    max_prompt_tokens: int | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        for name, value, least in (
            ("max_queue", self.max_queue, 0),
            ("max_new_tokens", self.max_new_tokens, 1),
            ("max_prompt_tokens", self.max_prompt_tokens, 1),
        ):
            if value is not None and value < least:
                raise OptionError(f"{name} is {value}, expected at least {least}")
        check_timeout(self.timeout)


@dataclass(frozen=True)
class Status:
    """A session at one moment. ``failed``: why its thread ended."""

    slots: int
    running: int
    reading: int
    queued: int
    draining: bool
    uptime_seconds: float
    failed: str | None


class BatchSession:
    """Up to ``slots`` requests at a time. Use :meth:`open`; a context manager."""

    def __init__(self, bundle: Bundle, backend: Backend, *, slots: int | None = None, limits: Limits | None = None) -> None:
        self.bundle = bundle
        self.backend = backend
        self.limits = limits or Limits()
        self._queue = FairQueue()
        # Guards the queue and what follows; the thread holds it only while it looks.
        self._changed = threading.Condition()
        self._draining = False
        self._closing = False
        self._closed = False
        self._failure: str | None = None
        self._started = time.perf_counter()
        self._durations = _Durations()
        self._observers = Observers(self._durations)
        # From the moment that the thread finds something to do to the moment that it looks again.
        self._working = False
        try:
            self.slots = self._num_slots(slots)
            self._prompts = Prompts(bundle)
            plan = Plan(bundle, backend, self.slots)
            default = self._variant(GenerationConfig())
            self._scheduler = Scheduler(plan, default, self._next_request, self._variant, self._observers)
        except BaseException:
            backend.close()
            raise
        self._thread = threading.Thread(target=self._work, name="xpress-rounds", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls,
        bundle: str | os.PathLike[str],
        backend: str = "auto",
        *,
        slots: int | None = None,
        threads: int | None = None,
        verify: bool = True,
        runtime_cache: str | os.PathLike[str] | None = None,
        limits: Limits | None = None,
    ) -> Self:
        """Open a bundle folder on a backend; as :meth:`Session.open`.

        ``slots``: requests that run at a time; more than the bundle's batch only where shapes are flexible, as on a CPU. None: the
        bundle's batch, and there at least 4. Raises BundleError, OptionError and EnvironmentProblem.
        """
        if threads is not None and threads < 1:
            raise OptionError(f"threads is {threads}, expected at least 1")
        opened = Bundle.open(bundle, verify=verify)
        cache = Path(runtime_cache) if runtime_cache is not None else None
        made = open_backend(backend, threads=threads, bundle=opened, runtime_cache=cache)
        return cls(opened, made, slots=slots, limits=limits)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    @property
    def tokenizer(self) -> TextTokenizer | None:
        """The target's tokenizer, None where the bundle has none."""
        return self._prompts.tokenizer

    def submit(
        self,
        prompt: Prompt,
        config: GenerationConfig | None = None,
        *,
        chat_variables: Mapping[str, Any] | None = None,
        client: str = "",
        timeout: float | None = None,
        on_step: Callable[[Step | None], None] | None = None,
    ) -> Request:
        """Hand in a request; input is checked here. ``prompt``, ``chat_variables``: as of :meth:`Session.generate`.

        ``client``: requests of several clients take turns. ``timeout``: seconds until its end, at most the session's. ``on_step`` is called
        on the session's thread with every step and then once with None; it must return at once. Speculation "auto" drafts while it pays
        for the rows that there are; with a temperature or penalties it decodes plainly, so that the seed alone decides. Raises PromptError,
        OptionError, QueueFull, Draining and SessionFailed.
        """
        config = seeded(self._limited(config or self.default_config()))
        self._variant(config)
        check_timeout(timeout)
        tokens = self._prompts.encode(prompt, chat_variables=chat_variables)
        longest = self.limits.max_prompt_tokens
        if longest is not None and len(tokens) > longest:
            raise PromptError(f"the prompt has {len(tokens)} tokens, and {longest} are allowed here; shorten it")
        drafts = config.speculation != "off"
        variant = self._variant(config) if drafts else None
        stats = GenerationStats(
            len(tokens),
            self.bundle.manifest.drafter.num_proposals if drafts else 0,
            None if variant is None else variant.num_passes,
            speculation=config.speculation,
            drafter=None if variant is None else config.drafter,
            shortlist=None if variant is None else variant.shortlist,
            draft_steps=None if variant is None else variant.draft_steps,
            seed=config.seed if config.temperature > 0 else None,
        )
        deadlines = [seconds for seconds in (timeout, self.limits.timeout) if seconds is not None]
        request = Request(
            tokens,
            config,
            self._prompts.progress(tokens, config),
            stats,
            client=client,
            deadline=min(deadlines, default=None),
            on_step=on_step,
        )
        with self._changed:
            self._check_open()
            # What a free slot takes in at once does not wait.
            waiting = len(self._queue) - sum(slot is None for slot in self._scheduler.slots)
            if waiting >= self.limits.max_queue:
                raise QueueFull(self.limits.max_queue, max(1.0, self._durations.mean * len(self._queue) / self.slots))
            self._queue.append(request)
            self._changed.notify_all()
        return request

    def default_config(self) -> GenerationConfig:
        """Default settings, within the session's limits."""
        config, limit = GenerationConfig(), self.limits.max_new_tokens
        return config if limit is None else replace(config, max_new_tokens=min(config.max_new_tokens, limit))

    def status(self) -> Status:
        """What runs and waits."""
        with self._changed:
            slots = [slot for slot in self._scheduler.slots if slot is not None]
            reading = sum(slot.reader is not None for slot in slots)
            return Status(
                self.slots,
                len(slots) - reading,
                reading,
                len(self._queue),
                self._draining,
                time.perf_counter() - self._started,
                self._failure,
            )

    def observe(self, observer: Observer) -> None:
        """Tell ``observer`` of every round and of every request that ends."""
        self._observers.add(observer)

    def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests, and wait for those that there are; what has not ended after ``timeout`` seconds is cancelled (False).

        Raises OptionError on the session's own thread, which would wait for itself.
        """
        if threading.current_thread() is self._thread:
            raise OptionError("a session is drained on the thread that runs its rounds, which cannot wait for itself; use another thread")
        with self._changed:
            self._draining = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._idle() or self._failure is not None, timeout) or self._cancel_rest()

    def close(self) -> None:
        """Cancel what is left and give the memory back; the session cannot be used afterwards."""
        with self._changed:
            self._draining = self._closing = True
            self._changed.notify_all()
        if threading.current_thread() is self._thread:
            # In the middle of a tick; the memory goes with the session.
            return
        self._thread.join()
        with self._changed:
            closed, self._closed = self._closed, True
        if not closed:
            self._scheduler.close()
        self.backend.close()

    def _num_slots(self, slots: int | None) -> int:
        manifest = self.bundle.manifest
        batch, chunk, block_size = manifest.batch, manifest.prefill_chunk, manifest.drafter.block_size
        if not self.backend.flexible_shapes and chunk < block_size:
            # What waits for a drafter is read in one call, as wide as a chunk.
            raise OptionError(
                f"this bundle's prompt chunks have {chunk} tokens and its blocks {block_size}; to share rounds on {self.backend.name}, "
                f"build it again with a --profile whose prefill_chunk is at least that"
            )
        if slots is None:
            return max(batch, _FLEXIBLE_SLOTS) if self.backend.flexible_shapes else batch
        if slots < 1:
            raise OptionError(f"slots is {slots}, expected at least 1")
        if slots > batch and not self.backend.flexible_shapes:
            raise OptionError(
                f"slots is {slots}, and this bundle was built for {batch} on {self.backend.name}; build it again with --batch {slots}"
            )
        return slots

    def _variant(self, config: GenerationConfig) -> Variant:
        """How the settings draft; OptionError where the bundle, or sharing rounds, does not allow it."""
        sampling_form(self.bundle.manifest, config)
        if config.drafter != "block":
            raise OptionError(f"drafter is {config.drafter!r}, and rounds that requests share are drafted by 'block' only")
        num_proposals = self.bundle.manifest.drafter.num_proposals
        # More steps than there are slots to fill draft the same, and what drafts alike shares rounds.
        return Variant(*chosen_variant(self.bundle.manifest, config), min(config.draft_steps, num_proposals))

    def _limited(self, config: GenerationConfig) -> GenerationConfig:
        limit = self.limits.max_new_tokens
        if limit is not None and config.max_new_tokens > limit:
            raise OptionError(f"max_new_tokens is {config.max_new_tokens}, and at most {limit} are allowed here")
        # What is drawn must depend on the seed alone, and when "auto" drafts depends on who else is there.
        if config.speculation == "auto" and sampling_form(self.bundle.manifest, config).sampled:
            self._variant(config)
            return replace(config, speculation="off", drafter="block", num_passes=None, shortlist=None, draft_steps=1)
        return config

    def _check_open(self) -> None:
        if self._failure is not None:
            raise SessionFailed(self._failure)
        if self._draining:
            raise Draining("no more requests are taken here: the session is about to end")

    def _idle(self) -> bool:
        return not len(self._queue) and not self._scheduler.busy and not self._working

    def _cancel_rest(self) -> bool:
        # Again and again: a request on its way from the queue to a slot is in neither for a moment.
        while not self._idle() and self._failure is None:
            for request in self._queue:
                request.cancel()
            for slot in self._scheduler.slots:
                if slot is not None:
                    slot.request.cancel()
            self._changed.wait(_IDLE_SECONDS)
        return False

    # The thread.

    def _next_request(self, fits: Callable[[Request], bool]) -> Request | None:
        with self._changed:
            first = self._queue.first()
            # Whose turn it is waits until it fits; a later one would pass it again and again.
            return self._queue.pop() if first is not None and fits(first) else None

    def _work(self) -> None:
        try:
            while self._wait():
                self._drop_unwanted()
                if self._scheduler.busy or len(self._queue):
                    self._scheduler.tick()
                with self._changed:
                    self._working = False
                    self._changed.notify_all()
        except BaseException as problem:
            self._fail(f"the session ended: {type(problem).__name__}: {' '.join(str(problem).split())}")
            raise
        self._fail(None)

    def _wait(self) -> bool:
        """Until there is something to do; False where the session closes."""
        with self._changed:
            if not self._scheduler.busy and not self._closing and not len(self._queue):
                self._changed.wait(_IDLE_SECONDS)
            self._working = not self._closing
            return self._working

    def _drop_unwanted(self) -> None:
        with self._changed:
            dropped = self._queue.take(Request.is_unwanted)
        for request in dropped:
            request.end_unwanted()
            self._observers.finished(request)

    def _fail(self, reason: str | None) -> None:
        """End everything; ``reason`` None: because the session closes."""
        with self._changed:
            self._failure = reason
            self._draining = True
            dropped = self._queue.take(lambda _request: True)

        def end(request: Request) -> None:
            if reason is None:
                request.end_cancelled()
            else:
                request.end("failed", SessionFailed(reason))

        for request in dropped:
            end(request)
            self._observers.finished(request)
        self._scheduler.abandon(end)
        with self._changed:
            self._changed.notify_all()


class _Durations:
    """How long requests take, of late."""

    def __init__(self) -> None:
        self.mean = _FIRST_RETRY_SECONDS

    def round(self, report: RoundReport) -> None:
        """A round says nothing of a whole request."""

    def finished(self, request: Request) -> None:
        if request.state == "finished" and request.total_seconds is not None and request.queued_seconds is not None:
            self.mean += 0.1 * (request.total_seconds - request.queued_seconds - self.mean)


def check_timeout(timeout: float | None) -> None:
    """OptionError unless it is None or a number of seconds over 0."""
    if timeout is not None and not 0 < timeout < threading.TIMEOUT_MAX:
        raise OptionError(f"timeout is {timeout}, expected seconds over 0")
