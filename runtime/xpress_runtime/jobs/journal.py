"""What a batch tells beside its results: a log with one JSON object per event, and the sum of it at the end."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from xpress_runtime.errors import OutputError
from xpress_runtime.jobs.results import Status


class Journal:
    """Appends events to a file, or to none. Each has ``time`` (seconds since 1970) and ``event``; the others name their job by ``id``."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        try:
            # One write a line: several runs may share a file.
            self._file = None if path is None else path.open("ab", buffering=0)
        except OSError as problem:
            raise OutputError(f"--log {path} cannot be written: {problem.strerror or problem}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, event: str, **fields: Any) -> None:
        if self._file is None:
            return
        line = json.dumps({"time": round(time.time(), 3), "event": event, **fields})
        try:
            self._file.write(line.encode("ascii") + b"\n")
        except OSError as problem:
            raise OSError(problem.errno, problem.strerror, str(self._path)) from None


@dataclass
class Summary:
    """``jobs``, ``finished``, ``timeout``, ``failed`` and ``left`` (without a row yet) are of the whole file, and ``resumed`` of them have
    their row from earlier runs; the rest is what this run did. ``seconds`` are since its start, ``tokens_per_second`` since its worker was
    ready, so loading is no part of it. ``stopped_by``: the signal that ended it early.
    """

    jobs: int
    resumed: int = 0
    finished: int = 0
    timeout: int = 0
    failed: int = 0
    retries: int = 0
    worker_restarts: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    accepted_tokens: int = 0
    rounds: int = 0
    kept_in_rounds: int = 0
    seconds: float = 0.0
    ready_after: float | None = None
    stopped_by: int | None = None

    @property
    def left(self) -> int:
        return self.jobs - self.finished - self.timeout - self.failed

    @property
    def tokens_per_second(self) -> float | None:
        if self.ready_after is None or not self.output_tokens:
            return None
        return self.output_tokens / max(self.seconds - self.ready_after, 1e-9)

    @property
    def mean_acceptance_length(self) -> float | None:
        """τ over all rounds of this run: kept tokens per verification."""
        return self.kept_in_rounds / self.rounds if self.rounds else None

    def count(self, status: Status, row: Mapping[str, Any]) -> None:
        """A row that this run wrote."""
        setattr(self, status, getattr(self, status) + 1)
        self.input_tokens += row["input_tokens"] or 0
        self.output_tokens += row["output_tokens"]
        self.accepted_tokens += row["accepted_tokens"]
        if row["rounds"]:
            self.rounds += row["rounds"]
            # The first token comes from the prompt and belongs to no round.
            self.kept_in_rounds += row["output_tokens"] - 1

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        for name in ("kept_in_rounds", "ready_after"):
            del fields[name]
        fields |= {"left": self.left, "tokens_per_second": self.tokens_per_second, "mean_acceptance_length": self.mean_acceptance_length}
        return fields | {"seconds": round(self.seconds, 3)}

    def line(self) -> str:
        """One line for people."""
        counts = [f"{self.finished} finished", f"{self.timeout} timed out", f"{self.failed} failed"]
        if self.left:
            counts.append(f"{self.left} left (the same command again runs them)")
        rate = "" if self.tokens_per_second is None else f", {self.tokens_per_second:.1f} tokens/s"
        tau = "" if self.mean_acceptance_length is None else f", mean acceptance length {self.mean_acceptance_length:.2f}"
        return (
            f"{self.jobs} jobs: {', '.join(counts)}; resumed {self.resumed}, retries {self.retries}, "
            f"{self.output_tokens} tokens in {self.seconds:.1f} s{rate}{tau}"
        )
