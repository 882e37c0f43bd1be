"""A request on its way through a batch session, as its caller sees it: steps as they come, its state, its result, cancellation.

Any thread may look; the session's own writes. Knows nothing about rows or rounds.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from xpress_runtime.errors import XpressError
from xpress_runtime.generation import FinishReason, GenerationConfig, GenerationResult
from xpress_runtime.progress import RequestProgress
from xpress_runtime.serving.errors import RequestCancelled, RequestTimedOut
from xpress_runtime.stats import GenerationStats, Stage

logger = logging.getLogger("xpress_runtime.serving")

Origin = Literal["drafter", "refiner", "target"]
State = Literal["queued", "reading", "running", "finished", "cancelled", "timed out", "failed"]


@dataclass(frozen=True)
class StepToken:
    """A kept token, and the text that became final with it (text may lag behind).

    ``origin``: "drafter" (the drafter's best guess, accepted), "refiner" (another one than its best guess, accepted), "target" (its own).
    """

    id: int
    text: str
    origin: Origin


@dataclass(frozen=True)
class Step:
    """What a request got from its prompt (``proposed`` 0, seconds of PREFILL) or from a round, whose seconds all its rows share."""

    tokens: tuple[StepToken, ...]
    proposed: int
    accepted: int
    seconds: dict[Stage, float] = field(repr=False)

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)


class Request:
    """One generation of a :class:`BatchSession`. Iterating yields its steps, and raises what ended it early."""

    def __init__(
        self,
        prompt: Sequence[int],
        config: GenerationConfig,
        progress: RequestProgress,
        stats: GenerationStats,
        *,
        client: str,
        deadline: float | None,
        on_step: Callable[[Step | None], None] | None,
    ) -> None:
        self.id = uuid.uuid4().hex
        self.prompt = prompt
        self.config = config
        self.progress = progress
        self.stats = stats
        self.client = client
        self.deadline = deadline
        self.state: State = "queued"
        self.error: XpressError | None = None
        # Seconds since it was submitted.
        self.queued_seconds: float | None = None
        self.first_token_seconds: float | None = None
        self.total_seconds: float | None = None
        self.wanted = True
        self._submitted = time.perf_counter()
        self._on_step = on_step
        self._steps: list[Step] = []
        self._changed = threading.Condition()

    def __iter__(self) -> Iterator[Step]:
        index = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda index=index: len(self._steps) > index or self.ended)  # type: ignore[misc]
                if len(self._steps) == index:
                    break
                step = self._steps[index]
            index += 1
            yield step
        if self.error is not None:
            raise self.error

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def text(self) -> str:
        """Final text so far."""
        return self.progress.text

    @property
    def tokens(self) -> tuple[int, ...]:
        """Kept tokens so far."""
        return tuple(self.progress.tokens)

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.progress.finish_reason

    @property
    def ended(self) -> bool:
        return self.state in {"finished", "cancelled", "timed out", "failed"}

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Wait for the end. Raises what ended it early, or TimeoutError after ``timeout`` seconds of waiting."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.ended, timeout):
                raise TimeoutError(f"the request has not ended within {timeout} s")
        if self.error is not None:
            raise self.error
        assert self.finish_reason is not None, "a finished request has a reason"
        return GenerationResult(self.text, self.tokens, self.finish_reason, self.stats)

    def cancel(self) -> None:
        """Its slot is free at the next round. Nothing happens where it has ended."""
        self.wanted = False

    # For the session's thread.

    def begin(self) -> None:
        """It has a slot."""
        self.state = "reading"
        self.queued_seconds = self._elapsed()

    def push(self, step: Step) -> None:
        """It got something."""
        if self.first_token_seconds is None:
            self.first_token_seconds = self._elapsed()
            self.state = "running"
        with self._changed:
            self._steps.append(step)
            self._changed.notify_all()
        self._tell(step)

    def end(self, state: State, error: XpressError | None = None) -> None:
        """It gets nothing more."""
        with self._changed:
            self.state, self.error = state, error
            self.total_seconds = self._elapsed()
            self._changed.notify_all()
        self._tell(None)

    def end_cancelled(self) -> None:
        self.end("cancelled", RequestCancelled("the request was cancelled"))

    def is_unwanted(self) -> bool:
        """Whether it was cancelled or its time is up."""
        return not self.wanted or (self.deadline is not None and self._elapsed() > self.deadline)

    def end_unwanted(self) -> None:
        """It gets nothing more, because it was cancelled, or else because its time is up."""
        if not self.wanted:
            self.end_cancelled()
            return
        reached = f"it was {self.state}, with {len(self.progress.tokens)} tokens so far"
        self.end("timed out", RequestTimedOut(f"the request has not ended within {self.deadline:.4g} s: {reached}"))

    def _tell(self, step: Step | None) -> None:
        if self._on_step is None:
            return
        try:
            self._on_step(step)
        except Exception:
            # Its caller's defect: other requests have nothing to do with it.
            logger.exception("on_step of request %s failed; the request is cancelled", self.id)
            self._on_step = None
            self.cancel()

    def _elapsed(self) -> float:
        return time.perf_counter() - self._submitted
