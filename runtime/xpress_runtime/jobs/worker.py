"""The process that runs jobs: reads settings and then one job a line from standard input, writes one JSON object a line for what happens.

It owns the session and nothing else: no file of the batch, no retries, no order. A time-out is seen to here as long as the session answers;
what never answers, and what kills this process, is the supervisor's business. It ends when its standard input does, and on Linux at the
latest when its parent does.

Events: ``ready`` {slots}, ``refused`` {exit_code, message} where the session cannot be opened, ``started`` {number} when a job leaves the
session's queue, ``ended`` {number, outcome, error, row}. An outcome is "finished", "timeout", "refused" (the user's error: no other try
would help) or "error".
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, Protocol

from xpress_runtime.errors import OptionError, UserError, XpressError
from xpress_runtime.generation import GenerationConfig, GenerationResult
from xpress_runtime.jobs.job import Job, parse_job
from xpress_runtime.stats import GenerationStats, Stage

Emit = Callable[[Mapping[str, Any]], None]

_TICK_SECONDS = 0.05
# The supervisor limits what is in flight; the session's queue must never refuse.
_MAX_QUEUE = 4096
_PR_SET_PDEATHSIG = 1


class JobRequest(Protocol):
    """What is needed of :class:`xpress_runtime.serving.Request`."""

    @property
    def stats(self) -> GenerationStats: ...
    @property
    def state(self) -> str: ...
    @property
    def queued_seconds(self) -> float | None: ...
    @property
    def total_seconds(self) -> float | None: ...
    @property
    def text(self) -> str: ...
    @property
    def tokens(self) -> tuple[int, ...]: ...
    def result(self, timeout: float | None = None) -> GenerationResult: ...
    def cancel(self) -> None: ...


class JobSession(Protocol):
    """What is needed of :class:`xpress_runtime.serving.BatchSession`."""

    @property
    def slots(self) -> int: ...
    @property
    def tokenizer(self) -> Any: ...
    def submit(
        self,
        prompt: Any,
        config: GenerationConfig | None = None,
        *,
        chat_variables: Mapping[str, Any] | None = None,
        on_step: Callable[[Any], None] | None = None,
    ) -> JobRequest: ...
    def status(self) -> Any: ...
    def close(self) -> None: ...


SessionFactory = Callable[[Mapping[str, Any]], JobSession]


def open_session(settings: Mapping[str, Any]) -> JobSession:
    """A session as the supervisor's settings ask for it."""
    from xpress_runtime.serving import BatchSession, Limits

    return BatchSession.open(
        settings["bundle"],
        settings["backend"],
        slots=settings["slots"],
        threads=settings["threads"],
        verify=settings["verify"],
        runtime_cache=settings["runtime_cache"],
        limits=Limits(max_queue=_MAX_QUEUE),
    )


def main(factory: SessionFactory = open_session) -> None:
    """Serve the process's standard input with the session that ``factory`` opens; does not return."""
    # Ctrl-C reaches every process of the terminal; what becomes of this one, the supervisor decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What libraries print goes where errors go; only this module writes to the caller's pipe.
    events = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)

    def emit(event: Mapping[str, Any]) -> None:
        line = memoryview(json.dumps(event).encode("ascii") + b"\n")
        # The supervisor may be gone; the end of standard input tells, too.
        with suppress(BrokenPipeError):
            while line:
                line = line[events.write(line) :]

    code = 1
    try:
        code = _serve(factory, sys.stdin.buffer, emit)
    except Exception:  # noqa: BLE001
        # The supervisor tells what the last line says.
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        # Not by way of the interpreter's end: a thread of the session may hang.
        os._exit(code)


def _serve(factory: SessionFactory, stream: BinaryIO, emit: Emit) -> int:
    line = stream.readline()
    if not line:
        return 0
    settings = json.loads(line)
    _die_with(settings["parent"])
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read_jobs, args=(stream, inbox), daemon=True).start()
    try:
        session = factory(settings)
    except XpressError as problem:
        emit({"event": "refused", "exit_code": problem.exit_code, "message": str(problem)})
        return 0
    emit({"event": "ready", "slots": session.slots})
    _Jobs(session, settings["timeout"], inbox, emit).run()
    return 1


def _die_with(parent: int) -> None:
    """Have the system kill this process when its parent ends, where it can: a native call that hangs sees no end of input."""
    if sys.platform != "linux":
        return
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _read_jobs(stream: BinaryIO, inbox: queue.SimpleQueue[Any]) -> None:
    for line in stream:
        if line.endswith(b"\n"):
            inbox.put(json.loads(line))
    # Whoever asked has all it wanted, or is gone.
    os._exit(0)


@dataclass
class _Running:
    request: JobRequest
    submitted: float
    started: bool = False
    expired: bool = False


