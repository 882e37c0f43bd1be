"""Building engines in a process of its own: kinds and layouts, what it refuses, and every way in which that process can end."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.complete import SHORTLIST
from tests.conftest import Built
from tests.engines.conftest import RTX
from tests.engines.test_network import drop_mask, spoil
from xpress_engines import builder, kinds
from xpress_engines.builder import EngineOptions, build_engines
from xpress_engines.kinds import KINDS, engine_kind, require_builder, resolve_compute_capabilities
from xpress_engines.profiles import ProfileSet
from xpress_export.engines_build import EngineRequest, add_engines, check_shortlists, engine_options, request_engines
from xpress_runtime.bundle import Bundle
from xpress_runtime.engines import engine_kinds, open_engines
from xpress_runtime.errors import BundleError, CheckFailed, EnvironmentProblem, MissingExtraError, OptionError, OutputError, XpressError
from xpress_runtime.sets import Precision

REQUEST = EngineRequest(KINDS[RTX], ("8.9",), None)


def options(bundle: Bundle, **wanted: Any) -> EngineOptions:
    return engine_options(REQUEST, bundle.manifest, **wanted)


def left_over(bundle: Bundle) -> list[str]:
    return sorted(path.relative_to(bundle.folder).as_posix() for path in bundle.folder.glob("engines/**/*"))


# What is built.


def test_pinned_layout_has_a_profile_for_each_call(half: Built, tmp_path: Path) -> None:
    manifest = build_engines(half.bundle, options(half.bundle, layout="pinned"), tmp_path)
    profiles = {graph: len(engine.profiles) for graph, engine in manifest.engines.items()}
    models = {"embed": 5, "target": 5, "drafter": 3, "head": 7, "refiner-k0": 2, "refiner-k2": 2}
    assert profiles == models | {"accept": 4, "denoise": 2, "lookup": 2, "confidence": 1, "store-taps": 2}
    assert all(shapes.min == shapes.opt == shapes.max for shapes in manifest.engines["target"].profiles[1].values())


def test_bf16_is_built_of_the_bf16_graphs(half: Built, tmp_path: Path) -> None:
    heard: list[str] = []
    manifest = build_engines(half.bundle, options(half.bundle, precision=Precision.BF16, batch=1), tmp_path, report=heard.append)
    assert (manifest.graph_set, manifest.precision, manifest.profile.batch) == ("bf16-mask", "bf16", 1)
    assert heard == list(half.bundle.manifest.graph_set("bf16-mask").graphs) == list(manifest.engines)


def test_everything_that_a_bundle_may_have_becomes_engines(complete: Built, tmp_path: Path) -> None:
    manifest = build_engines(complete.bundle, options(complete.bundle), tmp_path)
    assert list(manifest.engines) == list(complete.bundle.manifest.graph_names)
    # Two searches in one graph, or a sort of the whole vocabulary, would take minutes or fail.
    assert max(engine.build_seconds for engine in manifest.engines.values()) < 30
    scored = manifest.engines["accept-candidates"].profiles[0]["candidates"]
    assert (scored.min, scored.max) == ((1, 3, 1), (2, 3, SHORTLIST))


def test_narrower_targets_are_written_down(half: Built) -> None:
    assert resolve_compute_capabilities(KINDS[RTX], ()) == ("8.0", "8.6", "8.9", "12.0", "12.1")
    assert resolve_compute_capabilities(KINDS[RTX], ["12.0", "8.6", "12.0"]) == ("8.6", "12.0")
    assert options(half.bundle).compute_capabilities == ("8.9",)


@pytest.mark.parametrize(
    ("capability", "named"),
    [("7.5", "Turing"), ("9.0", "kind tensorrt"), ("10.0", "kind tensorrt"), ("8.7", "unknown"), ("89", "like 8.9"), ("", "like 8.9")],
)
def test_compute_capability_that_is_not_covered(capability: str, named: str) -> None:
    with pytest.raises(OptionError) as caught:
        resolve_compute_capabilities(KINDS[RTX], ["8.9", capability])
    assert named in str(caught.value)
    assert "8.0, 8.6, 8.9, 12.0, 12.1" in str(caught.value)


def test_builder_knows_what_the_kinds_say() -> None:
    require_builder(KINDS[RTX])
    import tensorrt_rtx

    members = tensorrt_rtx.ComputeCapability.__members__
    assert all(f"SM{capability.replace('.', '')}" in members for capability in KINDS[RTX].compute_capabilities)


# What is refused before any work.


def test_unknown_kind() -> None:
    with pytest.raises(OptionError, match="'tensorflow' does not exist; choose one of: tensorrt-rtx, tensorrt"):
        engine_kind("tensorflow")


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    find = kinds.importlib.util.find_spec
    for missing, package in (("tensorrt_rtx", "tensorrt-rtx"), ("polygraphy", "polygraphy"), ("onnx", "onnx")):
        monkeypatch.setattr(kinds.importlib.util, "find_spec", lambda name, missing=missing: None if name == missing else find(name))
        with pytest.raises(MissingExtraError, match=rf"^{package} is not installed.*\[rtx\]"):
            request_engines([RTX])


def test_kind_for_the_gpu_present(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds.importlib.util, "find_spec", lambda name: name)
    with pytest.raises(OptionError, match=r"--compute-capability 8\.9: .* leave it out"):
        request_engines(["tensorrt"], compute_capabilities=["8.9"])
    monkeypatch.setattr(kinds, "_gpu_compute_capability", lambda _kind: "9.0")
    assert request_engines(["tensorrt"])[0].compute_capabilities == ("9.0",)
    # Each of two kinds takes the options that it has.
    cache = Path("timing.cache")
    rtx, trt = request_engines([RTX, "tensorrt", RTX], compute_capabilities=["8.6"], timing_cache=cache)
    assert (rtx.compute_capabilities, rtx.timing_cache) == (("8.6",), None)
    assert (trt.compute_capabilities, trt.timing_cache) == (("9.0",), cache)


def test_no_gpu_for_the_kind_that_needs_one() -> None:
    pytest.importorskip("cuda.bindings.runtime")
    from cuda.bindings import runtime

    if runtime.cudaGetDeviceCount()[0] == runtime.cudaError_t.cudaSuccess:
        pytest.skip("there is a GPU")
    with pytest.raises(EnvironmentProblem, match=r"built for the GPU present, and none can be used here.*tensorrt-rtx"):
        resolve_compute_capabilities(KINDS["tensorrt"], ())


def test_timing_cache_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"--timing-cache .*times nothing"):
        request_engines([RTX], timing_cache=tmp_path / "cache")
    for place in (tmp_path, tmp_path / "no" / "cache"):
        with pytest.raises(OptionError, match=r"--timing-cache .*no file in an existing folder"):
            builder.check_timing_cache(KINDS["tensorrt"], place)


@pytest.mark.parametrize(("field", "own"), [("capacity", 64), ("prefill_chunk", 8)])
def test_profile_of_another_bundle(field: str, own: int, half: Built) -> None:
    numbers = {"prefill_chunk": 8, "batch": 4, "capacity": 64}
    assert options(half.bundle, profile=ProfileSet(**numbers)).profile.batch == 4
    with pytest.raises(OptionError) as caught:
        options(half.bundle, profile=ProfileSet(**(numbers | {field: 100})))
    assert f"{field} 100" in str(caught.value)
    assert str(own) in str(caught.value)


def test_a_shortlist_that_tensorrt_cannot_find_is_refused(half: Built) -> None:
    check_shortlists([0, 3840])
    manifest = replace(half.bundle.manifest, shortlists=(0, 3841))
    with pytest.raises(
        OptionError, match=r"a shortlist of 3841 cannot become an engine: .* the 3840 best .* --shortlist 3840 or less"
    ) as caught:
        engine_options(REQUEST, manifest)
    assert "\n" not in str(caught.value)


def test_bundle_without_graphs_for_engines(tiny: Built) -> None:
    with pytest.raises(BundleError, match=r"no fp16 or bf16 graphs with masks.*fp32-length.*--precision fp16"):
        options(tiny.bundle)
    with pytest.raises(BundleError, match="no bf16 graphs"):
        options(tiny.bundle, precision=Precision.BF16)


# What may go wrong on the way.


def test_lost_bound_names_the_layer_and_leaves_the_old_engines(engined: Bundle, copied: Callable[[Bundle], Bundle]) -> None:
    bundle = copied(engined)
    before = left_over(bundle)
    spoil(bundle.folder / "graphs/fp16-mask/target.onnx", drop_mask)
    with pytest.raises(CheckFailed, match=r"graph target: layer node_mask_attention_1.* the cache bound was lost"):
        add_engines(bundle, options(bundle), replace=True)
    assert left_over(bundle) == before


def test_graph_that_tensorrt_does_not_build(half: Built, copied: Callable[[Bundle], Bundle]) -> None:
    bundle = copied(half.bundle)

    def ask_for_too_much(model: Any) -> None:
        next(node for node in model.graph.node if node.op_type == "Gather").op_type = "Nonsense"

    spoil(bundle.folder / "graphs/fp16-mask/embed.onnx", ask_for_too_much)
    with pytest.raises(EnvironmentProblem, match=r"tensorrt-rtx could not build an engine of graph embed: .*Nonsense"):
        add_engines(bundle, options(bundle))
    assert left_over(bundle) == []


BEGIN = "import json, os, signal, sys; print(json.dumps({'event': 'begin', 'graph': 'target'}), flush=True); "


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize(
    ("ends", "error", "named"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", EnvironmentProblem, "killed the build of graph target.*memory ran out.*smaller batch"),
        ("os.abort()", EnvironmentProblem, r"crashed \(SIGABRT\) while it built graph target: it said nothing"),
        (
            "sys.stderr.write('[E] catchCudaError no driver\\n[E] the true reason\\n'); sys.stderr.flush(); os.abort()",
            EnvironmentProblem,
            r"crashed \(SIGABRT\) while it built graph target: the true reason",
        ),
        ("raise LookupError('a defect')", RuntimeError, "status 1 at graph target:(.|\n)*LookupError: a defect"),
        ("sys.exit(0)", RuntimeError, "status 0 at graph target"),
        ("print(json.dumps({'event': 'disk', 'errno': 28, 'message': 'No space left on device'}))", OutputError, "filled up"),
        ("print(json.dumps({'event': 'disk', 'errno': 13, 'message': 'Permission denied'}))", OutputError, "cannot be written"),
    ],
    ids=["killed", "crashed", "crashed-with-a-reason", "defect", "silent", "disk-full", "disk-refuses"],
)
def test_end_of_the_worker(
    ends: str, error: type[Exception], named: str, half: Built, copied: Callable[[Bundle], Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = copied(half.bundle)
    monkeypatch.setattr(builder, "WORKER", (sys.executable, "-c", BEGIN + ends))
    with pytest.raises(error, match=named) as caught:
        add_engines(bundle, options(bundle))
    assert not isinstance(caught.value, XpressError) or "\n" not in str(caught.value)
    assert left_over(bundle) == []
    assert not (bundle.folder / "engines").exists()


def test_worker_that_cannot_start(half: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "WORKER", (sys.executable, "-c", "raise SystemExit('no module')"))
    with pytest.raises(RuntimeError, match="no module"):
        build_engines(half.bundle, options(half.bundle), tmp_path)


def test_bundle_exchanged_while_engines_are_built(half: Built, copied: Callable[[Bundle], Bundle]) -> None:
    bundle = copied(half.bundle)

    def exchange(step: str) -> None:
        if step.endswith("head"):
            shutil.rmtree(bundle.folder)
            shutil.copytree(half.bundle.folder, bundle.folder)

    with pytest.raises(OutputError, match="replaced by another bundle"):
        add_engines(bundle, options(bundle), report=exchange)
    assert left_over(Bundle.open(bundle.folder)) == []


def test_bundle_described_anew_while_engines_are_built(half: Built, copied: Callable[[Bundle], Bundle]) -> None:
    bundle = copied(half.bundle)

    def describe(step: str) -> None:
        if step.endswith("target"):
            path = bundle.folder / "bundle.json"
            values = json.loads(path.read_text(encoding="utf-8"))
            values["files"]["graphs/fp16-mask/weights.bin"]["sha256"] = "0" * 64
            path.write_text(json.dumps(values), encoding="utf-8")

    with pytest.raises(OutputError, match="replaced by another bundle"):
        add_engines(bundle, options(bundle), report=describe)
    assert left_over(bundle) == []


# Kinds beside each other.

# TensorRT by name only: its API is the one of TensorRT-RTX.
STAND_IN = "from tensorrt_rtx import *\n__version__ = '10.16.1'\n"


def test_second_kind_beside_the_first(
    engined: Bundle, copied: Callable[[Bundle], Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of kind tensorrt, with TensorRT-RTX in its place; timing cache included."""
    bundle = copied(engined)
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "tensorrt.py").write_text(STAND_IN, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    monkeypatch.setattr("xpress_engines.builder.builder_version", lambda _kind: "10.16.1")
    first = open_engines(bundle, RTX).manifest
    cache = tmp_path / "timing.cache"
    request = EngineRequest(KINDS["tensorrt"], ("9.0",), cache)
    for replaced in (False, True):
        made = add_engines(bundle, engine_options(request, bundle.manifest), replace=replaced)
        assert cache.is_file()
        assert (made.kind, made.builder_version, made.compute_capabilities) == ("tensorrt", "10.16.1", ("9.0",))
        assert made.profile.layout == "pinned"
    assert engine_kinds(bundle) == (RTX, "tensorrt")
    assert open_engines(bundle, RTX).manifest == first
    assert open_engines(bundle, "tensorrt").manifest.engines["target"].profiles[2]["embeddings"].max == (2, 1, 40)
    Bundle.open(bundle.folder)
