"""Profile sets and what follows from them: files, presets, and the shapes of every call."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.complete import SHORTLIST
from tests.conftest import Built
from xpress_engines.profiles import PRESETS, BlockSizes, ProfileSet, dim_ranges, graph_calls, input_ranges, load_profile
from xpress_runtime.engines import ShapeRange
from xpress_runtime.errors import OptionError

GOOD = 'description = "mine"\nprefill_chunk = 16\nbatch = 3\ncapacity = 100\n'
PROFILE = ProfileSet(prefill_chunk=128, batch=4, capacity=2048)
SIZES = BlockSizes(block_size=8, vocab_size=500)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_load_and_describe_themselves(name: str) -> None:
    profile = load_profile(name)
    assert profile.description
    assert profile.layout is None


def test_presets_are_for_one_and_for_many() -> None:
    assert load_profile("edge") == ProfileSet(128, 1, 2048, None, "one sequence, short prompts")
    assert load_profile("server").batch > 1


def test_own_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD + 'layout = "pinned"\n', encoding="utf-8")
    assert load_profile(str(path)) == ProfileSet(16, 3, 100, "pinned", "mine")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", ("prefill_chunk", "missing")),
        (GOOD.replace("batch = 3\n", ""), ("batch", "missing")),
        (GOOD + "batch_size = 4\n", ("batch_size", "unknown", "prefill_chunk")),
        (GOOD.replace("3", '"3"'), ("batch", '"3"', "integer")),
        (GOOD.replace("3", "true"), ("batch", "true", "integer")),
        (GOOD.replace("3", "1.5"), ("batch", "1.5", "integer")),
        (GOOD.replace("3", "0"), ("batch", "0", "1024")),
        (GOOD.replace("3", "1025"), ("batch", "1025", "1024")),
        (GOOD.replace("3", "1" + "0" * 40), ("batch", "1024")),
        (GOOD.replace("16", "9000"), ("prefill_chunk", "9000", "8192")),
        (GOOD.replace("100", "-5"), ("capacity", "-5")),
        (GOOD.replace("100", "1979-05-27"), ("capacity", "1979-05-27", "integer")),
        (GOOD.replace('"mine"', "3"), ("description", "3", "string")),
        (GOOD + f"{'k' * 5000} = 1\n", (f"'{'k' * 40}' is unknown",)),
        (GOOD + 'layout = "wide"\n', ("layout", "wide", "shared, pinned")),
        (GOOD + "layout = 3\n", ("layout", "3")),
        (GOOD + "[more]\na = 1\n", ("more", "unknown")),
        ("batch = ", ("TOML",)),
        ("[" * 100_000, ("larger",)),
        ("a = " + "[" * 10_000, ("TOML",)),
        ("\x00", ("TOML",)),
    ],
)
def test_file_that_is_refused(text: str, named: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    assert_refused(str(path), "mine.toml", *named)


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert_refused("sever", "sever", "edge, server", "file")
    assert_refused(str(tmp_path), "is not a file")
    assert_refused("", "is not a file")
    os.mkfifo(tmp_path / "pipe.toml")
    assert_refused(str(tmp_path / "pipe.toml"), "is not a file")
    assert_refused("/dev/zero", "is not a file")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    assert_refused(str(tmp_path / "bytes.toml"), "bytes.toml", "utf-8")
    assert_refused("n" * 5000, "too long")
    assert_refused("a\0b", "null")


def assert_refused(name: str, *named: str) -> None:
    with pytest.raises(OptionError) as caught:
        load_profile(name)
    message = str(caught.value)
    assert "\n" not in message
    for part in named:
        assert part in message


@pytest.mark.parametrize(("changes", "named"), [({"batch": 0}, "--batch is 0"), ({"layout": "x"}, "--layout is 'x'")])
def test_overrides_are_checked(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(OptionError, match=named):
        PROFILE.overridden(**changes)


def test_overrides_replace_only_what_is_given() -> None:
    assert PROFILE.overridden(batch=2, layout="pinned") == ProfileSet(128, 2, 2048, "pinned")
    assert PROFILE.overridden() == PROFILE


# The calls.


def sizes(graph: str, profile: ProfileSet = PROFILE, block: BlockSizes = SIZES) -> list[tuple[int, ...]]:
    return [tuple(call.values()) for call in graph_calls(graph, profile, block)]


def test_calls_of_every_graph() -> None:
    assert sizes("embed") == [(1, 128), (4, 8), (4, 1), (1, 8), (1, 1)]
    assert sizes("target") == sizes("embed")
    assert sizes("drafter") == [(1, 128), (4, 8), (1, 8)]
    assert sizes("head") == [(1, 128, 1), (4, 8, 7), (4, 8, 8), (4, 1, 1), (1, 8, 7), (1, 8, 8), (1, 1, 1)]
    for graph in ("accept", "filter-top-k", "filter-top-p", "penalise", "count"):
        assert sizes(graph) == [(4, 8), (4, 1), (1, 8), (1, 1)]
    assert sizes("accept-sampled") == [(4, 8), (1, 8)]
    for graph in ("refiner-k0", "refiner-k4", "refiner-k4-c16-sampled", "denoise", "lookup", "sample", "draft-start", "draft-step"):
        assert sizes(graph) == [(4,), (1,)]
    assert sizes("store-taps") == [(1, 8), (1, 1)]
    assert sizes("draft-decoder") == sizes("draft-embed") == [(1, 128), (4, 2), (4, 1), (1, 2), (1, 1)]
    assert sizes("draft-head") == [(4, 2, 1), (4, 1, 1), (1, 2, 1), (1, 1, 1)]


def test_a_draft_model_without_tables_calls_those_of_the_target() -> None:
    sharing = replace(SIZES, draft_model_shares_tables=True)
    assert set(sizes("embed", block=sharing)) - set(sizes("embed")) == {(4, 2), (1, 2)}
    assert set(sizes("head", block=sharing)) - set(sizes("head")) == {(4, 2, 1), (1, 2, 1)}
    for graph in ("target", "drafter"):
        assert sizes(graph, block=sharing) == sizes(graph)
    assert sizes("embed", block=replace(SIZES, draft_model_shares_tables=False)) == sizes("embed")


def test_scores_are_of_the_vocabulary_of_shortlists_or_of_one_candidate() -> None:
    assert sizes("accept-candidates") == [(4, 8, 1), (1, 8, 1)]
    assert sizes("confidence") == [(1, 500)]
    listed = replace(SIZES, shortlists=(16, 0, 64))
    assert sizes("accept-candidates", block=listed) == [(4, 8, 16), (4, 8, 64), (4, 8, 1), (1, 8, 16), (1, 8, 64), (1, 8, 1)]
    assert sizes("confidence", block=listed) == [(1, 500), (1, 16), (1, 64)]
    assert dim_ranges("accept-candidates", PROFILE, "shared", listed)[0]["scored"] == (1, 64, 64)


def test_unknown_graphs_have_no_calls() -> None:
    with pytest.raises(AssertionError, match="no calls are known of graph embedding"):
        graph_calls("embedding", PROFILE, SIZES)


def test_sizes_of_a_bundle(complete: Built) -> None:
    assert BlockSizes.of(complete.bundle.manifest) == BlockSizes(4, 97, (0, SHORTLIST), draft_model_shares_tables=True)


def test_equal_calls_are_one() -> None:
    alone = ProfileSet(prefill_chunk=8, batch=1, capacity=64)
    assert sizes("embed", alone) == [(1, 8), (1, 1)]
    assert sizes("target", alone) == [(1, 8), (1, 1)]
    assert sizes("draft-decoder", replace(alone, prefill_chunk=2)) == [(1, 2), (1, 1)]


def test_shared_layout_spans_all_calls_and_is_tuned_for_the_round() -> None:
    assert dim_ranges("target", PROFILE, "shared", SIZES) == ({"batch": (1, 4, 4), "tokens": (1, 8, 128)},)
    assert dim_ranges("head", PROFILE, "shared", SIZES) == ({"batch": (1, 4, 4), "tokens": (1, 8, 128), "rows": (1, 8, 8)},)
    assert dim_ranges("refiner-k2", PROFILE, "shared", SIZES) == ({"batch": (1, 4, 4)},)
    # The prompt's chunk is no call of a round.
    assert dim_ranges("draft-decoder", PROFILE, "shared", SIZES) == ({"batch": (1, 4, 4), "tokens": (1, 2, 128)},)
    assert dim_ranges("store-taps", PROFILE, "shared", SIZES) == ({"batch": (1, 1, 1), "verified": (1, 8, 8)},)


def test_a_block_longer_than_the_chunk_is_covered() -> None:
    narrow = ProfileSet(prefill_chunk=4, batch=2, capacity=64)
    assert dim_ranges("target", narrow, "shared", SIZES) == ({"batch": (1, 2, 2), "tokens": (1, 8, 8)},)


def test_pinned_layout_has_one_profile_a_call() -> None:
    ranges = dim_ranges("target", PROFILE, "pinned", SIZES)
    assert [entry["tokens"] for entry in ranges] == [(128, 128, 128), (8, 8, 8), (1, 1, 1), (8, 8, 8), (1, 1, 1)]


def test_shapes_keep_fixed_dims_and_leave_fixed_inputs_out() -> None:
    inputs = {"embeddings": ("batch", "tokens", 64), "table": (3, 4)}
    assert input_ranges(inputs, [{"batch": (1, 2, 4), "tokens": (1, 8, 128)}]) == (
        {"embeddings": ShapeRange((1, 1, 64), (2, 8, 64), (4, 128, 64))},
    )
