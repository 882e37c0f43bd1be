"""The supervisor with a scripted worker: what is retried, what is final, and that no job pays for another one."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from typing import Any

import pytest

from tests.jobs.conftest import Batch, Files
from xpress_export.cli.batch import SecondsType
from xpress_runtime.jobs import run
from xpress_runtime.jobs.journal import Journal
from xpress_runtime.jobs.results import ROW_FIELDS


def test_rows_come_in_the_order_of_finishing(files: Files, batch: Batch) -> None:
    files.write({"long": "steps 60", "short": "noise", "second": "steps 2"})
    result = batch("--json").assert_done()
    rows = files.rows()
    assert [row["id"] for row in rows] == ["short", "second", "long"]
    assert list(rows[0]) == list(ROW_FIELDS)
    long = rows[2]
    assert (long["output_tokens"], long["rounds"], long["accepted_tokens"], long["mean_acceptance_length"]) == (119, 59, 59, 2.0)
    assert (long["status"], long["attempts"], long["error"], long["seed"], long["finish_reason"]) == ("finished", 1, None, 7, "length")
    summary = json.loads(result.out)
    assert (summary["jobs"], summary["finished"], summary["left"], summary["output_tokens"], summary["retries"]) == (3, 3, 0, 123, 0)
    assert summary["mean_acceptance_length"] == 2.0
    assert not files.results.with_name("out.jsonl.lock").exists()


def test_nothing_is_left_to_do_the_second_time(files: Files, batch: Batch) -> None:
    files.write({1: "steps 1"})
    batch().assert_done()
    before = files.results.read_bytes()
    result = batch().assert_done()
    assert result.out.startswith("1 jobs: 1 finished, 0 timed out, 0 failed; resumed 1, retries 0, 0 tokens")
    assert files.results.read_bytes() == before
    assert len(files.events("worker started")) == 1


def test_users_errors_are_final_and_the_others_go_on(files: Files, batch: Batch) -> None:
    files.write({1: "refuse", 2: "steps 1", 3: "fault", 4: "internal"})
    result = batch("--retries", "1")
    assert result.exit_code == 1
    assert result.err == f"xpress-export: 3 of 4 jobs did not finish, see {files.results}; --retry-failed runs them again\n"
    found = {job: (row["status"], row["attempts"], row["error"]) for job, row in files.by_id().items()}
    assert found == {
        1: ("failed", 1, "the prompt has 99 tokens and the capacity is 9"),
        2: ("finished", 1, None),
        3: ("failed", 2, "KeyError: 'a defect'"),
        4: ("failed", 2, "the device is lost"),
    }
    assert [event["id"] for event in files.events("retried")] == [3, 4]


def test_crash_is_retried(files: Files, batch: Batch) -> None:
    files.write({1: f"once {files.folder / 'crashed'} crash", 2: "steps 30"})
    batch().assert_done()
    assert {row["attempts"] for row in files.rows()} == {2}
    assert "killed (SIGKILL)" in files.events("worker restarted")[0]["reason"]


def test_job_that_always_crashes_takes_no_other_along(files: Files, batch: Batch) -> None:
    files.write({1: "crash", **dict.fromkeys(range(2, 12), "steps 3")})
    assert batch("--max-in-flight", "6").exit_code == 1
    rows = files.by_id()
    assert (rows[1]["status"], rows[1]["attempts"]) == ("failed", 3)
    assert {rows[job]["status"] for job in range(2, 12)} == {"finished"}


def test_session_that_dies_is_opened_again(files: Files, batch: Batch) -> None:
    files.write({1: f"once {files.folder / 'died'} die", 2: "steps 2"})
    batch().assert_done()
    assert files.by_id()[1]["attempts"] == 2
    assert files.events("worker ended")[0]["last_line"] == "the session failed: out of memory in a round"


@pytest.mark.parametrize("kind", ["hang", "freeze"])
def test_hang_is_killed_and_the_others_do_not_count_it(files: Files, batch: Batch, kind: str) -> None:
    files.write({1: kind, **dict.fromkeys(range(2, 8), "steps 2")})
    assert batch("--slots", "1", "--retries", "1", "--timeout", "200ms", "--grace", "200ms").exit_code == 1
    rows = files.by_id()
    assert (rows[1]["status"], rows[1]["attempts"]) == ("timeout", 2)
    assert rows[1]["error"] == "the worker did not answer within 0.4 s and was killed"
    assert {rows[job]["status"] for job in range(2, 8)} == {"finished"}
    if kind == "hang":
        assert {rows[job]["attempts"] for job in range(2, 8)} == {1}


def test_soft_time_out_is_final_and_keeps_what_there_is(files: Files, batch: Batch) -> None:
    # The one in the queue gets all of its time.
    files.write({1: "endless", 2: "steps 50"})
    assert batch("--slots", "1", "--timeout", "150ms").exit_code == 1
    rows = files.by_id()
    assert (rows[1]["status"], rows[1]["attempts"], rows[1]["error"]) == ("timeout", 1, "it did not end within 0.15 s of its start")
    assert len(rows[1]["tokens"]) == rows[1]["output_tokens"] > 20
    assert rows[2]["status"] == "finished"
    assert len(files.events("worker started")) == 1


def test_failed_jobs_run_again_when_asked(files: Files, batch: Batch) -> None:
    place = files.folder / "second"
    files.write({1: f"once {place} refuse", 2: "steps 1"})
    assert batch().exit_code == 1
    assert batch().exit_code == 1
    result = batch("--retry-failed", "--json").assert_done()
    assert (json.loads(result.out)["resumed"], files.by_id()[1]["status"]) == (1, "finished")


def test_changed_job_is_refused_by_name(files: Files, batch: Batch) -> None:
    files.write({1: "steps 1", 2: "steps 2"})
    batch().assert_done()
    files.write({1: "steps 3", 2: "steps 2"})
    batch().assert_refused(2, "job 1 asked for something else", "--redo-changed")
    batch("--redo-changed").assert_done()
    assert [row["id"] for row in files.rows()] == [2, 1]


def test_another_bundle_is_refused_by_name(files: Files, batch: Batch) -> None:
    files.write({1: "steps 1", 2: "steps 2"})
    batch().assert_done()
    (first,) = {row["bundle"] for row in files.rows()}
    content = files.results.read_bytes()
    batch("--bundle", "other").assert_refused(2, f"job 1 and 1 more ran with another bundle ({first}; this one is", "--redo-changed")
    assert files.results.read_bytes() == content
    batch("--bundle", "other", "--redo-changed").assert_done()
    (second,) = {row["bundle"] for row in files.by_id().values()}
    assert second != first
    assert len(files.rows()) == 2


def test_worker_that_dies_at_its_start_ends_the_run(files: Files, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_START", "die")
    files.write({1: "steps 1"})
    batch().assert_refused(3, "3 times in a row while it started", "RuntimeError: no such device")
    assert not files.results.exists()
    monkeypatch.delenv("FAKE_START")
    batch().assert_done()


def test_session_that_is_refused_ends_the_run_at_once(files: Files, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_START", "refuse")
    files.write({1: "steps 1"})
    batch().assert_refused(2, "bundle is damaged")
    assert len(files.events("worker started")) == 1


def test_workers_that_never_finish_a_job_end_the_run(files: Files, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MAX_FRUITLESS", 3)
    files.write({1: "crash", 2: "crash", 3: "crash"})
    batch().assert_refused(3, "3 workers in a row ended before any job did", "SIGKILL")


@pytest.mark.parametrize(("drain", "finished"), [("0", []), ("5s", [1])])
def test_interruption_leaves_the_rest_to_the_next_run(files: Files, batch: Batch, drain: str, finished: list[int]) -> None:
    files.write({1: "steps 200", 2: "steps 200", 3: "steps 1"})
    threading.Thread(target=_once_started, args=(files, lambda: os.kill(os.getpid(), signal.SIGINT))).start()
    result = batch("--slots", "1", "--max-in-flight", "1", "--drain", drain)
    assert (result.exit_code, result.err) == (130, "xpress-export: interrupted\n")
    assert result.out.startswith(f"3 jobs: {len(finished)} finished, 0 timed out, 0 failed, {3 - len(finished)} left")
    assert [row["id"] for row in files.rows()] == finished
    batch().assert_done()
    assert set(files.by_id()) == {1, 2, 3}


def _once_started(files: Files, act: Any) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not (files.log.exists() and files.events("started")):
        time.sleep(0.01)
    act()


def test_log_that_is_another_file_of_the_batch_is_refused(files: Files, batch: Batch) -> None:
    files.write({1: "steps 1"})
    batch("--log", files.jobs).assert_refused(2, "--log")
    link = files.folder / "link"
    os.link(files.jobs, link)
    batch("--log", link).assert_refused(2, "--log")
    files.results.touch()
    link.unlink()
    os.link(files.results, link)
    batch("--log", link).assert_refused(2, "--log")
    assert (len(files.jobs.read_bytes().splitlines()), files.results.read_bytes()) == (1, b"")
    batch("--log", files.folder / "missing" / "log").assert_refused(2, "--log", "cannot be written")


def test_log_tells_of_every_job(files: Files) -> None:
    with Journal(files.log) as journal:
        journal.write("finished", id="ä")
    (event,) = files.events("finished")
    assert event["id"] == "ä"
    assert abs(event["time"] - time.time()) < 60


@pytest.mark.parametrize(("given", "seconds"), [("10", 10), ("1.5s", 1.5), ("500ms", 0.5), ("2m", 120), ("1h", 3600)])
def test_times_have_units(given: str, seconds: float) -> None:
    assert SecondsType().convert(given, None, None) == seconds


@pytest.mark.parametrize("given", ["x", "-1", "nan", "inf", "5d", "", "1e9"])
def test_no_time_is_refused(files: Files, batch: Batch, given: str) -> None:
    files.write({1: "steps 1"})
    batch("--timeout", given).assert_refused(2, "--timeout")


def test_time_out_of_nothing_is_refused(batch: Batch) -> None:
    batch("--timeout", "0").assert_refused(2, "--timeout", "over 0")
