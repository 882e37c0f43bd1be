"""A worker whose session does what prompts say: ``python -m tests.jobs.fake_worker``.

A prompt is words: ``steps N`` (N of 2 ms each, the default 1), ``endless``, ``hang`` (the session's thread never returns), ``freeze`` (the
same, and no other thread runs), ``crash`` (SIGKILL), ``refuse`` and ``fault`` (of submitting), ``internal`` (of the request), ``die`` (the
session's thread ends), ``noise``. ``once PATH`` before it: the first time alone, which PATH remembers. ``FAKE_START``: "die", "refuse" or
seconds until the session is open.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from xpress_runtime.errors import BundleError, EnvironmentProblem, PromptError, XpressError
from xpress_runtime.generation import GenerationConfig, GenerationResult
from xpress_runtime.jobs.worker import main
from xpress_runtime.stats import GenerationStats

STEP_SECONDS = 0.002


class FakeRequest:
    def __init__(self, words: list[str], on_step: Callable[[object], None]) -> None:
        self.words = words
        self.on_step = on_step
        self.stats = GenerationStats(3, 3, 2, seed=7)
        self.state = "queued"
        self.queued_seconds: float | None = None
        self.total_seconds: float | None = None
        self.text = ""
        self.tokens: tuple[int, ...] = ()
        self.left = int(words[1]) if words[0] == "steps" else 1
        self.cancelled = False
        self.error: Exception | None = None
        self._submitted = time.monotonic()

    def begin(self) -> None:
        self.state, self.queued_seconds = "running", time.monotonic() - self._submitted

    def step(self) -> None:
        self.tokens += (5, 6) if self.tokens else (5,)
        self.text += "ab"
        if len(self.tokens) > 1:
            self.stats.proposals.append(3)
            self.stats.acceptance_lengths.append(2)
            self.stats.kept_lengths.append(2)
        self.left -= self.words[0] != "endless"

    def end(self, state: str, error: Exception | None = None) -> None:
        self.state, self.error = state, error
        self.total_seconds = time.monotonic() - self._submitted
        self.on_step(None)

    def cancel(self) -> None:
        self.cancelled = True

    def result(self, timeout: float | None = None) -> GenerationResult:  # noqa: ARG002
        if self.state == "cancelled":
            raise XpressError("this request was cancelled")
        if self.error is not None:
            raise self.error
        return GenerationResult(self.text, self.tokens, "length", self.stats)


class FakeSession:
    tokenizer = None

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.failed: str | None = None
        self._queue: queue.SimpleQueue[FakeRequest] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(
        self,
        prompt: Any,
        config: GenerationConfig | None = None,  # noqa: ARG002
        *,
        chat_variables: Mapping[str, Any] | None = None,  # noqa: ARG002
        on_step: Callable[[Any], None] | None = None,
    ) -> FakeRequest:
        words = str(prompt).split()
        if words[0] == "once":
            place = Path(words[1])
            words = ["steps", "1"] if place.exists() else words[2:]
            place.touch()
        if words[0] == "refuse":
            raise PromptError("the prompt has 99 tokens and\nthe capacity is 9")
        if words[0] == "fault":
            raise KeyError("a defect")
        if words[0] == "noise":
            print("not an event")  # noqa: T201
        assert on_step is not None
        request = FakeRequest(words, on_step)
        self._queue.put(request)
        return request

    def status(self) -> Any:
        return SimpleNamespace(failed=self.failed)

    def close(self) -> None:
        pass

    def _run(self) -> None:
        running: list[FakeRequest] = []
        while self.failed is None:
            while len(running) < self.slots and not (running and self._queue.empty()):
                request = self._queue.get()
                request.begin()
                running.append(request)
            time.sleep(STEP_SECONDS)
            for request in list(running):
                self._act(request.words[0])
                if request.words[0] == "internal":
                    request.end("failed", EnvironmentProblem("the device is lost"))
                elif request.cancelled:
                    request.end("cancelled")
                elif self.failed is not None:
                    request.end("failed", XpressError(self.failed))
                else:
                    request.step()
                    if request.left:
                        continue
                    request.end("finished")
                running.remove(request)

    def _act(self, word: str) -> None:
        if word == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        elif word == "hang":
            threading.Event().wait()
        elif word == "freeze":
            # A call that keeps the interpreter's lock.
            ctypes.PyDLL(None).sleep(1000)
        elif word == "die":
            self.failed = "out of memory in a round"


def open_fake(settings: Mapping[str, Any]) -> FakeSession:
    start = os.environ.get("FAKE_START", "0")
    if start == "refuse":
        raise BundleError("bundle is damaged")
    if start == "die":
        raise RuntimeError("no such device")
    time.sleep(float(start))
    return FakeSession(settings["slots"] or 2)


if __name__ == "__main__":
    main(open_fake)
