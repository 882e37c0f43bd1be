"""The file of jobs: read twice, so that it need not fit into memory.

The first pass checks every line and keeps of each job its id, where it lies and a digest; the second reads one job at a time, when its turn
has come, and notices a file that has changed in between.
"""

from __future__ import annotations

import stat
from array import array
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from xpress_runtime.errors import OptionError, UserError
from xpress_runtime.jobs.job import JobError, JobId, parse_job, read_line

MAX_LINE_BYTES = 64 * 1024 * 1024
MAX_PROBLEMS = 20
DIGEST_BYTES = 8
_BOM = b"\xef\xbb\xbf"


class InputProblems(UserError):
    """Lines that are no jobs. ``lines`` describes the first of them, one each; the message is the sum of it."""

    def __init__(self, path: Path, lines: list[str], count: int) -> None:
        self.lines = tuple(lines)
        super().__init__(f"{path}: {count} line{'s' * (count > 1)} cannot be used, so nothing was run; correct or remove them")


class JobFile:
    """The jobs of a file, by number from 0. A context manager; :meth:`open` checks all of them."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.ids: list[JobId] = []
        self.numbers: dict[JobId, int] = {}
        self._file = file
        self._lines = array("Q")
        self._offsets = array("Q")
        self._digests = bytearray()

    @classmethod
    def open(cls, path: Path) -> Self:
        """Check every line. Raises InputProblems for those that are no jobs, OptionError where the file is none to begin with."""
        try:
            # Before it is opened: a pipe would wait for its writer.
            if not path.is_dir() and not stat.S_ISREG(path.stat().st_mode):
                raise OptionError(f"{path} is no regular file, and it is read twice; save it to one first")
            file = path.open("rb")
        except OSError as problem:
            raise OptionError(f"{path} cannot be read: {problem.strerror or problem}") from None
        try:
            jobs = cls(path, file)
            jobs._index()
        except BaseException:
            file.close()
            raise
        return jobs

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self.ids)

    def digest(self, number: int) -> str:
        """What a job asks for, as 16 hexadecimal digits."""
        return self._digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES].hex()

    def read(self, number: int) -> dict[str, Any]:
        """A job's object once more; OptionError where the file is no longer what was checked."""
        self._file.seek(self._offsets[number])
        try:
            values = read_line(self._file.readline(MAX_LINE_BYTES).removeprefix(_BOM))
            job = parse_job(values)
            same = job.id == self.ids[number] and job.digest.hex() == self.digest(number)
        except JobError:
            same = False
        if not same:
            raise OptionError(f"{self.path} was changed while its jobs ran (line {self._lines[number]}); run the command again")
        return values

    def _index(self) -> None:
        problems: list[str] = []
        count = offset = 0
        number = 0
        while line := self._file.readline(MAX_LINE_BYTES):
            number += 1
            start, offset = offset, offset + len(line)
            try:
                if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                    offset += self._skip_line()
                    raise JobError(f"longer than {MAX_LINE_BYTES} bytes")
                self._add(line.removeprefix(_BOM) if number == 1 else line, number, start)
            except JobError as problem:
                count += 1
                if count <= MAX_PROBLEMS:
                    problems.append(f"line {number}: {problem}")
        if count > MAX_PROBLEMS:
            problems.append(f"and {count - MAX_PROBLEMS} more")
        if problems:
            raise InputProblems(self.path, problems, count)
        if not self.ids:
            raise OptionError(f'{self.path} holds no job; write one JSON object a line, such as {{"id": 1, "prompt": "…"}}')

    def _add(self, line: bytes, number: int, start: int) -> None:
        if not line.strip():
            return
        job = parse_job(read_line(line))
        if (first := self.numbers.get(job.id)) is not None:
            raise JobError(f"id {job.id!r} is that of line {self._lines[first]}; ids must differ")
        self.numbers[job.id] = len(self.ids)
        self.ids.append(job.id)
        self._lines.append(number)
        self._offsets.append(start)
        self._digests += job.digest

    def _skip_line(self) -> int:
        skipped = 0
        while part := self._file.readline(MAX_LINE_BYTES):
            skipped += len(part)
            if part.endswith(b"\n"):
                break
        return skipped
