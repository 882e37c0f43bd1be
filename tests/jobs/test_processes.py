"""What only a process of its own can show: kill -9 at any moment, a full disk, a second run, signals, workers that outlive nobody."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.jobs.conftest import Files, launched

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and limits of POSIX")


def _wait_for(seconds: float, condition: object) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_killed_at_random_moments_and_resumed_it_is_complete_without_duplicates(files: Files) -> None:
    generator = random.Random(5)
    files.write({job: f"steps {generator.randint(1, 12)}" for job in range(200)})
    seen = 0
    for _ in range(5):
        process = launched(files, "--slots", 4)
        _wait_for(20, lambda: files.results.exists() and len(files.results.read_bytes().splitlines()) > seen)  # noqa: B023
        time.sleep(generator.uniform(0, 0.08))
        process.kill()
        process.communicate()
        whole = files.results.read_bytes()
        seen = whole.count(b"\n")
        # Cut as a machine that goes down cuts it, too.
        files.results.write_bytes(whole[: len(whole) - generator.randint(0, 30)])
        seen = files.results.read_bytes().count(b"\n")
    assert 0 < seen < 200
    out, err = launched(files, "--slots", 4).communicate(timeout=60)
    assert err == ""
    assert out.startswith(f"200 jobs: 200 finished, 0 timed out, 0 failed; resumed {seen}")
    assert set(files.by_id()) == set(range(200))
    assert not [event for event in files.events("worker started") if _alive(event["pid"])]


def test_second_run_is_refused_and_a_signal_ends_the_first_in_order(files: Files) -> None:
    files.write({1: "endless"})
    first = launched(files)
    _wait_for(20, lambda: files.log.exists() and files.events("started"))
    out, err = launched(files).communicate(timeout=20)
    assert (out, err) == ("", f"xpress-export: {files.results} is being written by another run; wait for it, or give another file\n")
    first.send_signal(signal.SIGTERM)
    out, err = first.communicate(timeout=20)
    assert (first.returncode, err) == (143, "")
    assert out.startswith("1 jobs: 0 finished, 0 timed out, 0 failed, 1 left")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a native call that hangs keeps its process")
def test_frozen_worker_ends_with_its_supervisor(files: Files) -> None:
    files.write({1: "freeze"})
    process = launched(files)
    _wait_for(20, lambda: files.log.exists() and files.events("worker ready"))
    time.sleep(0.1)
    (worker,) = (event["pid"] for event in files.events("worker started"))
    assert _alive(worker)
    process.kill()
    process.communicate()
    _wait_for(5, lambda: not _alive(worker))


def test_full_disk_is_one_line_and_the_run_can_be_resumed(files: Files) -> None:
    files.write(dict.fromkeys(range(40), "steps 2"))
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))"
    # The log would fill up first.
    process = launched(files, "--log", os.devnull, before=limit)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (3, "", f"xpress-export: File too large: {files.results}\n")
    content = files.results.read_bytes()
    assert content.endswith(b"\n")
    assert 0 < content.count(b"\n") < 40
    assert launched(files).wait(20) == 0
    assert len(files.by_id()) == 40
