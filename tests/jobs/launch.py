"""The command line with the scripted worker in place of the real one: ``python -m tests.jobs.launch batch …``."""

from __future__ import annotations

import signal
import sys
from types import SimpleNamespace
from typing import Any

from xpress_export.cli.main import COMMANDS, main
from xpress_runtime.bundle import Bundle
from xpress_runtime.jobs import process

FAKE = (sys.executable, "-m", "tests.jobs.fake_worker")


def no_bundle(folder: Any, **_options: Any) -> Any:
    """In place of ``Bundle.open``: a scripted worker needs none. Its name is its identity."""
    model = {"origin": {"identity": str(folder)}}
    return SimpleNamespace(manifest=SimpleNamespace(to_json=lambda: {"target": {**model}, "drafter": {**model}, "draft_model": None}))


if __name__ == "__main__":
    # A shell starts background jobs with Ctrl-C ignored, and a test run may be one.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    COMMANDS.setdefault("batch", ("batch", "Run a file of jobs."))
    process.WORKER = FAKE  # type: ignore[assignment]
    Bundle.open = no_bundle  # type: ignore[method-assign, assignment]
    main()
