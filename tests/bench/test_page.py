"""The page: complete, offline, escaped, and drawn with what was measured. The tables that it shares with the terminal."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser

import pytest
from markupsafe import Markup

from tests.bench.synthetic import job, manifest, prompts, report, result
from xpress_export.bench import plots, tables
from xpress_export.bench.charts import Point, Series, bar_chart, interval_chart, line_chart, stack_chart
from xpress_export.bench.figures import Measurements
from xpress_export.bench.modes import GROUPS, plan_modes
from xpress_export.bench.page import render_page
from xpress_export.bench.svg import text, ticks
from xpress_runtime.generation import GenerationConfig

HOSTILE = """</td></svg><script>alert("x")</script><img src=x onerror='alert(1)'>{{ 7 * 7 }}"""
VOID = {"meta", "br", "img", "link", "input"}


class Document(HTMLParser):
    """The tags and attributes of a page, and its text; fails where tags do not nest."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def hostile() -> str:
    """A report in which everything that others wrote is hostile."""
    made = report()
    origin = {"source": HOSTILE, "revision": HOSTILE, "licence": HOSTILE, "identity": HOSTILE}
    subject = {**made.subject, "bundle": HOSTILE, "target": origin, "drafter": origin, "built_with": {HOSTILE: HOSTILE}}
    return render_page(report(prompts(excerpt=HOSTILE), subject=subject, notes=[HOSTILE]))


def test_page_is_whole_and_holds_all_plots() -> None:
    document = Document(render_page(report()))
    assert document.tags.count("html") == 1
    # Speed-up, two of the ablation, the sweep, two of acceptance, stages, and three families.
    assert document.tags.count("svg") == 10
    for title in ("Speed-up", "Denoising steps and the refiner", "Refinement passes", "Acceptance", "Where the time goes", "By family"):
        assert title in document.text
    for meaning in GROUPS.values():
        assert meaning in document.text


@pytest.mark.parametrize("render", [lambda: render_page(report()), hostile], ids=["plain", "hostile"])
def test_page_names_nothing_outside_and_runs_nothing(render: Callable[[], str]) -> None:
    page = render()
    document = Document(page)
    assert not re.search(r"https?:|//|url\(|@import", re.sub(r"&[#\w]+;", "", page))
    assert not {"script", "img", "iframe", "link", "object", "embed", "form", "base", "a"} & set(document.tags)
    names = {name for name, _ in document.attributes}
    assert not {"src", "href", "srcset", "action", "style"} & names
    assert not {name for name in names if name.startswith("on")}
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in document.attributes


def test_hostile_text_is_shown_and_not_obeyed() -> None:
    page = hostile()
    document = Document(page)
    assert "<script" not in page
    assert document.text.count(HOSTILE) >= 12 + 5
    assert "49" not in {line.strip() for line in document.text.splitlines()}


def test_hostile_labels_of_charts_are_escaped() -> None:
    points = {1.0: Point(1.0, 0.5, 1.5)}
    charts = [
        interval_chart([(HOSTILE, points[1.0])], title=HOSTILE, axis=HOSTILE, reference=1.0, unit=HOSTILE),
        line_chart([Series(HOSTILE, points)], title=HOSTILE, x_axis=HOSTILE, y_axis=HOSTILE),
        bar_chart([Series(HOSTILE, points)], title=HOSTILE, x_axis=HOSTILE, y_axis=HOSTILE),
        stack_chart([(HOSTILE, {HOSTILE: 1.0})], title=HOSTILE, axis=HOSTILE, unit=HOSTILE),
    ]
    for chart in charts:
        assert set(Document(chart).tags) <= {"svg", "line", "text", "circle", "polyline", "polygon", "rect", "title"}


def test_page_knows_light_and_dark() -> None:
    page = render_page(report())
    assert "prefers-color-scheme: dark" in page
    light, dark = re.findall(r":root \{(.*?)\}", page, re.DOTALL)
    names = [set(re.findall(r"--(\w+):", block)) for block in (light, dark)]
    assert names[0] == names[1]
    # No element brings a colour of its own, which one of the two would not suit.
    assert not re.search(r'(?:fill|stroke|color)="', page)


def test_a_run_without_any_figure_still_makes_a_page() -> None:
    plan = plan_modes(manifest(), GenerationConfig(64))
    asked = prompts(each=1)
    jobs = [job(prompt, mode, result([], num_proposals=0)) for prompt in asked for mode in plan.modes]
    Document(render_page(report(asked, measurements=Measurements(asked, plan.modes, jobs), plan=plan)))


