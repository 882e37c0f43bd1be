from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpress_runtime.errors import OptionError
from xpress_runtime.stopping import StopStrings

TEXT = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)


def stopped(text: str, stops: list[str]) -> str | None:
    """The plain definition: the shortest prefix that ends with a stop string, without the longest that it ends with."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - len(max(ending, key=len))]
    return None


@given(text=TEXT, stops=STOPS, data=st.data())
def test_same_as_the_definition_for_any_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    expected = stopped(text, stops)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    matcher = StopStrings(stops)
    shown = ""
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        piece, found = matcher.push(text[start:end])
        shown += piece
        assert (expected if expected is not None else text).startswith(shown)
        assert found == matcher.found == (stopped(text[:end], stops) is not None)
        if not found:
            # Nothing is held back that cannot become a stop string.
            held = text[len(shown) : end]
            assert not held or any(stop.startswith(held) for stop in stops)
    shown += matcher.flush()
    assert shown == (expected if expected is not None else text)


@pytest.mark.parametrize(
    ("stops", "pieces", "shown"),
    [
        (["\n\n"], ["one\n", "two\n", "\nthree"], ["one", "\ntwo", ""]),
        (["</s>", "</"], ["x<", "/s>"], ["x", ""]),
        (["abcd", "bc"], ["abc"], ["a"]),
        (["aab"], ["aa", "ab"], ["", "a"]),
        (["END"], ["EN", "EN", "END!"], ["", "EN", "EN"]),
    ],
)
def test_examples(stops: list[str], pieces: list[str], shown: list[str]) -> None:
    matcher = StopStrings(stops)
    assert [matcher.push(piece) for piece in pieces] == [(text, index == len(pieces) - 1) for index, text in enumerate(shown)]
    assert matcher.push("more") == ("", True)
    assert matcher.flush() == ""


def test_flush_shows_what_did_not_become_a_stop_string() -> None:
    matcher = StopStrings(["stop"])
    assert matcher.push("please sto") == ("please ", False)
    assert matcher.flush() == "sto"
    assert matcher.push("p") == ("p", False)


def test_without_stop_strings_everything_passes() -> None:
    assert StopStrings([]).push("text") == ("text", False)


@pytest.mark.parametrize(("stops", "part"), [(["a", ""], "stop string 1 is empty"), ("abc", "list of strings"), ([5], "type int")])
def test_refused(stops: list[str], part: str) -> None:
    with pytest.raises(OptionError, match=part):
        StopStrings(stops)
