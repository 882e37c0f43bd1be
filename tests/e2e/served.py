"""The demo bundle behind the real command, in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SLOTS = 8


@contextmanager
def serving(bundle: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`xpress-export serve` on a free port: its URL and its process, which is ended by SIGTERM if it still runs."""
    program = [sys.executable, "-m", "xpress_export.cli.main", "serve", str(bundle), "--port", "0", "--no-verify", *options]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(program, stdout=subprocess.PIPE, env=environment, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"http://\S+", line)
            assert found is not None, line
            yield found[0].rstrip("/"), process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
