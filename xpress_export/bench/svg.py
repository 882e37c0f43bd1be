"""What charts are made of: scales, ticks, lines, texts, marks and legends as SVG elements.

Colours are classes (``s0`` … ``s7`` and names) that the page's style sheet fills in, light and dark. Every text is escaped. Coordinates are
pixels of a drawing ``WIDTH`` or less wide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

WIDTH = 720
NUM_COLOURS = 8
_CHARACTER = 6.6
# At the points of a line: they tell series apart where colours do not.
_MARKS = {
    "square": ((-3.5, -3.5), (3.5, -3.5), (3.5, 3.5), (-3.5, 3.5)),
    "diamond": ((0, -5), (5, 0), (0, 5), (-5, 0)),
    "triangle": ((0, -5), (4.5, 3.5), (-4.5, 3.5)),
}


@dataclass(frozen=True)
class Scale:
    """Maps values to coordinates."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers that cover ``low`` to ``high``, the first at most ``low`` and the last at least ``high``."""
    if not high > low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / most
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return Markup('<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" class="{}"/>').format(x1, y1, x2, y2, kind)


def polyline(points: Sequence[tuple[float, float]], kind: str) -> Markup:
    return Markup('<polyline points="{}" class="{}"/>').format(_coordinates(points), kind)


def circle(x: float, y: float, radius: float, kind: str) -> Markup:
    return Markup('<circle cx="{:.1f}" cy="{:.1f}" r="{}" class="{}"/>').format(x, y, radius, kind)


def box(x: float, y: float, width: float, height: float, kind: str, hint: str = "") -> Markup:
    """A filled rectangle; ``hint`` is what a pointer that rests on it is told."""
    head = Markup('<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" class="{}">').format(
        x, y, max(width, 0), max(height, 0), kind
    )
    return head + Markup("<title>{}</title></rect>").format(hint)


def text(x: float, y: float, content: str, kind: str, anchor: Literal["start", "middle", "end"], room: float | None = None) -> Markup:
    """``room``: pixels after which the text is cut."""
    most = len(content) if room is None else int(room / _CHARACTER)
    shown = content if len(content) <= most else f"{content[: most - 1]}…"
    return Markup('<text x="{:.1f}" y="{:.1f}" class="{}" text-anchor="{}">{}</text>').format(x, y, kind, anchor, shown)


def upright(x: float, y: float, content: str) -> Markup:
    """The name of a y axis."""
    head = Markup('<text transform="translate({:.1f} {:.1f}) rotate(-90)" class="axis" text-anchor="middle">').format(x, y)
    return head + Markup("{}</text>").format(content)


def mark(x: float, y: float, number: int) -> Markup:
    """The mark of series ``number`` at a point."""
    kind = f"fill s{number % NUM_COLOURS}"
    shape = number % (len(_MARKS) + 1)
    if shape == 0:
        return circle(x, y, 4, kind)
    corners = list(_MARKS.values())[shape - 1]
    return Markup('<polygon points="{}" class="{}"/>').format(_coordinates([(x + dx, y + dy) for dx, dy in corners]), kind)


def legend(labels: Sequence[str], width: int, *, filled: bool = False, dashed: Sequence[int] = ()) -> tuple[Markup, float]:
    """A legend of lines with marks, or of ``filled`` boxes, and the y at which the chart below it may begin. ``dashed``: lines without."""
    x, y, parts = 56.0, 12.0, []
    for number, label in enumerate(labels):
        needed = 36 + _CHARACTER * len(label)
        if x > 56 and x + needed > width:
            x, y = 56.0, y + 20
        kind = f"s{number % NUM_COLOURS}"
        if filled:
            parts.append(box(x + 4, y - 6, 14, 12, f"fill {kind}", label))
        elif number in dashed:
            parts.append(line(x, y, x + 22, y, f"line dashed {kind}"))
        else:
            parts += [line(x, y, x + 22, y, f"line {kind}"), mark(x + 11, y, number)]
        parts.append(text(x + 27, y + 4, label, "label", "start"))
        x += needed + 10
    return Markup("").join(parts), y + 20


def drawing(parts: Sequence[Markup], height: float, title: str, width: int = WIDTH) -> Markup:
    """The whole chart; ``title`` is for who cannot see it."""
    head = Markup('<svg viewBox="0 0 {} {:.0f}" role="img" aria-label="{}">').format(width, height, title)
    return head + Markup("").join(parts) + Markup("</svg>")


def _coordinates(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
