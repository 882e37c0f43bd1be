"""Opening bundles: whole ones, and every way in which a folder or its description can be wrong."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Built
from tests.places import Place, replaced
from xpress_runtime.bundle import Bundle
from xpress_runtime.errors import BundleError, OutputError
from xpress_runtime.graph_names import graph_names
from xpress_runtime.version import BUNDLE_FORMAT

GRAPHS = graph_names((2, 0), (0, 16), sampling=False, base_head=True, draft_model_shares_tables=True)
CONTENTS = {
    **{f"graphs/fp32-length/{name}.onnx": name.encode() for name in GRAPHS},
    "graphs/fp32-length/weights.bin": bytes(range(256)),
    "tokenizer/tokenizer.json": b"{}",
}


def description() -> dict[str, Any]:
    """A bundle.json with every field, over files that hold next to nothing."""
    caches = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 12}

    def origin(name: str) -> dict[str, Any]:
        return {"source": f"org/{name}", "revision": "abc", "licence": "apache-2.0", "identity": "0" * 64}

    return {
        "format_version": BUNDLE_FORMAT,
        "target": {
            "origin": origin("target"),
            "model_type": "qwen3",
            "hidden_size": 40,
            "vocab_size": 61,
            "max_positions": 128,
            "stop_token_ids": [1],
            "caches": caches,
        },
        "drafter": {
            "origin": origin("drafter"),
            "block_size": 4,
            "mask_token_id": 60,
            "tap_layers": [0, 1],
            "head": "xpress",
            "head_rank": 8,
            "trained_with_thinking": False,
            "anchor_predecessor": "previous",
            "max_positions": 128,
            "draft_vocab_size": 61,
            "caches": caches,
        },
        "draft_model": {
            "origin": origin("draft-model"),
            "layers": [0, 2],
            "hidden_size": 40,
            "vocab_size": 61,
            "shares_tables": True,
            "caches": caches,
        },
        "num_passes": [2, 0],
        "shortlists": [0, 16],
        "sampling": False,
        "base_head": True,
        "capacity": 64,
        "cache_rows": 76,
        "prefill_chunk": 8,
        "batch": 2,
        "graph_sets": [
            {
                "precision": "fp32",
                "attention_form": "length",
                "graphs": {name: {"file": f"graphs/fp32-length/{name}.onnx", "operators": {"Add": 2}} for name in GRAPHS},
            }
        ],
        "has_tokenizer": True,
        "files": {name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()} for name, content in CONTENTS.items()},
        "built_with": {"xpress-export": "0.1.0"},
        "parity": {"fp32-length": {"passed": True, "graphs": {}, "generation": {"tokens": 3}}},
    }


def fields_of(value: Any, path: Place = ()) -> Iterator[Place]:
    """Every place in a JSON value but its root."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*path, key)
        yield from fields_of(value[key], (*path, key))


def changed(path: Place, value: Any) -> dict[str, Any]:
    """The description with one place replaced, or with ``...`` removed."""
    values: dict[str, Any] = replaced(description(), path, value)
    return values


def at(path: Place) -> Any:
    value: Any = description()
    for key in path:
        value = value[key]
    return value


