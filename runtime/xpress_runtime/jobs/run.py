"""The supervisor of a batch: hands jobs to the worker, writes what comes back, and goes on when the worker does not.

Its rules, in one place:

- A job that ends is written at once, in the order in which jobs end. What is not written when the run ends is run by the next one.
- The user's errors and soft time-outs are final. An internal error, a crash and a hang count an attempt of the job; after ``retries`` more
  it is written as failed, or as timed out where it hung.
- A crash counts for every job in flight, since nobody knows whose it was; a hang for the jobs past their time alone. For the last attempt a
  job that was there has the worker to itself, so that no job fails for another one's crash.

Knows nothing about sessions or models; reads and writes no file but through :mod:`intake`, :mod:`results` and :mod:`journal`.
"""

from __future__ import annotations

import heapq
import queue
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xpress_runtime.errors import EnvironmentProblem, UserError, XpressError
from xpress_runtime.jobs.intake import JobFile
from xpress_runtime.jobs.journal import Journal, Summary
from xpress_runtime.jobs.process import WORKER, WorkerProcess, WorkerSettings, describe_end
from xpress_runtime.jobs.results import ROW_FIELDS, STATUSES, Results, Status

MAX_STARTS = 3
# Workers in a row that ended before a single job did. More than a few bad jobs make of it in turn.
MAX_FRUITLESS = 20
_LONGEST_DELAY = 60.0
_LONGEST_WAIT = 1.0


@dataclass(frozen=True)
class BatchOptions:
    """How jobs are run; times in seconds. ``timeout`` is a job's, from when it leaves the session's queue; a worker that has not answered
    ``grace`` later is killed. ``drain``: what jobs that run get once the run is interrupted. ``max_in_flight``: None for two per slot.
    """

    retries: int = 2
    retry_delay: float = 1.0
    timeout: float | None = None
    grace: float = 10.0
    drain: float = 0.0
    max_in_flight: int | None = None


@dataclass
class _Flight:
    """A job at the worker. ``attempt``: which one this is, from 1."""

    attempt: int
    alone: bool
    started: float | None = None
    hung: bool = False


