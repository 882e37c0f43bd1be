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


@pytest.fixture
def jobs(files: Files) -> Iterator[JobFile]:
    files.write({1: "steps 1", "zwei \"'": "steps 2", 3: "steps 3"})
    with JobFile.open(files.jobs) as opened:
        yield opened


def row(jobs: JobFile, number: int, status: str = "finished", **changed: Any) -> dict[str, Any]:
    told = {"id": jobs.ids[number], "job": jobs.digest(number), "status": status, "attempts": 1}
    return {**dict.fromkeys(ROW_FIELDS), **told, "output": "ä\n", **changed}


def written(files: Files, *rows: dict[str, Any]) -> bytes:
    content = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    files.results.write_bytes(content)
    return content


def test_rows_are_found_again(files: Files, jobs: JobFile) -> None:
    with Results.open(files.results, jobs) as results:
        assert bytes(results.earlier.statuses) == bytes(3)
        results.append(row(jobs, 1))
        results.append(row(jobs, 0, "timeout"))
    with Results.open(files.results, jobs) as results:
        assert bytes(results.earlier.statuses) == bytes([2, 1, 0])
    assert [found["id"] for found in files.rows()] == ["zwei \"'", 1]


def test_row_cut_off_anywhere_runs_again(files: Files, jobs: JobFile) -> None:
    whole = written(files, row(jobs, 0))
    last = json.dumps(row(jobs, 1)).encode()
    for cut in range(1, len(last) + 1):
        files.results.write_bytes(whole + last[:cut])
        with Results.open(files.results, jobs) as results:
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
        Results.open(files.results, jobs)
    assert files.results.read_bytes() == content
    assert sorted(path.name for path in files.folder.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_unknown_id_and_second_row_are_refused(files: Files, jobs: JobFile) -> None:
    content = written(files, row(jobs, 0), row(jobs, 1, id=99))
    with pytest.raises(OptionError, match="line 2: id 99 is none of"):
        Results.open(files.results, jobs, retry_failed=True, redo_changed=True)
    assert files.results.read_bytes() == content
    content = written(files, row(jobs, 0), row(jobs, 0))
    with pytest.raises(OptionError, match="line 2: id 1 has a row before"):
        Results.open(files.results, jobs)
    assert files.results.read_bytes() == content


def test_changed_job_is_named_until_it_may_run_again(files: Files, jobs: JobFile) -> None:
    content = written(files, row(jobs, 0, job="0" * 16), row(jobs, 1))
    with pytest.raises(OptionError, match=r"job 1 asked for something else when it ran; give --redo-changed"):
        Results.open(files.results, jobs)
    assert files.results.read_bytes() == content
    with Results.open(files.results, jobs, redo_changed=True) as results:
        assert bytes(results.earlier.statuses) == bytes([0, 1, 0])
    assert [found["id"] for found in files.rows()] == [jobs.ids[1]]


def test_failed_rows_are_taken_out_only_when_asked(files: Files, jobs: JobFile) -> None:
    content = written(files, row(jobs, 0, "failed"), row(jobs, 1), row(jobs, 2, "timeout"))
    files.results.chmod(0o640)
    with Results.open(files.results, jobs) as results:
        assert bytes(results.earlier.statuses) == bytes([3, 1, 2])
    assert files.results.read_bytes() == content
    files.results.write_bytes(content + b'{"id": 3, "job')
    with Results.open(files.results, jobs, retry_failed=True) as results:
        assert bytes(results.earlier.statuses) == bytes([0, 1, 0])
        results.append(row(jobs, 2))
    assert [found["id"] for found in files.rows()] == [jobs.ids[1], 3]
    assert files.results.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in files.folder.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_one_run_at_a_time_by_whatever_name(files: Files, jobs: JobFile) -> None:
    link = files.folder / "link.jsonl"
    with Results.open(files.results, jobs):
        link.symlink_to(files.results)
        for path in (files.results, link):
            with pytest.raises(OptionError, match="is being written by another run"):
                Results.open(path, jobs)
    with Results.open(link, jobs) as results:
        results.append(row(jobs, 0))
    assert len(files.rows()) == 1
    assert link.is_symlink()


def test_row_that_does_not_fit_leaves_nothing_of_itself(files: Files, jobs: JobFile, monkeypatch: pytest.MonkeyPatch) -> None:
    with Results.open(files.results, jobs) as results:
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


@pytest.mark.parametrize("place", ["in.jsonl", "missing/out.jsonl", "folder"])
def test_place_that_cannot_hold_results_is_refused(files: Files, jobs: JobFile, place: str) -> None:
    (files.folder / "folder").mkdir()
    with pytest.raises((OptionError, OutputError)):
        Results.open(files.folder / place, jobs)


def test_device_is_no_file_of_results(files: Files, batch: Batch) -> None:
    files.write({1: "steps 1"})
    files.results = Path(os.devnull).with_name("full")
    batch().assert_refused(2, "no regular file")