FIELDS = list(fields_of(description()))
# For each type of value what is none of that type, or no number that anything could have.
WRONG: dict[type, list[Any]] = {
    bool: [1, 0, "true", [], {}],
    int: [True, "1", 1.0, 1.5, [1], {}, -1, 2**31, 2**63, 10**40, -(10**40), float("nan"), float("inf")],
    str: [True, 1, 1.5, ["x"], {}],
    list: [True, 1, "x", {}, [None], [True], ["x"], [1.5], [[]], [-1], [10**40], [1, None]],
    dict: [True, 1, "x", []],
}
OPTIONAL = {
    *((role, "origin", name) for role in ("target", "drafter", "draft_model") for name in ("revision", "licence")),
    ("draft_model",),
    ("drafter", "head_rank"),
    ("draft_model", "layers"),
    ("drafter", "trained_with_thinking"),
    ("parity",),
}
# What these hold is shown, and its names are nobody's concern.
FREE = {"operators", "built_with", "parity"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    for name, content in CONTENTS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    describe(folder, description())
    return folder


def describe(folder: Path, values: Any) -> None:
    (folder / "bundle.json").write_text(json.dumps(values), encoding="utf-8")


def assert_refused(folder: Path, *named: str, verify: bool = True) -> None:
    with pytest.raises(BundleError) as caught:
        Bundle.open(folder, verify=verify)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    for name in named:
        assert name in message


# The description.


def test_opens(folder: Path) -> None:
    bundle = Bundle.open(folder)
    assert json.loads(json.dumps(bundle.manifest.to_json())) == description()
    assert bundle.tokenizer_folder == folder / "tokenizer"
    assert bundle.graph_path("fp32-length", "head") == folder / "graphs/fp32-length/head.onnx"
    assert bundle.manifest.drafter.num_proposals == 3


def test_a_built_bundle_has_the_same_fields(tiny: Built) -> None:
    built = json.loads((tiny.bundle.folder / "bundle.json").read_text(encoding="utf-8"))
    free = {"files", "graphs", *FREE}

    def names(value: Any) -> Any:
        if not isinstance(value, dict):
            return [names(item) for item in value] if isinstance(value, list) and value and isinstance(value[0], dict) else None
        return {name: None if name in free else names(value[name]) for name in value}

    assert names(built) == names({**description(), "draft_model": None})
    reopened = Bundle.open(tiny.bundle.folder)
    assert reopened.manifest.to_json() == tiny.bundle.manifest.to_json()
    assert set(reopened.manifest.files) == {
        path.relative_to(tiny.bundle.folder).as_posix()
        for path in tiny.bundle.folder.rglob("*")
        if path.is_file() and path.name != "bundle.json"
    }


@pytest.mark.parametrize("path", FIELDS, ids=lambda path: ".".join(map(str, path)))
def test_wrong_value(path: Place, folder: Path) -> None:
    # A file is named itself, and an item of a list by its list.
    name = path[1] if path[0] == "files" and len(path) > 1 else next(key for key in reversed(path) if isinstance(key, str))
    for value in WRONG[type(at(path))]:
        describe(folder, changed(path, value))
        assert_refused(folder, str(name), verify=False)


@pytest.mark.parametrize("path", [path for path in FIELDS if isinstance(path[-1], str)], ids=lambda path: ".".join(map(str, path)))
@pytest.mark.parametrize("value", [..., None], ids=["removed", "null"])
def test_missing_value(path: Place, value: Any, folder: Path) -> None:
    describe(folder, changed(path, value))
    # The last one: the manifest cannot know of a file that none of its graphs names.
    free = (len(path) > 1 and path[-2] in FREE) or path == ("files", "graphs/fp32-length/weights.bin")
    if path in OPTIONAL or (free and value is ...):
        Bundle.open(folder)
    else:
        named = "tokenizer/" if path[-1] == "tokenizer/tokenizer.json" else str(path[-1])
        assert_refused(folder, "bundle.json", named)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("format_version",), BUNDLE_FORMAT + 1, ("newer", str(BUNDLE_FORMAT + 1), f"({BUNDLE_FORMAT})")),
        (("format_version",), 0, ("older", "0", f"({BUNDLE_FORMAT})")),
        (("num_passes",), [], ("num_passes", "0")),
        (("num_passes",), [2], ("num_passes", "0")),
        (("num_passes",), [4, 0], ("num_passes", "3")),
        (("num_passes",), [1, 0], ("refiner-k1",)),
        (("drafter", "block_size"), 1, ("block_size", "1")),
        (("drafter", "block_size"), 10**6, ("cache rows",)),
        (("drafter", "mask_token_id"), 61, ("mask_token_id", "61")),
        (("target", "stop_token_ids"), [1, 61], ("stop_token_ids", "61")),
        (("target", "vocab_size"), 0, ("vocab_size",)),
        (("shortlists",), [0, 62], ("shortlists", "62", "61")),
        (("shortlists",), [], ("shortlists", "at least one")),
        (("shortlists",), [0, 8], ("refiner-k2-c8",)),
        (("shortlists",), [0, 0], ("shortlists", "twice")),
        (("num_passes",), [2, 2, 0], ("num_passes", "twice")),
        (("drafter", "head"), None, ("num_passes", "head")),
        (("draft_model", "layers"), [], ("draft_model", "layers")),
        (("sampling",), True, ("sample", "missing")),
        (("drafter", "head"), "hydra", ("head", "hydra", "xpress", "markov")),
        (("capacity",), 0, ("capacity",)),
        (("capacity",), 65, ("65", "76")),
        (("cache_rows",), 75, ("75", "64")),
        (("graph_sets",), [], ("graph_sets",)),
        (("graph_sets", 0, "precision"), "fp99", ("precision", "fp99", "fp32")),
        (("graph_sets", 0, "attention_form"), "x" * 1000, ("attention_form", "length")),
        (("graph_sets", 0, "graphs", "head", "file"), "graphs/other.onnx", ("graphs/other.onnx", "files")),
        (("files", "graphs/fp32-length/head.onnx", "bytes"), 5, ("head.onnx", "4", "5")),
        (("files", "graphs/fp32-length/head.onnx", "sha256"), "0" * 64, ("head.onnx", "sha256")),
    ],
)
def test_value_that_cannot_be(path: Place, value: Any, named: tuple[str, ...], folder: Path) -> None:
    describe(folder, changed(path, value))
    assert_refused(folder, *named)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '"bundle"', "\x00", '{"a": ' * 5000, "[" * 100_000])
