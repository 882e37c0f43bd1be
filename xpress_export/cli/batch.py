"""`xpress-export batch`: a file of requests through a bundle, into a file of results that any interruption leaves whole."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from xpress_export.cli.options import combined, json_option, session_options
from xpress_runtime.errors import CheckFailed, OptionError

if TYPE_CHECKING:
    from xpress_runtime.jobs.journal import Summary
    from xpress_runtime.jobs.run import BatchRun

_LINE_SECONDS = 10.0
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_LONGEST_SECONDS = 30 * 24 * 3600.0


class SecondsType(click.ParamType["float"]):
    """A time: a number of seconds, or one with its unit, such as ``500ms``, ``2s`` or ``5m``."""

    name = "seconds"

    def __init__(self, *, positive: bool = False) -> None:
        self._positive = positive

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = str(value).rstrip("mshn")
        unit = str(value)[len(number) :] or "s"
        try:
            seconds = float(number) * _UNITS[unit]
        except (ValueError, KeyError):
            self.fail(f"{value!r} is no time such as 10, 2s or 500ms", param, ctx)
        if not 0 <= seconds <= _LONGEST_SECONDS or (self._positive and not seconds):
            self.fail(f"{value!r} is no time {'over' if self._positive else 'from'} 0 and of at most 30 days", param, ctx)
        return seconds


@click.command("batch")
@click.argument("jobs", metavar="IN.jsonl", type=click.Path(path_type=Path))
@click.argument("results", metavar="OUT.jsonl", type=click.Path(path_type=Path))
@click.option("--bundle", required=True, type=click.Path(path_type=Path), help="The bundle folder that runs the jobs.")
@combined(
    click.option("--slots", type=click.IntRange(1, 1024), help="Jobs that are decoded together. Default: what the bundle is planned for."),
    click.option("--max-in-flight", type=click.IntRange(1, 4096), help="Jobs given to the session at a time. Default: slots × 2."),
    click.option("--timeout", type=SecondsType(positive=True), help="Time of one job, from its start. Default: none; hangs go unnoticed."),
    click.option(
        "--grace", type=SecondsType(), default="10s", show_default=True, help="After --timeout: until a worker that is silent is killed."
    ),
    click.option("--retries", type=click.IntRange(0, 100), default=2, show_default=True, help="Further attempts after crash or hang."),
    click.option(
        "--retry-delay",
        type=SecondsType(),
        default="1s",
        show_default=True,
        help="Before the first of them; doubles each time, with jitter.",
    ),
    click.option("--drain", type=SecondsType(), default="0s", show_default=True, help="After Ctrl-C: time for the jobs that run."),
    click.option("--retry-failed", is_flag=True, help="Run jobs again that failed or timed out in an earlier run."),
    click.option("--redo-changed", is_flag=True, help="Run jobs again that changed in IN.jsonl or ran with another bundle."),
    click.option("--log", type=click.Path(path_type=Path, dir_okay=False), help="Append a JSON object a line for each event to this file."),
)
@session_options
@json_option
def command(
    jobs: Path,
    results: Path,
    bundle: Path,
    slots: int | None,
    max_in_flight: int | None,
    timeout: float | None,
    grace: float,
    retries: int,
    retry_delay: float,
    drain: float,
    retry_failed: bool,
    redo_changed: bool,
    log: Path | None,
    as_json: bool,
    backend: str,
    threads: int | None,
    runtime_cache: Path | None,
    no_verify: bool,
) -> None:
    """Run the jobs of IN.jsonl, one JSON object a line, and append a row to OUT.jsonl as each of them ends.

    The same command again goes on where the last run ended, however that was. Exit codes: 0 every job finished, 1 some failed or timed
    out, 2 the user's input, 3 the disk or the worker, 130 or 143 interrupted.
    """
    from xpress_runtime.bundle import Bundle
    from xpress_runtime.jobs import process
    from xpress_runtime.jobs.intake import InputProblems, JobFile
    from xpress_runtime.jobs.journal import Journal
    from xpress_runtime.jobs.lock import is_same_file, lock_path
    from xpress_runtime.jobs.results import Results, bundle_identity
    from xpress_runtime.jobs.run import BatchOptions, BatchRun

    options = BatchOptions(retries, retry_delay, timeout, grace, drain, max_in_flight)
    settings = process.WorkerSettings(bundle, backend, slots, threads, not no_verify, runtime_cache)
    # Whether it is one shows in a moment; its files are hashed by the worker.
    identity = bundle_identity(Bundle.open(bundle, verify=False).manifest)
    if log is not None and any(is_same_file(log, path) for path in (jobs, results, lock_path(results))):
        raise OptionError(f"--log {log} is the file of the jobs, of their results or of the lock; give another one")
    try:
        opened = JobFile.open(jobs)
    except InputProblems as problems:
        for line in problems.lines:
            click.echo(line, err=True)
        raise
    with (
        opened,
        Results.open(results, opened, identity, retry_failed=retry_failed, redo_changed=redo_changed) as written,
        Journal(log) as journal,
        _bar(len(opened), quiet=as_json) as on_row,
    ):
        run = BatchRun(opened, written, settings, options, journal, command=process.WORKER, on_row=on_row)
        with _interruptions(run):
            summary = run.run()
    click.echo(json.dumps(summary.to_json()) if as_json else summary.line())
    _end(summary, results)


def _end(summary: Summary, results: Path) -> None:
    if summary.stopped_by == signal.SIGINT:
        raise click.Abort
    if summary.stopped_by is not None:
        sys.exit(128 + summary.stopped_by)
    if bad := summary.failed + summary.timeout:
        raise CheckFailed(f"{bad} of {summary.jobs} jobs did not finish, see {results}; --retry-failed runs them again")


@contextmanager
def _interruptions(run: BatchRun) -> Iterator[None]:
    """Signals end the run in order: what is finished is written, and nothing is torn."""
    before = {}
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        signum = getattr(signal, name, None)
        # One that is ignored (nohup) stays so.
        if signum is not None and signal.getsignal(signum) is not signal.SIG_IGN:
            before[signum] = signal.signal(signum, lambda received, _frame: run.interrupt(received))
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextmanager
def _bar(num_jobs: int, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, elsewhere a line now and then: jobs are too many for one each."""
    if quiet:
        yield lambda _done, _jobs: None
    elif sys.stderr.isatty():
        with click.progressbar(length=num_jobs, label="batch", file=sys.stderr, show_pos=True) as bar:
            yield lambda done, _jobs: bar.update(done - bar.pos)
    else:
        last = started = time.monotonic()

        def line(done: int, jobs: int) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last >= _LINE_SECONDS:
                last = now
                click.echo(f"batch: {done} of {jobs} ({now - started:.0f} s)", err=True)

        yield line