class BatchRun:
    """One run over a file of jobs. ``on_row`` hears the number of rows and of jobs, at the start and after each row."""

    def __init__(
        self,
        jobs: JobFile,
        results: Results,
        settings: WorkerSettings,
        options: BatchOptions,
        journal: Journal,
        *,
        command: Sequence[str] = WORKER,
        on_row: Callable[[int, int], None] = lambda _done, _jobs: None,
    ) -> None:
        self._jobs = jobs
        self._results = results
        self._settings = settings
        self._options = options
        self._journal = journal
        self._command = command
        self._on_row = on_row
        # Signal handlers put into it too, which of the queues only this kind allows.
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._worker: WorkerProcess | None = None
        self._limit: int | None = None  # jobs in flight, once the worker is ready
        self._next_start = 0.0
        self._failed_starts = self._fruitless = 0
        self._ever_started = False
        self._killed = False  # the worker, because it hung; its end is not heard yet
        self._begun = self._heard = 0.0
        self._flights: dict[int, _Flight] = {}
        self._fresh = (number for number, status in enumerate(results.earlier.statuses) if not status)
        self._ahead: int | None = next(self._fresh, None)
        self._retries: list[tuple[float, int]] = []  # a heap of (when, job)
        self._attempts: dict[int, int] = {}
        self._suspects: set[int] = set()
        self._stop_at: float | None = None
        # Jobs that ran when the run was interrupted; the session may begin others that wait in it, which nobody waits for.
        self._awaited: set[int] = set()
        counts = {status: results.earlier.count(status) for status in STATUSES}
        self.summary = Summary(len(jobs), sum(counts.values()), **counts)

    def interrupt(self, signum: int) -> None:
        """Begin no more jobs, and end when those in flight have ended or had their time; a second call ends it at once.

        For signal handlers.
        """
        self._events.put((None, signum))

    def run(self) -> Summary:
        """Until every job has its row, or an interruption. Raises what ends a run early: the errors of the session's opening,
        EnvironmentProblem where no worker stays alive, OSError of the disk, OptionError where the file of jobs has changed.
        """
        self._begun = time.monotonic()
        self._journal.write("run", jobs=len(self._jobs), resumed=self.summary.resumed, results=str(self._results.path))
        self._on_row(self.summary.resumed, self.summary.jobs)
        try:
            while not self._is_over():
                self._step()
        finally:
            if self._worker is not None:
                self._worker.close()
            self.summary.seconds = time.monotonic() - self._begun
            self._journal.write("summary", **self.summary.to_json())
        return self.summary

    def _is_over(self) -> bool:
        if self._stop_at is not None:
            return not self._awaited & self._flights.keys() or time.monotonic() >= self._stop_at
        return not self._flights and not self._retries and self._ahead is None

    def _step(self) -> None:
        now = time.monotonic()
        if self._worker is None and now >= self._next_start and self._stop_at is None:
            self._start_worker()
        self._fill(now)
        try:
            self._hear(*self._events.get(timeout=self._wait(now)))
            # All that has been said comes before any judgement on who is silent.
            while True:
                self._hear(*self._events.get_nowait())
        except queue.Empty:
            pass
        self._watch(time.monotonic())
        self._results.sync(at_least=_LONGEST_WAIT)

    def _wait(self, now: float) -> float:
        """Seconds until something is due, if nothing is heard before."""
        due = [now + _LONGEST_WAIT]
        if self._stop_at is not None:
            due.append(self._stop_at)
        elif self._worker is None:
            due.append(self._next_start)
        elif self._retries and self._limit is not None and len(self._flights) < self._limit:
            # One that waits for the worker to be empty is not due before something is heard.
            due.append(self._retries[0][0] if self._retries[0][0] > now else due[0])
        if (silent := self._silent_since()) is not None and self._patience is not None:
            due.append(silent + self._patience)
        return max(min(due) - now, 0.01)

    # The worker.

    def _start_worker(self) -> None:
        settings = {**self._settings.to_json(), "timeout": self._options.timeout}
        if self._ever_started:
            # The files were hashed once.
            settings["verify"] = False
        self._worker = WorkerProcess(self._command, settings, self._events)
        self._journal.write("worker started", pid=self._worker.pid)

    def _hear(self, source: WorkerProcess | None, event: Any) -> None:
        now = self._heard = time.monotonic()
        if source is None:
            self._interrupted(event, now)
        elif event["event"] == "ready":
            self._limit = self._options.max_in_flight or 2 * event["slots"]
            self._ever_started, self._failed_starts = True, 0
            if self.summary.ready_after is None:
                self.summary.ready_after = now - self._begun
            self._journal.write("worker ready", slots=event["slots"], max_in_flight=self._limit)
        elif event["event"] == "refused":
            raise {2: UserError, 3: EnvironmentProblem}.get(event["exit_code"], XpressError)(event["message"])
        elif event["event"] == "started" and (flight := self._flights.get(event["number"])) is not None:
            flight.started = now
            self._journal.write("started", id=self._jobs.ids[event["number"]], attempt=flight.attempt)
        elif event["event"] == "ended" and event["number"] in self._flights:
            self._ended(event)
        elif event["event"] == "gone":
            self._gone(event["status"], now)

    def _interrupted(self, signum: int, now: float) -> None:
        self._stop_at = now if self._stop_at is not None else now + self._options.drain
        self._awaited = {number for number, flight in self._flights.items() if flight.started is not None}
        self.summary.stopped_by = signum
        self._journal.write("interrupted", signal=signum, in_flight=len(self._flights))

    def _gone(self, status: int, now: float) -> None:
        assert self._worker is not None
        said = self._worker.last_line
        ready, self._limit, self._worker = self._limit is not None, None, None
        hung, self._killed = self._killed, False
        reason = "the worker hung and was killed" if hung else describe_end(status) + (f": {said}" if said else "")
        self._journal.write("worker ended", status=status, last_line=said, in_flight=[self._jobs.ids[number] for number in self._flights])
        if not ready:
            self._failed_starts += 1
            if self._failed_starts >= MAX_STARTS:
                raise EnvironmentProblem(f"the worker ended {MAX_STARTS} times in a row while it started; {reason}")
        self._fruitless += 1
        if self._fruitless >= MAX_FRUITLESS:
            raise EnvironmentProblem(f"{MAX_FRUITLESS} workers in a row ended before any job did; the last: {reason}")
        for number, flight in list(self._flights.items()):
            self._suspects.add(number)
            if flight.hung:
                self._lose(number, "timeout", f"the worker did not answer within {self._patience:g} s and was killed")
            elif hung or self._stop_at is not None:
                self._give_back(number, now)
            else:
                self._lose(number, "failed", reason)
        self._next_start = now if ready else now + self._delay(self._failed_starts)
        if self._stop_at is None and not self._is_over():
            self.summary.worker_restarts += 1
            self._journal.write("worker restarted", reason=reason)

    @property
    def _patience(self) -> float | None:
        """Seconds from a job's start after which the worker must have said how it ended."""
        return None if self._options.timeout is None else self._options.timeout + self._options.grace

    def _watch(self, now: float) -> None:
        """Kill a worker that does not answer; its end is heard like any other."""
        patience = self._patience
        if self._worker is None or patience is None or self._killed:
            return
        hung = [flight for flight in self._flights.values() if flight.started is not None and now - flight.started > patience]
        if not hung and (silent := self._silent_since()) is not None and now - silent > patience:
            # None has even begun, so it is any of them.
            hung = list(self._flights.values())
        for flight in hung:
            flight.hung = True
        if hung:
            self._killed = True
            self._worker.kill()

    def _silent_since(self) -> float | None:
        """Since when the worker owes an answer: the start of the oldest job, or the last word where none has started."""
        if not self._flights:
            return None
        started = [flight.started for flight in self._flights.values() if flight.started is not None]
        return min(started, default=self._heard)

    # The jobs.

    def _fill(self, now: float) -> None:
        if self._worker is None or self._limit is None or self._killed or self._stop_at is not None:
            return
        while len(self._flights) < self._limit and not any(flight.alone for flight in self._flights.values()):
            number = self._take(now)
            if number is None:
                return
            if not self._flights:
                self._heard = now
            self._flights[number] = _Flight(self._attempts.get(number, 0) + 1, self._needs_the_worker(number))
            self._worker.send({"number": number, "job": self._jobs.read(number)})

    def _take(self, now: float) -> int | None:
        """The next job to send, if one may be sent now."""
        if self._retries and self._retries[0][0] <= now:
            if self._needs_the_worker(self._retries[0][1]) and self._flights:
                return None
            return heapq.heappop(self._retries)[1]
        number, self._ahead = self._ahead, next(self._fresh, None)
        return number

    def _needs_the_worker(self, number: int) -> bool:
        attempts = self._attempts.get(number, 0)
        return number in self._suspects and attempts > 0 and attempts >= self._options.retries

    def _ended(self, event: Mapping[str, Any]) -> None:
        number, outcome = event["number"], event["outcome"]
        self._fruitless = 0
        if outcome == "error":
            self._lose(number, "failed", event["error"])
        else:
            self._write(number, "failed" if outcome == "refused" else outcome, event["error"], event["row"])

    def _lose(self, number: int, status: Status, reason: str) -> None:
        """An attempt came to nothing: once more, if there are any left."""
        attempt = self._flights[number].attempt
        if attempt > self._options.retries:
            self._write(number, status, reason, {})
            return
        del self._flights[number]
        self._attempts[number] = attempt
        delay = self._delay(attempt)
        heapq.heappush(self._retries, (time.monotonic() + delay, number))
        self.summary.retries += 1
        self._journal.write("retried", id=self._jobs.ids[number], attempt=attempt, reason=reason, delay=round(delay, 3))

    def _give_back(self, number: int, now: float) -> None:
        del self._flights[number]
        heapq.heappush(self._retries, (now, number))

    def _delay(self, attempt: int) -> float:
        """Twice as long each time, give or take a half: what fails together should not come back together."""
        delay: float = min(self._options.retry_delay * 2.0 ** (attempt - 1), _LONGEST_DELAY)
        return delay * random.uniform(0.5, 1.5)

    def _write(self, number: int, status: Status, error: str | None, fields: Mapping[str, Any]) -> None:
        flight = self._flights[number]
        nothing = {"output_tokens": 0, "accepted_tokens": 0, "output": "", "tokens": [], "rounds": 0}
        told = {
            "id": self._jobs.ids[number],
            "job": self._jobs.digest(number),
            "bundle": self._results.bundle,
            "status": status,
            "attempts": flight.attempt,
            "error": error,
        }
        row = {**dict.fromkeys(ROW_FIELDS), **nothing, **fields, **told}
        self._results.append(row)
        del self._flights[number]
        self._attempts.pop(number, None)
        self._suspects.discard(number)
        self.summary.count(status, row)
        self._journal.write(status, id=told["id"], attempts=flight.attempt, error=error, output_tokens=row["output_tokens"])
        self._on_row(self.summary.jobs - self.summary.left, self.summary.jobs)
