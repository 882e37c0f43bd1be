"""The file of results: whole rows, one writer, and nothing touched that is not its own."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.conftest import Batch, Files
from xpress_runtime.errors import OptionError, OutputError
from xpress_runtime.jobs.intake import JobFile
from xpress_runtime.jobs.results import ROW_FIELDS, Results

BUNDLE = "b" * 16


@pytest.fixture
def jobs(files: Files) -> Iterator[JobFile]:
    files.write({1: "steps 1", "zwei \"'": "steps 2", 3: "steps 3"})
    with JobFile.open(files.jobs) as opened:
        yield opened


def row(jobs: JobFile, number: int, status: str = "finished", **changed: Any) -> dict[str, Any]:
    told = {"id": jobs.ids[number], "job": jobs.digest(number), "bundle": BUNDLE, "status": status, "attempts": 1}
    return {**dict.fromkeys(ROW_FIELDS), **told, "output": "ä\n", **changed}


def written(files: Files, *rows: dict[str, Any]) -> bytes:
    content = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    files.results.write_bytes(content)
    return content


def test_rows_are_found_again(files: Files, jobs: JobFile) -> None:
    with Results.open(files.results, jobs, BUNDLE) as results:
        assert bytes(results.earlier.statuses) == bytes(3)
        results.append(row(jobs, 1))
        results.append(row(jobs, 0, "timeout"))
    with Results.open(files.results, jobs, BUNDLE) as results:
        assert bytes(results.earlier.statuses) == bytes([2, 1, 0])
    assert [found["id"] for found in files.rows()] == ["zwei \"'", 1]


def test_row_cut_off_anywhere_runs_again(files: Files, jobs: JobFile) -> None:
    whole = written(files, row(jobs, 0))
    last = json.dumps(row(jobs, 1)).encode()
    for cut in range(1, len(last) + 1):
        files.results.write_bytes(whole + last[:cut])
        with Results.open(files.results, jobs, BUNDLE) as results:
            assert bytes(results.earlier.statuses) == bytes([1, 0, 0])
        assert files.results.read_bytes() == whole, cut


@pytest.mark.parametrize(
    "content",
    [
        b"hello",
        b'{"id": 1, "prompt": "a',
        b'{"id": 1, "prompt": "a"}',
        b'{"id": 1}\n',
        b"[1]\n",
        b"\x00\x01\n",
        b"\n",
        b'{"custom_id": "a"',
    ],
)
def test_file_of_something_else_is_refused_and_not_touched(files: Files, jobs: JobFile, content: bytes) -> None:
    files.results.write_bytes(content)
    with pytest.raises(OptionError, match=r"out\.jsonl, line 1, is no row of results"):
        Results.open(files.results, jobs, BUNDLE)
    assert files.results.read_bytes() == content
    assert sorted(path.name for path in files.folder.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_unknown_id_and_second_row_are_refused(files: Files, jobs: JobFile) -> None:
    content = written(files, row(jobs, 0), row(jobs, 1, id=99))
    with pytest.raises(OptionError, match="line 2: id 99 is none of"):
        Results.open(files.results, jobs, BUNDLE, retry_failed=True, redo_changed=True)
    assert files.results.read_bytes() == content
    content = written(files, row(jobs, 0), row(jobs, 0))
    with pytest.raises(OptionError, match="line 2: id 1 has a row before"):
        Results.open(files.results, jobs, BUNDLE)
    assert files.results.read_bytes() == content


def test_changed_job_is_named_until_it_may_run_again(files: Files, jobs: JobFile) -> None:
    content = written(files, row(jobs, 0, job="0" * 16), row(jobs, 1))
    with pytest.raises(OptionError, match=r"job 1 asked for something else when it ran; give --redo-changed"):
        Results.open(files.results, jobs, BUNDLE)
    assert files.results.read_bytes() == content
    with Results.open(files.results, jobs, BUNDLE, redo_changed=True) as results:
        assert bytes(results.earlier.statuses) == bytes([0, 1, 0])
    assert [found["id"] for found in files.rows()] == [jobs.ids[1]]


def test_rows_of_another_bundle_are_named_until_they_may_run_again(files: Files, jobs: JobFile) -> None:
    content = written(files, row(jobs, 0, bundle="a" * 16), row(jobs, 1), row(jobs, 2, "failed", bundle="c" * 16))
    named = r"job 1 and 1 more ran with another bundle \(a{16}, c{16}; this one is b{16}\); .*--redo-changed"
    with pytest.raises(OptionError, match=named):
        Results.open(files.results, jobs, BUNDLE)
    assert files.results.read_bytes() == content
    with Results.open(files.results, jobs, BUNDLE, redo_changed=True) as results:
        assert bytes(results.earlier.statuses) == bytes([0, 1, 0])
    assert [found["id"] for found in files.rows()] == [jobs.ids[1]]


def test_failed_rows_are_taken_out_only_when_asked(files: Files, jobs: JobFile) -> None:
    content = written(files, row(jobs, 0, "failed"), row(jobs, 1), row(jobs, 2, "timeout"))
    files.results.chmod(0o640)
    with Results.open(files.results, jobs, BUNDLE) as results:
        assert bytes(results.earlier.statuses) == bytes([3, 1, 2])
    assert files.results.read_bytes() == content
    files.results.write_bytes(content + b'{"id": 3, "job')
    with Results.open(files.results, jobs, BUNDLE, retry_failed=True) as results:
        assert bytes(results.earlier.statuses) == bytes([0, 1, 0])
        results.append(row(jobs, 2))
    assert [found["id"] for found in files.rows()] == [jobs.ids[1], 3]
    assert files.results.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in files.folder.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_one_run_at_a_time_by_whatever_name(files: Files, jobs: JobFile) -> None:
    link = files.folder / "link.jsonl"
    with Results.open(files.results, jobs, BUNDLE):
        link.symlink_to(files.results)
        for path in (files.results, link):
            with pytest.raises(OptionError, match="is being written by another run"):
                Results.open(path, jobs, BUNDLE)
    with Results.open(link, jobs, BUNDLE) as results:
        results.append(row(jobs, 0))
    assert len(files.rows()) == 1
    assert link.is_symlink()


def test_row_that_does_not_fit_leaves_nothing_of_itself(files: Files, jobs: JobFile, monkeypatch: pytest.MonkeyPatch) -> None:
    with Results.open(files.results, jobs, BUNDLE) as results:
        results.append(row(jobs, 0))
        before = files.results.read_bytes()
        monkeypatch.setattr(os, "write", _filling(os.write))
        with pytest.raises(OSError, match=r"No space left.*out\.jsonl"):
            results.append(row(jobs, 1))
        monkeypatch.undo()
        assert files.results.read_bytes() == before


def _filling(write: Callable[[int, memoryview], int]) -> Callable[[int, memoryview], int]:
    """Half of a row, and then no more, as a disk that fills does."""
    written: list[int] = []

    def half(descriptor: int, line: memoryview) -> int:
        if written:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(write(descriptor, line[: len(line) // 2]))
        return written[0]

    return half


@pytest.mark.parametrize("kind", ["file", "folder", "link", "pipe"])
def test_what_has_the_name_of_the_lock_is_refused_and_stays(files: Files, jobs: JobFile, kind: str) -> None:
    lock = files.folder / "out.jsonl.lock"
    make = {"folder": lock.mkdir, "link": lambda: lock.symlink_to(files.folder / "nothing"), "pipe": lambda: os.mkfifo(lock)}
    make.get(kind, lambda: lock.write_text("mine"))()
    before = lock.lstat()
    with pytest.raises(OutputError, match=r"out\.jsonl\.lock is .*the lock of out\.jsonl goes there; move it away"):
        Results.open(files.results, jobs, BUNDLE)
    assert sorted(path.name for path in files.folder.iterdir()) == ["in.jsonl", "out.jsonl.lock"]
    assert (lock.lstat().st_ino, lock.lstat().st_size, lock.lstat().st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)


def test_lock_that_a_killed_run_left_is_taken(files: Files, jobs: JobFile) -> None:
    lock = files.folder / "out.jsonl.lock"
    lock.touch()
    with Results.open(files.results, jobs, BUNDLE) as results:
        results.append(row(jobs, 0))
    assert not lock.exists()
    with Results.open(files.results, jobs, BUNDLE):
        lock.write_text("somebody's, by now")
    assert lock.read_text() == "somebody's, by now"


@pytest.mark.parametrize("link", [None, os.link, os.symlink])
def test_file_of_jobs_in_the_place_of_the_lock_is_refused(files: Files, link: Callable[[Path, Path], None] | None) -> None:
    lock = files.folder / "out.jsonl.lock"
    if link is None:
        files.jobs = lock
    files.write({1: "steps 1"})
    if link is not None:
        link(files.jobs, lock)
    content = lock.read_bytes()
    with JobFile.open(files.jobs) as jobs, pytest.raises(OptionError, match="the file of the jobs, and the lock of"):
        Results.open(files.results, jobs, BUNDLE)
    assert lock.read_bytes() == content
    assert not files.results.exists()


def test_log_in_the_place_of_the_lock_is_refused(files: Files, batch: Batch) -> None:
    files.write({1: "steps 1"})
    lock = files.folder / "out.jsonl.lock"
    batch("--log", lock).assert_refused(2, "--log", "the lock")
    lock.touch()
    os.link(lock, files.log)
    batch().assert_refused(2, "--log", "the lock")
    assert sorted(path.name for path in files.folder.iterdir()) == ["in.jsonl", "log.jsonl", "out.jsonl.lock"]


def test_empty_file_that_was_there_stays(files: Files, jobs: JobFile) -> None:
    with Results.open(files.results, jobs, BUNDLE):
        assert files.results.exists()
    assert not files.results.exists()
    files.results.touch()
    with Results.open(files.results, jobs, BUNDLE):
        pass
    assert files.results.read_bytes() == b""


def test_taking_rows_out_leaves_files_of_others_alone(files: Files, jobs: JobFile) -> None:
    written(files, row(jobs, 0, "failed"))
    other = files.folder / "out.jsonl.partial"
    other.write_text("mine")
    Results.open(files.results, jobs, BUNDLE, retry_failed=True).__exit__(None, None, None)
    assert sorted(path.name for path in files.folder.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.partial"]
    assert other.read_text() == "mine"


@pytest.mark.parametrize("name", ["x" * 253, "x" * 300, "loop/out"])
def test_name_that_cannot_be_is_one_line(files: Files, batch: Batch, name: str) -> None:
    files.write({1: "steps 1"})
    (files.folder / "loop").symlink_to("loop")
    files.results = files.folder / name
    batch().assert_refused(2, "give" if name.startswith("x") else "make it first")
    assert sorted(path.name for path in files.folder.iterdir()) == ["in.jsonl", "loop"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc")
def test_file_system_without_new_files_is_one_line(files: Files, batch: Batch) -> None:
    files.write({1: "steps 1"})
    files.results = Path("/proc/out")
    batch().assert_refused(2, "/proc/out and its lock cannot be written")


@pytest.mark.parametrize("place", ["in.jsonl", "missing/out.jsonl", "folder"])
def test_place_that_cannot_hold_results_is_refused(files: Files, jobs: JobFile, place: str) -> None:
    (files.folder / "folder").mkdir()
    with pytest.raises((OptionError, OutputError)):
        Results.open(files.folder / place, jobs, BUNDLE)


def test_device_is_no_file_of_results(files: Files, batch: Batch) -> None:
    files.write({1: "steps 1"})
    files.results = Path(os.devnull).with_name("full")
    batch().assert_refused(2, "no regular file")
