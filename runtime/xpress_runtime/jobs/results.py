"""The file of results: one row a job, in the order in which jobs end, and what an earlier run left in it.

A row is written whole, with one call and behind the last one, so that it is there or not however the process ends; half a row, left by a
machine that went down, is cut off. What is written is handed to the disk (fsync) at most once a second and at the end: a process that is
killed loses nothing, a machine that loses power at most the rows of the last second, and their jobs run again.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, Self

from xpress_runtime.errors import OptionError, OutputError
from xpress_runtime.jobs.intake import JobFile
from xpress_runtime.jobs.lock import Lock, is_same_file, lock_path
from xpress_runtime.manifest import Manifest

Status = Literal["finished", "timeout", "failed"]

STATUSES: tuple[Status, ...] = ("finished", "timeout", "failed")
# In the order in which a row has them.
ROW_FIELDS = (
    *("id", "job", "bundle", "status", "attempts", "error"),
    *("input_tokens", "output_tokens", "accepted_tokens", "output", "tokens", "finish_reason"),
    *("prefill_ms", "draft_ms", "refine_ms", "verify_ms", "queued_ms", "total_ms", "rounds", "mean_acceptance_length", "seed"),
)
_MAX_ROW_BYTES = 64 * 1024 * 1024
_SYNC_SECONDS = 1.0
# How a row begins, before and behind its id.
_HEAD, _ID, _BEHIND_ID = b'{"id": ', re.compile(rb'-?\d+|"(?:[^"\\]|\\.)*"'), b', "job": "'


@dataclass
class Earlier:
    """What a file of results held: per job its status (0: none, or to be run again), and where what is sound ends."""

    statuses: bytearray
    size: int = 0
    torn: bool = False
    again: set[int] = field(default_factory=set)

    def count(self, status: Status) -> int:
        return self.statuses.count(1 + STATUSES.index(status))


class Results:
    """The open file, this process's alone. ``earlier`` is what earlier runs have left in it, ``bundle`` the identity that rows name."""

    def __init__(self, path: Path, bundle: str, descriptor: int, lock: Lock, earlier: Earlier, *, is_new: bool) -> None:
        self.path = path
        self.bundle = bundle
        self.earlier = earlier
        self._descriptor = descriptor
        self._lock = lock
        self._is_new = is_new
        self._size = os.fstat(descriptor).st_size
        self._synced = time.monotonic()
        self._dirty = False

    @classmethod
    def open(cls, path: Path, jobs: JobFile, bundle: str, *, retry_failed: bool = False, redo_changed: bool = False) -> Self:
        """Open or make the file for these jobs and this bundle (see :func:`bundle_identity`).

        ``retry_failed``: rows of jobs that failed or timed out are taken out, so that they run again; ``redo_changed``: the same for jobs
        that asked for something else when they ran, or ran with another bundle. Raises OptionError where another run has the file or where
        it holds anything but rows of these jobs, OutputError where there can be no such file, and changes nothing then; OSError of the
        disk.
        """
        # Two names of one file are one lock, and replacing it must not replace a link to it.
        path = Path(os.path.realpath(path))
        with _place_errors(path):
            if is_same_file(path, jobs.path):
                raise OptionError(f"{path} is the file of the jobs too; give results another one")
            if not path.parent.is_dir():
                raise OutputError(f"{path.parent} is no folder; make it first")
            if path.exists() and not path.is_file():
                raise OutputError(f"{path} is no regular file, and a run that is resumed must read it; give another one")
            if is_same_file(lock_path(path), jobs.path):
                raise OptionError(f"{jobs.path} is the file of the jobs, and the lock of {path.name} goes there; give results another name")
            lock = Lock(path)
            descriptor = -1
            try:
                earlier = _read_earlier(path, jobs, bundle, retry_failed=retry_failed, redo_changed=redo_changed)
                if earlier.again:
                    _rewrite(path, jobs, earlier)
                descriptor, is_new = _open(path)
                if earlier.torn and not earlier.again:
                    os.ftruncate(descriptor, earlier.size)
                return cls(path, bundle, descriptor, lock, earlier, is_new=is_new)
            except BaseException:
                if descriptor >= 0:
                    os.close(descriptor)
                lock.release()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            self.sync()
        finally:
            os.close(self._descriptor)
            if self._is_new and not self._size:
                # A run that wrote nothing leaves nothing of its own.
                self.path.unlink(missing_ok=True)
            self._lock.release()

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row. Where it does not fit, nothing of it stays, and the OSError names the file."""
        line = memoryview(json.dumps({name: row[name] for name in ROW_FIELDS}).encode("ascii") + b"\n")
        try:
            written = os.write(self._descriptor, line)
            while written < len(line):
                # What stopped it shows now.
                written += os.write(self._descriptor, line[written:])
        except OSError as problem:
            os.ftruncate(self._descriptor, self._size)
            raise OSError(problem.errno, problem.strerror, str(self.path)) from None
        self._size += len(line)
        self._dirty = True
        self.sync(at_least=_SYNC_SECONDS)

    def sync(self, at_least: float = 0.0) -> None:
        """Hand what was written to the disk, if that was last done ``at_least`` seconds ago."""
        if not self._dirty or time.monotonic() - self._synced < at_least:
            return
        try:
            os.fsync(self._descriptor)
        except OSError as problem:
            raise OSError(problem.errno, problem.strerror, str(self.path)) from None
        self._dirty, self._synced = False, time.monotonic()


def bundle_identity(manifest: Manifest) -> str:
    """What tells one bundle from another, as 16 hexadecimal digits: its checkpoints, its settings and the content of its files.

    Not where it lies, where its checkpoints lay, what built it, and what its parity runs found.
    """
    values = {name: value for name, value in manifest.to_json().items() if name not in ("built_with", "parity")}
    for model in ("target", "drafter", "draft_model"):
        if values[model] is not None:
            values[model]["origin"] = values[model]["origin"]["identity"]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode("ascii")).hexdigest()[:16]


@contextmanager
def _place_errors(path: Path) -> Iterator[None]:
    """A place where no file can be is the user's error, a disk that fails is none."""
    try:
        yield
    except OSError as problem:
        if problem.errno in (errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR):
            raise OutputError(f"{path} and its lock cannot be written: {problem.strerror}; give results another place or name") from None
        raise


