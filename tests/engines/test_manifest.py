"""Opening the engines of a bundle: whole ones, and every way in which a folder or its description can be wrong."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.conftest import RTX
from tests.places import Place, replaced
from xpress_runtime.bundle import Bundle
from xpress_runtime.engines import ENGINE_KINDS, EngineRecord, ShapeRange, engine_kinds, graphs_identity, open_engines
from xpress_runtime.errors import BundleError
from xpress_runtime.version import ENGINES_FORMAT

GRAPHS = {"embed", "target", "head", "drafter", "refiner-k2", "refiner-k0", "accept", "denoise", "lookup", "confidence", "store-taps"}


@pytest.fixture
def spoilt(engined: Bundle, copied: Callable[[Bundle], Bundle]) -> Bundle:
    """A copy to be spoilt; its engines are small files, so that it costs nothing."""
    bundle = copied(engined)
    values = description(bundle)
    for graph, engine in values["engines"].items():
        content = graph.encode()
        (bundle.folder / "engines" / RTX / engine["file"]).write_bytes(content)
        engine |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    describe(bundle, values)
    return bundle


def description(bundle: Bundle) -> Any:
    return json.loads((bundle.folder / "engines" / RTX / "engines.json").read_text(encoding="utf-8"))


def describe(bundle: Bundle, values: Any) -> None:
    (bundle.folder / "engines" / RTX / "engines.json").write_text(json.dumps(values), encoding="utf-8")


def assert_refused(bundle: Bundle, *named: str, kind: str = RTX, verify: bool = True) -> None:
    with pytest.raises(BundleError) as caught:
        open_engines(bundle, kind, verify=verify)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    for name in named:
        assert name in message, message


def test_opens_what_was_built(engined: Bundle) -> None:
    engines = open_engines(engined, RTX)
    manifest = engines.manifest
    assert json.loads(json.dumps(manifest.to_json())) == description(engined)
    assert engine_kinds(engined) == (RTX,)
    assert set(manifest.engines) == GRAPHS
    assert (manifest.builder, manifest.precision, manifest.graph_set) == ("tensorrt-rtx", "fp16", "fp16-mask")
    assert manifest.compute_capabilities == ("8.9",)
    assert manifest.built_from == graphs_identity(engined, "fp16-mask") != graphs_identity(engined, "bf16-mask")
    assert manifest.bytes == sum(path.stat().st_size for path in (engined.folder / "engines" / RTX).glob("*.engine"))
    assert manifest.peak_build_bytes is not None
    # Python and TensorRT alone are more than that, and tiny graphs not much on top.
    assert 50e6 < manifest.peak_build_bytes < 2e9
    target = manifest.engines["target"]
    assert engines.path("target") == engined.folder / "engines" / RTX / "target.engine"
    assert target.num_layers > 50
    assert 0 < target.build_seconds < manifest.build_seconds
    (profile,) = target.profiles
    assert profile["embeddings"] == ShapeRange((1, 1, 40), (2, 4, 40), (2, 8, 40))
    assert engined.manifest.cache_rows == 80
    assert profile["key_cache.0"] == ShapeRange((1, 2, 80, 16), (2, 2, 80, 16), (2, 2, 80, 16))


def test_profile_for_the_shapes_of_a_call() -> None:
    one, many = ({"ids": ShapeRange((1, size), (1, size), (1, size))} for size in (1, 8))
    engine = EngineRecord("embed.engine", 1, "", 0.0, 1, (many, one))
    assert engine.profile_for({"ids": (1, 1), "fixed": (3,)}) == 1
    assert engine.profile_for({"ids": (1, 8)}) == 0
    assert engine.profile_for({"ids": (1, 2)}) is None
    assert engine.profile_for({"ids": (8,)}) is None
    assert engine.profile_for({}) is None


# The description.

TYPES: dict[type, list[Any]] = {
    int: [True, "1", 1.5, [1], {}, -1, 10**40],
    float: [True, "1", [1], {}, -1.0, float("nan"), float("inf"), 10**400],
    str: [True, 1, ["x"], {}],
    list: [True, 1, "x", {}, [None], [1.5]],
    dict: [True, 1, "x", []],
}


def fields_of(value: Any, path: Place = ()) -> Iterator[Place]:
    for key in value if isinstance(value, dict) else ():
        if not path or path[0] != "engines" or len(path) == 1 or path[1] == "embed":
            yield (*path, key)
            yield from fields_of(value[key], (*path, key))


def test_every_wrong_or_missing_value_is_named(spoilt: Bundle) -> None:
    values = description(spoilt)
    paths = list(fields_of(values))
    assert len(paths) > 30
    for path in paths:
        present = values
        for key in path:
            present = present[key]
        wrong = [] if present is None else TYPES[type(present)]
        for value in [*wrong, *([] if path == ("peak_build_bytes",) or path[:-1] == ("built_with",) else [...])]:
            describe(spoilt, replaced(values, path, value))
            # A missing engine is one that was built from another set of graphs.
            assert_refused(spoilt, "other graphs" if value is ... and path[:-1] == ("engines",) else str(path[-1]), verify=False)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("format_version",), ENGINES_FORMAT + 1, ("newer", str(ENGINES_FORMAT + 1))),
        (("format_version",), 0, ("older", "0")),
        (("kind",), "tensorrt", ("kind", "tensorrt", RTX)),
        (("graph_set",), "fp8-mask", ("fp8-mask", "fp16-mask")),
        (("graph_set",), "bf16-mask", ("other graphs", "bf16-mask", "--force")),
        (("built_from",), "0" * 64, ("other graphs", "--force")),
        (("profile", "layout"), "wide", ("layout", "wide", "shared, pinned")),
        (("profile", "batch"), 0, ("batch",)),
        (("profile", "capacity"), 9999, ("capacity", "9999")),
        (("profile", "block_size"), 99, ("block_size", "99")),
        (("profile", "prefill_chunk"), 99, ("prefill_chunk", "99")),
        (("precision",), "fp99\nfoo", ("precision", "fp16")),
        (("builder",), "x\x1b]0;t\x07", ("builder", RTX)),
        (("builder_version",), "1\n2", ("builder_version",)),
        (("compute_capabilities",), [], ("compute_capabilities", "empty")),
        (("compute_capabilities",), ["8.9", "8"], ("compute_capabilities", "'8'")),
        (("engines", "embed", "profiles"), [], ("profiles", "empty")),
        (("engines", "embed", "profiles"), [{"ids": {"min": [1, 1], "opt": [1], "max": [1, 1]}}], ("ids", "one rank")),
        (("engines", "embed", "profiles"), [{"ids": {"min": [1, 2], "opt": [1, 1], "max": [1, 4]}}], ("ids", "larger")),
        (("engines", "embed", "profiles"), [{"ids": {"min": [1], "opt": [1], "max": [1, 4]}}], ("ids", "one rank")),
        (("engines", "embed", "bytes"), 6, ("embed.engine", "5", "6")),
        (("engines", "embed", "sha256"), "0" * 64, ("embed.engine", "sha256")),
        (("engines", "embed", "file"), "../../bundle.json", ("leaves the bundle folder",)),
        (("engines", "embed", "file"), "..\\outside", ("leaves the bundle folder",)),
        (("engines", "embed", "file"), "a\0b", ("leaves the bundle folder",)),
        (("engines", "embed", "file"), "/etc/hostname", ("missing",)),
        (("engines", "embed", "file"), "", ("not a file",)),
    ],
)
def test_value_that_cannot_be(path: Place, value: Any, named: tuple[str, ...], spoilt: Bundle) -> None:
    describe(spoilt, replaced(description(spoilt), path, value))
    assert_refused(spoilt, *named)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"a": ' * 5000])
def test_description_that_is_no_object(text: str, spoilt: Bundle) -> None:
    (spoilt.folder / "engines" / RTX / "engines.json").write_text(text, encoding="utf-8")
    assert_refused(spoilt, "engines.json")


# The folder.


def test_missing_kind(half_opened: Bundle, engined: Bundle) -> None:
    assert engine_kinds(half_opened) == ()
    assert_refused(half_opened, "no engines of kind tensorrt-rtx", "none", "xpress-export engine")
    assert_refused(engined, "no engines of kind tensorrt ", RTX, kind="tensorrt")
    assert set(ENGINE_KINDS) == {RTX, "tensorrt"}


@pytest.fixture
def half_opened(half: Any) -> Bundle:
    return Bundle.open(half.bundle.folder, verify=False)


def test_missing_description(spoilt: Bundle) -> None:
    (spoilt.folder / "engines" / RTX / "engines.json").unlink()
    assert_refused(spoilt, "engines.json", "--force")


def test_changed_shortened_and_missing_file(spoilt: Bundle) -> None:
    path = spoilt.folder / "engines" / RTX / "head.engine"
    engines = open_engines(spoilt, RTX)
    path.write_bytes(b"haed")
    assert_refused(spoilt, "head.engine", "sha256", "--force")
    open_engines(spoilt, RTX, verify=False)
    with pytest.raises(BundleError, match="sha256"):
        engines.path("head")
    path.write_bytes(b"hea")
    assert_refused(spoilt, "head.engine", "3 bytes", verify=False)
    path.unlink()
    assert_refused(spoilt, "head.engine", "missing", verify=False)


@pytest.mark.parametrize("place", [f"engines/{RTX}/head.engine", f"engines/{RTX}", "engines"])
def test_link_that_leaves_the_bundle(place: str, spoilt: Bundle, tmp_path: Path) -> None:
    inside = spoilt.folder / place
    inside.rename(tmp_path / "outside")
    inside.symlink_to(tmp_path / "outside")
    assert_refused(spoilt, "leaves the bundle folder")


def test_engines_of_another_bundle(engined: Bundle, half_opened: Bundle, copied: Callable[[Bundle], Bundle]) -> None:
    bundle = copied(half_opened)
    shutil.copytree(engined.folder / "engines", bundle.folder / "engines")
    # The very same graphs: these engines are as good here.
    open_engines(bundle, RTX)
    path = bundle.folder / "bundle.json"
    name = "graphs/fp16-mask/head.onnx"
    (bundle.folder / name).write_bytes(b"another")
    values = json.loads(path.read_text(encoding="utf-8"))
    values["files"][name] = {"bytes": 7, "sha256": hashlib.sha256(b"another").hexdigest()}
    path.write_text(json.dumps(values), encoding="utf-8")
    assert_refused(Bundle.open(bundle.folder), "other graphs", "fp16-mask", "--force")
