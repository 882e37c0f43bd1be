"""The batch command with scripted workers, called here or in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.invoke import Result, invoke
from tests.jobs.launch import FAKE, no_bundle
from xpress_export.cli.main import COMMANDS
from xpress_runtime.bundle import Bundle
from xpress_runtime.jobs import process

ROOT = Path(__file__).resolve().parents[2]
PATHS = os.pathsep.join(str(folder) for folder in (ROOT, ROOT / "engines", ROOT / "runtime"))


class Files:
    """A batch's two files and its log in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs, self.results, self.log = (folder / name for name in ("in.jsonl", "out.jsonl", "log.jsonl"))

    def write(self, jobs: Sequence[Mapping[str, Any]] | Mapping[Any, str]) -> None:
        """Jobs, or prompts by their id."""
        lines = [{"id": job, "prompt": prompt} for job, prompt in jobs.items()] if isinstance(jobs, Mapping) else jobs
        self.jobs.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def rows(self) -> list[dict[str, Any]]:
        # A run that wrote nothing leaves no file.
        return [json.loads(line) for line in self.results.read_bytes().splitlines()] if self.results.exists() else []

    def by_id(self) -> dict[Any, dict[str, Any]]:
        rows = self.rows()
        found = {row["id"]: row for row in rows}
        assert len(found) == len(rows), "an id has two rows"
        return found

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for line in self.log.read_text().splitlines() if (event := json.loads(line))["event"] == name]

    def arguments(self, *options: object) -> list[str]:
        return ["batch", *map(str, (self.jobs, self.results, "--bundle", "none", "--log", self.log, *options))]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


Batch = Callable[..., Result]


@pytest.fixture
def batch(files: Files, monkeypatch: pytest.MonkeyPatch) -> Batch:
    """The command in this process; retries come at once unless the options say otherwise."""
    monkeypatch.setattr(process, "WORKER", FAKE)
    monkeypatch.setattr(Bundle, "open", no_bundle)
    monkeypatch.setenv("PYTHONPATH", PATHS)
    monkeypatch.setitem(COMMANDS, "batch", ("batch", "Run a file of jobs."))

    def run(*options: object) -> Result:
        return invoke(*files.arguments("--retry-delay", "10ms", *options))

    return run


def launched(files: Files, *options: object, before: str = "pass", **environment: str) -> subprocess.Popen[str]:
    """The command as a process of its own; ``before``: Python that it runs first."""
    code = f"import runpy, sys; {before}; runpy.run_module('tests.jobs.launch', run_name='__main__', alter_sys=True)"
    return subprocess.Popen(
        [sys.executable, "-c", code, *files.arguments(*options)],
        env={**os.environ, "PYTHONPATH": PATHS, "PYTHONDONTWRITEBYTECODE": "1", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
