"""A worker process as the supervisor holds it: lines in, events out, an end that is always noticed.

Nothing here waits for the worker: one thread each writes its lines, reads its events and keeps what it says on standard error, so that one
that hangs, even with a full pipe, never hangs the supervisor.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xpress_runtime import version

logger = logging.getLogger("xpress_runtime.jobs")

# -P: what lies in the current folder is not imported.
WORKER = (sys.executable, "-P", "-m", "xpress_runtime.jobs.worker")
# From the end of a worker's events to the end of the worker itself.
_END_SECONDS = 5.0
_KEPT_LINES = 50


@dataclass(frozen=True)
class WorkerSettings:
    """What the worker's session is opened with; as of ``BatchSession.open``."""

    bundle: Path
    backend: str = "auto"
    slots: int | None = None
    threads: int | None = None
    verify: bool = True
    runtime_cache: Path | None = None

    def to_json(self) -> dict[str, Any]:
        cache = None if self.runtime_cache is None else str(self.runtime_cache.absolute())
        fields = {"bundle": str(self.bundle.absolute()), "backend": self.backend, "slots": self.slots, "threads": self.threads}
        return {**fields, "verify": self.verify, "runtime_cache": cache}


class WorkerProcess:
    """A running worker. Its events, and ``gone`` {status} as the last one, go into ``events``."""

    def __init__(self, command: Sequence[str], settings: Mapping[str, Any], events: queue.SimpleQueue[Any]) -> None:
        # The house's packages as this process has them, also where they come from a checkout.
        home = str(Path(version.__file__).parents[1])
        paths = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
        # A group of its own: Ctrl-C is for the supervisor.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths},
            process_group=0,
        )
        self._events = events
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._said: deque[str] = deque(maxlen=_KEPT_LINES)
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._write, self._listen, self._read)]
        for thread in self._threads:
            thread.start()
        self.send({**settings, "parent": os.getpid()})

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def last_line(self) -> str | None:
        """The last line on standard error that says something."""
        return next(reversed(self._said), None)

    def send(self, message: Mapping[str, Any]) -> None:
        self._lines.put(json.dumps(message).encode("ascii") + b"\n")

    def kill(self) -> None:
        """At once; it hears no polite signal in a native call. ``gone`` follows."""
        self._process.kill()

    def close(self) -> None:
        """Kill it and wait for its end."""
        self.kill()
        self._lines.put(None)
        for thread in self._threads:
            thread.join(_END_SECONDS)

    def _write(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError), self._process.stdin as pipe:
            while (line := self._lines.get()) is not None:
                pipe.write(line)
                pipe.flush()

    def _listen(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as pipe:
            for line in pipe:
                if text := " ".join(line.decode("utf-8", errors="replace").split()):
                    self._said.append(text)
                    # What the session warns of is for the user, what libraries print is not.
                    level = logging.WARNING if text.startswith(("WARNING ", "ERROR ")) else logging.INFO
                    logger.log(level, "worker: %s", text)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            for line in pipe:
                # A worker that was killed may leave half a line.
                if line.endswith(b"\n"):
                    self._events.put((self, json.loads(line)))
        try:
            status = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        # What it said last must be there when its end is explained.
        self._threads[1].join(_END_SECONDS)
        self._lines.put(None)
        self._events.put((self, {"event": "gone", "status": status}))


def describe_end(status: int) -> str:
    """How a worker ended, in a few words."""
    if status == -signal.SIGKILL:
        return "the worker was killed (SIGKILL), most likely because memory ran out"
    if status < 0:
        name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
        return f"the worker crashed ({name})"
    return f"the worker ended with status {status}"
