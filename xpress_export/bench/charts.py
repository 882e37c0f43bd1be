"""Charts as inline SVG: intervals, lines, groups of bars and stacked bars. Knows nothing about what the figures mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from xpress_export.bench.svg import NUM_COLOURS, WIDTH, Scale, box, circle, drawing, legend, line, mark, polyline, text, ticks, upright

_ROW = 26
_LABEL_WIDTH = 190
_VALUE_WIDTH = 76
_LEFT, _RIGHT = 56, 12
_HEIGHT = 220


@dataclass(frozen=True)
class Point:
    """A value, and its interval where it has one."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def ends(self) -> list[float]:
        """All that a chart of it must show."""
        return [end for end in (self.value, self.low, self.high) if end is not None]

    def side(self, reference: float) -> str:
        """Class "gain" or "loss" where the whole interval lies above or below ``reference``, else nothing."""
        if self.low is None or self.high is None or self.low <= reference <= self.high:
            return ""
        return "gain" if self.low > reference else "loss"


@dataclass(frozen=True)
class Series:
    """Points by x; ``dashed`` for what is a limit rather than a measurement."""

    label: str
    points: Mapping[float, Point]
    dashed: bool = False

    @property
    def has_intervals(self) -> bool:
        return any(point.low is not None for point in self.points.values())