def test_description_that_is_no_object(text: str, folder: Path) -> None:
    (folder / "bundle.json").write_text(text, encoding="utf-8")
    assert_refused(folder, "bundle.json")


def test_description_that_is_not_text(folder: Path) -> None:
    (folder / "bundle.json").write_bytes(b"\xff\xfe{}")
    assert_refused(folder, "bundle.json")


def test_number_too_long_to_read(folder: Path) -> None:
    (folder / "bundle.json").write_text('{"format_version": ' + "1" * 5000 + "}", encoding="utf-8")
    assert_refused(folder, "bundle.json")


# The folder.


def test_missing_folder(tmp_path: Path) -> None:
    assert_refused(tmp_path / "nowhere", "nowhere", "xpress-export build")


def test_empty_folder(tmp_path: Path) -> None:
    assert_refused(tmp_path, "bundle.json", "xpress-export build")


def test_file_instead_of_a_folder(folder: Path) -> None:
    assert_refused(folder / "bundle.json", "not a bundle folder")


def test_name_too_long(tmp_path: Path) -> None:
    assert_refused(tmp_path / ("n" * 300), "too long")


def test_description_is_a_folder(folder: Path) -> None:
    (folder / "bundle.json").unlink()
    (folder / "bundle.json").mkdir()
    assert_refused(folder, "bundle.json")


@pytest.mark.parametrize("name", CONTENTS)
def test_changed_byte(name: str, folder: Path) -> None:
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    (folder / name).write_bytes(content)
    assert_refused(folder, name, "sha256")
    # Asked not to hash, it cannot know.
    Bundle.open(folder, verify=False)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("name", CONTENTS)
def test_missing_or_shortened_file(name: str, verify: bool, folder: Path) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-1])
    assert_refused(folder, name, str(len(content)), verify=verify)
    (folder / name).unlink()
    assert_refused(folder, name, "missing", verify=verify)


@pytest.mark.parametrize(
    "name", ["..", "../bundle.json", "../outside", "graphs/../../outside", "/etc/hostname", "//etc/hostname", "..\\outside", "a\\b", "a\0b"]
)
def test_path_that_leaves_the_folder(name: str, folder: Path) -> None:
    (folder.parent / "outside").write_bytes(b"outside")
    record = {"bytes": 7, "sha256": hashlib.sha256(b"outside").hexdigest()}
    describe(folder, changed(("files", name), record))
    assert_refused(folder, "leaves the bundle folder")
    # As a graph's file it must be listed first.
    describe(folder, changed(("graph_sets", 0, "graphs", "head", "file"), name))
    assert_refused(folder, "head", "files")


