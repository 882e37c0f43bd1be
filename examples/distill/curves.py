"""Curves of a training run as a picture, from the CSV files beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from examples.distill.run_folder import replaced
from examples.distill.saved import read_curve


def draw_curves(folder: Path, losses: Sequence[str], figures: Sequence[str]) -> None:
    """Write ``curves.png``: losses at the left, held-out figures at the right, over steps."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(10, 4), layout="constrained")
    left, right = picture.subplots(1, 2)
    for axes, name, columns in ((left, "curve.csv", losses), (right, "evaluations.csv", figures)):
        rows = read_curve(folder / name)
        for column in columns:
            axes.plot([row["step"] for row in rows], [row[column] for row in rows], label=column, marker="." if len(rows) < 50 else "")
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    left.set_title("training loss")
    right.set_title("held out")
    with replaced(folder / "curves.png") as scratch:
        picture.savefig(scratch, dpi=120)