def test_one_prompt_and_plain_alone_still_make_a_page() -> None:
    document = Document(render_page(report(prompts(["x"], each=1), groups=["A"])))
    assert "By family" not in document.text


def test_sampled_run_says_so() -> None:
    assert "sampled at temperature 0.8" in Document(render_page(report(temperature=0.8))).text


# Charts.


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.97, 1.03), (-3, 250), (0, 1e-4), (5, 5), (0, 0), (1e6, 3e6), (-2, -1)])
def test_ticks_are_round_and_cover_the_values(low: float, high: float) -> None:
    marks = ticks(low, high)
    assert marks[0] <= low
    assert marks[-1] >= high
    assert 2 <= len(marks) <= 9
    assert marks == sorted(set(marks))


def coordinates(chart: Markup, shape: str, name: str) -> list[float]:
    return [float(value) for value in re.findall(rf'<{shape} [^>]*?{name}="([\d.-]+)"', chart)]


def test_intervals_are_coloured_by_the_side_that_they_lie_on() -> None:
    rows = [("a", Point(1.2, 1.1, 1.3)), ("b", Point(0.8, 0.7, 0.9)), ("c", Point(1.2, 0.9, 1.5)), ("d", Point(2.0))]
    chart = interval_chart(rows, title="t", axis="x", reference=1.0)
    assert re.findall(r'class="dot (\w*)"', chart) == ["gain", "loss", "", ""]


def test_dots_lie_where_their_values_are() -> None:
    chart = interval_chart(
        [(label, Point(value)) for label, value in zip("abc", (1.0, 2.0, 1.5), strict=True)], title="t", axis="x", reference=1.0
    )
    first, last, middle = coordinates(chart, "circle", "cx")
    assert first < middle < last
    assert middle == pytest.approx((first + last) / 2, abs=0.1)


def test_bars_are_as_high_as_their_values_and_stay_apart() -> None:
    chart = bar_chart([Series("a", {1.0: Point(0.2), 2.0: Point(0.4)}), Series("b", {1.0: Point(0.1)})], title="t", x_axis="x", y_axis="y")
    heights, begins = coordinates(chart, "rect", "height")[2:], coordinates(chart, "rect", "x")[2:]
    assert heights[1] == pytest.approx(2 * heights[0], abs=0.1)
    assert heights[2] == pytest.approx(heights[0] / 2, abs=0.1)
    assert begins[0] < begins[2] < begins[1]


def test_stacked_parts_begin_where_the_one_before_ends() -> None:
    chart = stack_chart([("row", {"draft": 2.0, "verify": 6.0})], title="t", axis="ms")
    begins, widths = coordinates(chart, "rect", "x")[2:], coordinates(chart, "rect", "width")[2:]
    assert begins[1] == pytest.approx(begins[0] + widths[0], abs=0.2)
    assert widths[1] == pytest.approx(3 * widths[0], abs=0.2)


def test_long_labels_are_cut_to_their_room() -> None:
    assert ">abcdefgh…<" in text(0, 0, "abcdefghijklmnop", "label", "end", room=60)


# Tables.


def test_tables_agree_with_the_figures() -> None:
    made = report()
    rows = {row[0]: row for row in tables.overview(made).rows}
    refined = made.figures["steps1-k2"]
    assert refined.speedup is not None
    assert refined.mean_acceptance_length is not None
    shown = rows["D: 1 step, K=2"]
    assert shown[2] == f"{refined.speedup.value:.2f}×"
    assert shown[4] == f"{refined.mean_acceptance_length.value:.2f}"
    assert rows["A: plain"][2:5] == ("1.00×", "", "1")
    assert [row[0] for row in tables.sweep(made).rows] == ["0", "1", "2", "4"]
    assert [row[:2] for row in tables.ablation(made).rows] == [(steps, kind) for steps in "157" for kind in ("none", "K=2")]


def test_every_row_has_a_cell_for_every_column() -> None:
    made = report()
    shown = [
        tables.overview,
        tables.speed,
        tables.acceptance,
        tables.ablation,
        tables.sweep,
        tables.positions,
        tables.lengths,
        tables.widths,
    ]
    for table in (*(make(made) for make in shown), tables.stages(made, "round"), tables.prompts(made), *tables.families(made)):
        assert table
        assert {len(row) for row in table.rows} == {len(table.header)}


def test_plots_need_their_modes() -> None:
    made = report(groups=["A", "L"])
    assert plots.sweep_plot(made) == ""
    assert plots.ablation_plots(made) == []
    assert plots.speedup_plot(made) != ""