@pytest.mark.parametrize("name", ["", ".", "graphs", "graphs/fp32-length/"])
def test_folder_listed_as_a_file(name: str, folder: Path) -> None:
    describe(folder, changed(("files", name), {"bytes": (folder / name).stat().st_size, "sha256": "0" * 64}))
    assert_refused(folder, "not a file")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with a name here")
def test_pipe_listed_as_a_file(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    describe(folder, changed(("files", "pipe"), {"bytes": 0, "sha256": "0" * 64}))
    assert_refused(folder, "pipe", "not a file")


def test_name_too_long_inside(folder: Path) -> None:
    describe(folder, changed(("files", "n" * 300), {"bytes": 0, "sha256": "0" * 64}))
    assert_refused(folder, "missing")


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_link_that_leaves_the_folder(kind: str, folder: Path) -> None:
    inside = folder / ("tokenizer/tokenizer.json" if kind == "file" else "tokenizer")
    outside = folder.parent / "outside"
    inside.rename(outside)
    inside.symlink_to(outside)
    assert_refused(folder, "tokenizer/tokenizer.json", "leaves the bundle folder")


def test_link_inside_the_folder(folder: Path) -> None:
    (folder / "tokenizer").rename(folder / "shared")
    (folder / "tokenizer").symlink_to("shared")
    Bundle.open(folder)


def test_link_to_itself(folder: Path) -> None:
    path = folder / "tokenizer/tokenizer.json"
    path.unlink()
    path.symlink_to("tokenizer.json")
    assert_refused(folder, "tokenizer/tokenizer.json")


def test_folder_behind_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    Bundle.open(tmp_path / "link")


def test_a_moved_bundle_opens(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = tmp_path / "日本 ü"
    shutil.move(folder, moved)
    monkeypatch.chdir(tmp_path)
    for name in ("日本 ü", "日本 ü/", "./日本 ü/../日本 ü"):
        assert Bundle.open(name).manifest.capacity == 64


def test_graph_that_is_not_there(folder: Path) -> None:
    bundle = Bundle.open(folder)
    with pytest.raises(BundleError, match=r"no graph other \(it holds: accept, denoise"):
        bundle.graph_path("fp32-length", "other")
    with pytest.raises(BundleError, match=r"no graph set fp16-mask \(it holds: fp32-length\)"):
        bundle.graph_path("fp16-mask", "head")


# Replacing the description.


def test_write_manifest(folder: Path) -> None:
    bundle = Bundle.open(folder)
    other = {"fp16-mask": {"passed": False, "graphs": {}, "generation": {"tokens": 0}}}
    written = bundle.write_manifest(bundle.manifest.with_parity(other))
    # The results of other sets stay.
    parity = {**description()["parity"], **other}
    assert written.manifest.parity == parity
    assert Bundle.open(folder).manifest == written.manifest
    expected = copy.deepcopy(description())
    assert json.loads((folder / "bundle.json").read_text(encoding="utf-8")) == expected | {"parity": parity}


def test_description_stays_when_it_cannot_be_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Bundle.open(folder)
    before = sorted(path.name for path in folder.iterdir())

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        with pytest.raises(OutputError, match=r"bundle\.json cannot be replaced: No space left"):
            bundle.write_manifest(bundle.manifest.with_parity({"fp32-length": {"passed": False}}))
    assert sorted(path.name for path in folder.iterdir()) == before
    assert Bundle.open(folder).manifest == bundle.manifest


def test_manifest_of_a_bundle_that_was_replaced_is_not_written(folder: Path) -> None:
    bundle = Bundle.open(folder)
    manifest = json.loads((folder / "bundle.json").read_text(encoding="utf-8"))
    (folder / "another").write_bytes(b"x")
    manifest["files"]["another"] = {"bytes": 1, "sha256": "0" * 64}
    (folder / "bundle.json").write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(OutputError, match="replaced by another bundle"):
        bundle.write_manifest(bundle.manifest)
    assert json.loads((folder / "bundle.json").read_text(encoding="utf-8")) == manifest
