"""What a training run keeps on disk: its state, to be taken up again after a kill, and its curves as CSV.

Knows nothing of models: a state is tensors, numbers and what an optimiser says of itself.
"""

from __future__ import annotations

import csv
import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from examples.distill.run_folder import replaced, write_text
from xpress_runtime.errors import OptionError


@dataclass
class Progress:
    """Where a run stands. ``step`` updates are made, the losses of ``counted`` steps are in the curve or in ``sums``.

    ``evaluations`` is how many checkpoints were evaluated, ``evaluated`` the step of the last (-1: none), ``best`` what the best one
    reached at ``best_step``. ``seconds`` of training, evaluations included.
    """

    step: int = 0
    counted: int = 0
    seconds: float = 0.0
    evaluations: int = 0
    evaluated: int = -1
    best: float = -1.0
    best_step: int = -1
    sums: dict[str, float] = field(default_factory=dict)
    num_summed: int = 0


def save_state(path: Path, progress: Progress, model: Mapping[str, Any], optimizer: Mapping[str, Any]) -> None:
    """Write all of a run's state at once: a kill leaves the state before."""
    with replaced(path, "the checkpoint before it is kept, make room and go on", (RuntimeError,)) as scratch:
        torch.save({"progress": asdict(progress), "model": dict(model), "optimizer": dict(optimizer)}, scratch)


def load_state(path: Path) -> tuple[Progress, dict[str, Any], dict[str, Any]] | None:
    """What :func:`save_state` wrote, None where there is nothing. Raises OptionError where it is damaged."""
    if not path.is_file():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        return Progress(**state["progress"]), state["model"], state["optimizer"]
    except (OSError, RuntimeError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as problem:
        reason = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        raise OptionError(f"{path} is no checkpoint of this recipe ({reason:.120}); remove its folder to begin again") from None


class CurveFile:
    """A CSV file whose first column is a step. What lies behind the step that a run goes on from is dropped and made again."""

    def __init__(self, path: Path, columns: Sequence[str], keep_until: int) -> None:
        self._path = path
        self._columns = list(columns)
        self.rows = [row for row in read_curve(path) if row["step"] <= keep_until]
        self._write()

    def add(self, row: Mapping[str, float]) -> None:
        self.rows.append(dict(row))
        self._write()

    def _write(self) -> None:
        # As a whole: some thousand short lines, every few seconds.
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        writer.writerows({name: _short(value) for name, value in row.items()} for row in self.rows)
        write_text(self._path, text.getvalue())


def read_curve(path: Path) -> list[dict[str, float]]:
    """The rows of a curve, none where there is no file."""
    if not path.is_file():
        return []
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(stream)]
    except (OSError, ValueError, TypeError, csv.Error) as problem:
        raise OptionError(f"{path} is no curve of this recipe ({problem}); remove it, the run goes on without its past") from None


def _short(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:.6g}"