def interval_chart(
    rows: Sequence[tuple[str, Point]],
    *,
    title: str,
    axis: str,
    reference: float,
    unit: str = "",
    cover: Sequence[float] = (),
    width: int = WIDTH,
) -> Markup:
    """One row a label: a dot, its interval as a line, and its value in words; a vertical line at ``reference``.

    ``cover``: values that the axis shows in any case, so that charts can be compared.
    """
    ends = [reference, *cover, *(end for _, point in rows for end in point.ends)]
    left, right, bottom = _LABEL_WIDTH, width - _VALUE_WIDTH, len(rows) * _ROW + 8
    marks = ticks(min(ends), max(ends), (right - left) // 60)
    x = Scale(marks[0], marks[-1], left, right)
    parts = _columns(marks, x, 4, bottom)
    parts.append(line(x(reference), 4, x(reference), bottom, "reference"))
    for row, (label, point) in enumerate(rows):
        y, side = row * _ROW + 8 + _ROW / 2, point.side(reference)
        parts.append(text(left - 10, y + 4, label, "label", "end", left - 14))
        if point.low is not None and point.high is not None:
            parts.append(line(x(point.low), y, x(point.high), y, f"interval {side}"))
            parts += [line(x(end), y - 4, x(end), y + 4, f"interval {side}") for end in (point.low, point.high)]
        parts.append(circle(x(point.value), y, 4.5, f"dot {side}"))
        parts.append(text(width - 4, y + 4, f"{point.value:.2f}{unit}", "value", "end"))
    parts.append(text((left + right) / 2, bottom + 34, axis, "axis", "middle"))
    return drawing(parts, bottom + 42, title, width)


def line_chart(series: Sequence[Series], *, title: str, x_axis: str, y_axis: str, width: int = WIDTH, from_zero: bool = False) -> Markup:
    """Lines over positions that are spaced evenly, as counts are; intervals as whiskers."""
    parts, x, y, bottom = _frame(series, x_axis, y_axis, width, from_zero=from_zero, filled=False)
    positions = _positions(series)
    whiskered = [number for number, each in enumerate(series) if each.has_intervals]
    for number, each in enumerate(series):
        # Whiskers of several lines at one position stand beside each other.
        shift = (whiskered.index(number) - (len(whiskered) - 1) / 2) * 6 if number in whiskered else 0
        places = [(x(positions.index(position)) + shift, point) for position, point in sorted(each.points.items())]
        kind = f"s{number % NUM_COLOURS}"
        parts.append(polyline([(place, y(point.value)) for place, point in places], f"line {kind}{' dashed' if each.dashed else ''}"))
        for place, point in places:
            if point.low is not None and point.high is not None:
                parts.append(line(place, y(point.low), place, y(point.high), f"whisker {kind}"))
            if not each.dashed:
                parts.append(mark(place, y(point.value), number))
    return drawing(parts, bottom + 46, title, width)


def bar_chart(series: Sequence[Series], *, title: str, x_axis: str, y_axis: str, width: int = WIDTH) -> Markup:
    """A group of bars at each position, one of each series."""
    parts, x, y, bottom = _frame(series, x_axis, y_axis, width, from_zero=True, filled=True)
    positions = _positions(series)
    thickness = 0.8 * (x(1) - x(0)) / len(series)
    for number, each in enumerate(series):
        for position, point in sorted(each.points.items()):
            begin = x(positions.index(position)) + (number - len(series) / 2) * thickness
            hint = f"{each.label}, {position:g}: {point.value:.3f}"
            parts.append(box(begin, y(point.value), thickness - 0.5, bottom - y(point.value), f"fill s{number % NUM_COLOURS}", hint))
    return drawing(parts, bottom + 46, title, width)


def stack_chart(rows: Sequence[tuple[str, Mapping[str, float]]], *, title: str, axis: str, unit: str = "") -> Markup:
    """One bar a label, made of its parts one behind the other, and their sum in words."""
    names = list(dict.fromkeys(name for _, values in rows for name in values))
    head, top = legend(names, WIDTH, filled=True)
    totals = [sum(values.values()) for _, values in rows]
    left, right, bottom = _LABEL_WIDTH, WIDTH - _VALUE_WIDTH, top + len(rows) * _ROW + 4
    marks = ticks(0.0, max(totals))
    x = Scale(marks[0], marks[-1], left, right)
    parts = [head, *_columns(marks, x, top, bottom)]
    for row, ((label, values), total) in enumerate(zip(rows, totals, strict=True)):
        y, begun = top + row * _ROW + 4, 0.0
        parts.append(text(left - 10, y + 14, label, "label", "end", left - 14))
        for name, value in values.items():
            kind = f"fill s{names.index(name) % NUM_COLOURS}"
            parts.append(box(x(begun), y, x(begun + value) - x(begun), 18, kind, f"{label}: {name} {value:.2f}{unit}"))
            begun += value
        parts.append(text(WIDTH - 4, y + 14, f"{total:.2f}{unit}", "value", "end"))
    parts.append(text((left + right) / 2, bottom + 34, axis, "axis", "middle"))
    return drawing(parts, bottom + 42, title)


def _positions(series: Sequence[Series]) -> list[float]:
    return sorted({position for each in series for position in each.points})


def _frame(
    series: Sequence[Series], x_axis: str, y_axis: str, width: int, *, from_zero: bool, filled: bool
) -> tuple[list[Markup], Scale, Scale, float]:
    """Legend, axes and horizontal lines of a chart over positions; the scale of position indices, that of values, and the bottom's y."""
    positions = _positions(series)
    ends = [end for each in series for point in each.points.values() for end in point.ends]
    marks = ticks(0.0 if from_zero else min(ends), max(ends), 5)
    dashed = [number for number, each in enumerate(series) if each.dashed]
    head, top = legend([each.label for each in series], width, filled=filled, dashed=dashed)
    left, right, bottom = _LEFT, width - _RIGHT, top + _HEIGHT
    x, y = Scale(-0.5, len(positions) - 0.5, left, right), Scale(marks[0], marks[-1], bottom, top)
    parts = [head]
    for value in marks:
        parts += [line(left, y(value), right, y(value), "grid"), text(left - 8, y(value) + 4, f"{value:g}", "tick", "end")]
    parts += [text(x(index), bottom + 18, f"{position:g}", "tick", "middle") for index, position in enumerate(positions)]
    parts += [text((left + right) / 2, bottom + 38, x_axis, "axis", "middle"), upright(13, (top + bottom) / 2, y_axis)]
    return parts, x, y, bottom


def _columns(marks: Sequence[float], x: Scale, top: float, bottom: float) -> list[Markup]:
    """Vertical lines and their values."""
    lines = [line(x(value), top, x(value), bottom, "grid") for value in marks]
    return [*lines, *(text(x(value), bottom + 16, f"{value:g}", "tick", "middle") for value in marks)]
