"""Calls the command line inside the test's process: arguments in, exit code and both streams out."""

from __future__ import annotations

import contextlib
import io
import logging
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from xpress_export.cli.main import main

_LOGGERS = ("xpress_export", "xpress_engines", "xpress_runtime")


@dataclass(frozen=True)
class Result:
    """What a command left on its streams."""

    exit_code: int
    out: str
    err: str

    def assert_done(self) -> Result:
        assert self.exit_code == 0, self.err
        return self

    def assert_refused(self, exit_code: int, *named: str) -> None:
        """One line that says what is wrong, and nothing else."""
        assert self.exit_code == exit_code, self.err
        assert self.out == ""
        assert self.err.startswith("xpress-export: ")
        assert self.err.count("\n") == 1
        assert self.err.endswith("\n")
        for name in named:
            assert name in self.err


def invoke(*arguments: object, stdin: bytes = b"") -> Result:
    """Run ``xpress-export`` with these arguments; ``stdin`` is piped in. A defect keeps its traceback."""
    out, err = io.StringIO(), io.StringIO()
    before = sys.argv, sys.stdin
    sys.argv = ["xpress-export", *map(str, arguments)]
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
    try:
        with _process_state(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as end:
        assert isinstance(end.code, int)
        return Result(end.code, out.getvalue(), err.getvalue())
    finally:
        sys.argv, sys.stdin = before


def listing(folder: Path) -> dict[str, int]:
    """Everything below a folder and how large it is."""
    return {path.relative_to(folder).as_posix(): path.lstat().st_size for path in folder.rglob("*")}


@contextlib.contextmanager
def _process_state() -> Iterator[None]:
    """The program owns its process: it sets signal handlers and logging. The test's process gets its own back."""
    signals = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGHUP)}
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    root_level = root.level
    try:
        yield
    finally:
        for signum, handler in signals.items():
            signal.signal(signum, handler)
        root.handlers = handlers
        root.setLevel(root_level)
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