class _Jobs:
    """The jobs of this process that have not ended. All work happens on one thread; the session's leaves numbers in the inbox."""

    def __init__(self, session: JobSession, timeout: float | None, inbox: queue.SimpleQueue[Any], emit: Emit) -> None:
        self._session = session
        self._timeout = timeout
        self._inbox = inbox
        self._emit = emit
        self._running: dict[int, _Running] = {}

    def run(self) -> None:
        """Until the session has failed and what had ended before is told; the end of input ends the process elsewhere."""
        while True:
            failed = self._session.status().failed
            try:
                # Nothing runs: nothing to look after.
                item = self._inbox.get(block=failed is None, timeout=_TICK_SECONDS if self._running else None)
            except queue.Empty:
                if failed is not None:
                    print(f"the session failed: {' '.join(str(failed).split())}", file=sys.stderr)  # noqa: T201
                    return
                item = None
            if isinstance(item, int):
                self._end(item)
            elif item is not None and failed is None:
                self._submit(item["number"], item["job"])
            self._tick()

    def _submit(self, number: int, values: Mapping[str, Any]) -> None:
        submitted = time.monotonic()
        try:
            job = parse_job(values)
            prompt, variables = prompt_of(job, self._session.tokenizer)
            request = self._session.submit(prompt, job.config, chat_variables=variables, on_step=partial(self._on_step, number))
        except UserError as problem:
            self._told(number, "refused", str(problem))
        except XpressError as problem:
            self._told(number, "error", str(problem))
        except Exception as problem:  # noqa: BLE001
            # A defect with one job must not take the others along.
            traceback.print_exc()
            self._told(number, "error", f"{type(problem).__name__}: {problem}")
        else:
            self._running[number] = _Running(request, submitted)

    def _on_step(self, number: int, step: object) -> None:
        if step is None:
            self._inbox.put(number)

    def _tick(self) -> None:
        now = time.monotonic()
        for number, running in self._running.items():
            queued = running.request.queued_seconds
            if queued is None:
                continue
            self._start(number, running)
            if self._timeout is not None and not running.expired and now > running.submitted + queued + self._timeout:
                running.expired = True
                running.request.cancel()

    def _start(self, number: int, running: _Running) -> None:
        if not running.started:
            running.started = True
            self._emit({"event": "started", "number": number})

    def _end(self, number: int) -> None:
        running = self._running.pop(number)
        request = running.request
        if request.queued_seconds is not None:
            # A short one may have come and gone between two looks.
            self._start(number, running)
        try:
            result = request.result()
        except UserError as problem:
            self._told(number, "refused", str(problem))
        except XpressError as problem:
            if running.expired or request.state == "timed out":
                limit = "" if self._timeout is None else f" within {self._timeout:g} s of its start"
                self._told(number, "timeout", f"it did not end{limit}", row_of(request, request.text, request.tokens, None))
            else:
                self._told(number, "error", str(problem))
        except Exception as problem:  # noqa: BLE001
            traceback.print_exc()
            self._told(number, "error", f"{type(problem).__name__}: {problem}")
        else:
            self._told(number, "finished", None, row_of(request, result.text, result.tokens, result.finish_reason))

    def _told(self, number: int, outcome: str, error: str | None, row: Mapping[str, Any] | None = None) -> None:
        if outcome == "error" and self._session.status().failed is not None:
            # Not of this job alone: to the supervisor it is a crash with all that was in flight.
            return
        line = None if error is None else " ".join(error.split())
        self._emit({"event": "ended", "number": number, "outcome": outcome, "error": line, "row": row or {}})


def prompt_of(job: Job, tokenizer: Any) -> tuple[Any, dict[str, Any]]:
    """What a session takes: text becomes a chat message where there is a template and it is not raw. With the template's variables.

    OptionError where thinking is to be switched and the template has no switch.
    """
    from xpress_runtime.fit import THINKING, switches_thinking

    has_template = tokenizer is not None and tokenizer.has_chat_template
    prompt: Any = job.prompt
    if isinstance(prompt, str) and has_template and not job.raw:
        prompt = [{"role": "user", "content": prompt}]
    variables = dict(job.variables)
    if job.thinking is not None:
        if not switches_thinking(tokenizer):
            raise OptionError("the bundle's chat template cannot switch thinking; leave out 'thinking'")
        variables[THINKING] = job.thinking
    return prompt, variables


def row_of(request: JobRequest, text: str, tokens: Sequence[int], finish_reason: str | None) -> dict[str, Any]:
    """What the results say of a request, times in milliseconds.

    A stage's time is that of the rounds that the request took part in, whole: the rows of a round share it.
    """
    stats = request.stats
    stages = {f"{stage.value}_ms": _milliseconds(stats.stage_seconds[stage]) for stage in (Stage.DRAFT, Stage.REFINE, Stage.VERIFY)}
    return {
        "input_tokens": stats.prompt_tokens,
        "output_tokens": len(tokens),
        "accepted_tokens": stats.accepted,
        "output": text,
        "tokens": list(tokens),
        "finish_reason": finish_reason,
        "prefill_ms": _milliseconds(stats.prefill_seconds),
        **stages,
        "queued_ms": _milliseconds(request.queued_seconds),
        "total_ms": _milliseconds(request.total_seconds),
        "rounds": stats.rounds,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "seed": stats.seed,
    }


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)


if __name__ == "__main__":
    main()
