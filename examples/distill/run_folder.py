"""The files of a run: where each stage leaves what it made, written so that a kill leaves the old file or the new one.

Knows paths and how to write; knows nothing of what is in the files but that some hold a JSON object per line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xpress_runtime.errors import OptionError, OutputError, PromptError
from xpress_runtime.fields import Fields

PARTS = ("held_out", "train")


@dataclass(frozen=True)
class RunFolder:
    """Everything of one run lies in ``root``."""

    root: Path

    def prompts(self, part: str) -> Path:
        """``part``: one of ``PARTS``."""
        return self.root / ("held_out.jsonl" if part == "held_out" else "prompts.jsonl")

    def answers(self, part: str) -> Path:
        return self.root / "answers" / part

    def features(self, part: str) -> Path:
        return self.root / "features" / part

    @property
    def training(self) -> Path:
        return self.root / "training"

    @property
    def drafter(self) -> Path:
        """The best drafter, in the serving format."""
        return self.root / "drafter"

    @property
    def draft_model(self) -> Path:
        return self.root / "draft_model"

    @property
    def evaluation(self) -> Path:
        return self.root / "evaluation"

    def make(self, folder: Path) -> Path:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise OutputError(f"{folder} cannot be made: {problem.strerror or problem}") from None
        return folder


def read_rows(path: Path, made_by: str, fields: Mapping[str, type]) -> list[dict[str, Any]]:
    """The objects of a JSONL file that a stage wrote, which have ``fields`` of these types. Raises OptionError, PromptError."""
    if not path.is_file():
        raise OptionError(f"{path} does not exist; run '{made_by}' first")
    rows = []
    for number, row in numbered_rows(path):
        wrong = next((name for name, kind in fields.items() if not isinstance(row.get(name), kind)), None)
        if wrong is not None:
            raise OptionError(f"{path}, line {number}: '{wrong}' is {row.get(wrong)!r:.60}; remove the line and run '{made_by}' again")
        rows.append(row)
    return rows


def numbered_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSONL file and their lines; PromptError names the first line that is none. Empty lines are passed over."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as problem:
        raise PromptError(f"{path} is not UTF-8 at byte {problem.start}") from None
    except OSError as problem:
        raise PromptError(f"{path} cannot be read: {problem.strerror or problem}") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as problem:
            raise PromptError(f"{path}, line {number}: not valid JSON ({problem}): {line.strip()[:60]!r}") from None
        if not isinstance(row, dict):
            raise PromptError(f"{path}, line {number}: a JSON {type(row).__name__}, expected an object")
        yield number, row


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a JSONL file as a whole."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def read_json(path: Path, made_by: str) -> dict[str, Any]:
    """The object in a JSON file that a stage wrote. Raises OptionError."""
    if not path.is_file():
        raise OptionError(f"{path} does not exist; run '{made_by}' first")
    try:
        return dict(Fields.from_file(path, OptionError).values)
    except OptionError as problem:
        raise OptionError(f"{problem}; remove it and run '{made_by}' again") from None


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file as a whole."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file as a whole."""
    with replaced(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


@contextmanager
def replaced(path: Path, advice: str = "", errors: tuple[type[Exception], ...] = ()) -> Iterator[Path]:
    """A place to write a file to, which becomes ``path`` when the block ends: a kill leaves what was there before.

    OutputError, with ``advice``, where the system refuses; ``errors``: what libraries make of that besides OSError.
    """
    # The ending stays, which some libraries go by.
    scratch = path.with_name(f".part-{path.name}")
    refusals: tuple[type[Exception], ...] = (OSError, *errors)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield scratch
        with scratch.open("rb") as stream:
            os.fsync(stream.fileno())
        # Some libraries write for their owner alone.
        scratch.chmod(0o666 & ~_umask())
        scratch.replace(path)
    except refusals as problem:
        scratch.unlink(missing_ok=True)
        reason = getattr(problem, "strerror", None) or problem
        raise OutputError(f"{path} cannot be written: {reason}" + (f"; {advice}" if advice else "")) from None


def _umask() -> int:
    # There is no way to read it but to set it.
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def check_same(path: Path, stated: Mapping[str, Any], stage: str, redo: str) -> None:
    """Compare what a stage's files depend on with the note of it beside them, if there is one. Raises OptionError where it differs.

    ``redo`` says how to begin again. The note is written by :func:`write_json`, once the stage is about to make its first file.
    """
    if not path.is_file():
        return
    before = read_json(path, stage)
    for name, value in json.loads(json.dumps(stated)).items():
        if before.get(name) != value:
            raise OptionError(
                f"{path.parent} was made with {name} = {before.get(name)!r:.60}, now it is {value!r:.60}; {redo}, or use another run folder"
            )