def _open(path: Path) -> tuple[int, bool]:
    """A descriptor that appends, and whether the file was made for it."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    try:
        return os.open(path, flags | os.O_EXCL, 0o666), True
    except FileExistsError:
        return os.open(path, flags, 0o666), False


def _read_earlier(path: Path, jobs: JobFile, bundle: str, *, retry_failed: bool, redo_changed: bool) -> Earlier:
    earlier = Earlier(bytearray(len(jobs)))
    if not path.exists():
        return earlier
    seen = bytearray(len(jobs))
    changed: list[int] = []
    foreign: list[int] = []
    others: set[str] = set()
    with path.open("rb") as file:
        for number, line in enumerate(_lines(file), 1):
            if not line.endswith(b"\n") and _is_torn(line):
                earlier.torn = True
                break
            row = _row(line, path, number)
            earlier.size += len(line)
            job = jobs.numbers.get(row["id"])
            if job is None:
                raise OptionError(
                    f"{path}, line {number}: id {row['id']!r} is none of {jobs.path}; give the results of other jobs another file"
                )
            if seen[job]:
                raise OptionError(
                    f"{path}, line {number}: id {row['id']!r} has a row before; this is no file of results that can be resumed"
                )
            seen[job] = 1
            if row["status"] != "finished" and retry_failed:
                earlier.again.add(job)
            elif row["job"] != jobs.digest(job):
                changed.append(job)
            elif row["bundle"] != bundle:
                foreign.append(job)
                others.add(row["bundle"])
            else:
                earlier.statuses[job] = 1 + STATUSES.index(row["status"])
    if changed and not redo_changed:
        raise OptionError(
            f"{path}: job {_named(changed, jobs)} asked for something else when it ran; "
            "give --redo-changed to run it again, or another file"
        )
    if foreign and not redo_changed:
        raise OptionError(
            f"{path}: job {_named(foreign, jobs)} ran with another bundle ({', '.join(sorted(others)[:3])}; this one is {bundle}); "
            "give that bundle, --redo-changed to run it again, or another file"
        )
    earlier.again.update(changed, foreign)
    return earlier


def _named(found: list[int], jobs: JobFile) -> str:
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"{jobs.ids[found[0]]!r}{more}"


def _lines(file: BinaryIO) -> Iterator[bytes]:
    # Not endless where this is some other file, without lines.
    while line := file.readline(_MAX_ROW_BYTES):
        yield line


def _row(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
        sound = row["status"] in STATUSES and type(row["id"]) in (str, int) and set(ROW_FIELDS) <= set(row)
        sound = sound and isinstance(row["job"], str) and isinstance(row["bundle"], str)
    except (ValueError, TypeError, LookupError, RecursionError):
        sound = False
    if not sound or not line.endswith(b"\n"):
        raise OptionError(f"{path}, line {number}, is no row of results; give a file that does not exist, or one to resume")
    assert isinstance(row, dict)
    return row


def _is_torn(line: bytes) -> bool:
    """Whether a last line without its end is the beginning of a row, and not some other file's."""
    if not line.startswith(_HEAD):
        return _HEAD.startswith(line)
    rest = line.removeprefix(_HEAD)
    if (found := _ID.match(rest)) is None:
        # Torn inside its id.
        return rest[:1] in (b"", b"-", b'"')
    behind = rest[found.end() :][: len(_BEHIND_ID)]
    return _BEHIND_ID.startswith(behind)


def _rewrite(path: Path, jobs: JobFile, earlier: Earlier) -> None:
    """Take the rows of ``earlier.again`` out; the file is the old one or the new one at any moment."""
    partial = None
    try:
        # A name that nothing has.
        descriptor, name = tempfile.mkstemp(prefix=".xpress-batch-", suffix=".partial", dir=path.parent)
        partial = Path(name)
        with os.fdopen(descriptor, "wb") as new, path.open("rb") as old:
            while old.tell() < earlier.size:
                line = old.readline()
                if jobs.numbers[json.loads(line)["id"]] not in earlier.again:
                    new.write(line)
            new.flush()
            os.fchmod(new.fileno(), stat.S_IMODE(os.fstat(old.fileno()).st_mode))
            os.fsync(new.fileno())
        partial.replace(path)
    except OSError as problem:
        raise OSError(problem.errno, problem.strerror, str(path)) from None
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)
