"""The whole check: the tiny bundle passes, and every planted fault is found in the graph that has it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from tests.conftest import Built
from tests.tiny import write_drafter, write_target
from xpress_export.checkpoints import open_draft_model, open_drafter, open_target
from xpress_export.cli.show_parity import shown_parity
from xpress_export.graph_set import graph_makers
from xpress_export.graphs import weights as weights_module
from xpress_export.graphs.exporter import export_graph
from xpress_export.graphs.spec import GraphSpec
from xpress_export.graphs.weights import WEIGHTS_FILE, WeightStore
from xpress_export.models import decoder as decoder_module
from xpress_export.models.layers import AttentionBounds
from xpress_export.parity.check import check_parity, check_same_checkpoints, parity_steps
from xpress_export.parity.choices import by_candidate
from xpress_export.parity.graphs import built_options, check_graphs
from xpress_export.parity.report import failures, require_passed
from xpress_export.parity.runner import GraphRunner
from xpress_runtime.backends import open_backend
from xpress_runtime.bundle import Bundle, file_sha256
from xpress_runtime.errors import BundleError, CheckFailed
from xpress_runtime.manifest import FileRecord
from xpress_runtime.sets import AttentionForm, Precision

SET = "fp32-length"
REFINERS = {"refiner-k1", "refiner-k2", "refiner-k3"}


@pytest.fixture
def copy(tiny: Built, tmp_path: Path) -> Built:
    """The tiny bundle in a folder of its own, to plant a fault in."""
    return copied(tiny, tmp_path / "copy")


def copied(built: Built, folder: Path) -> Built:
    shutil.copytree(built.bundle.folder, folder)
    return Built(Bundle(folder, built.bundle.manifest), built.target, built.drafter, built.draft_model)


def as_it_is(bundle: Bundle) -> Bundle:
    """The bundle with its files described as they are now, so that a planted fault is not refused as damage."""
    files = {name: FileRecord((bundle.folder / name).stat().st_size, file_sha256(bundle.folder / name)) for name in bundle.manifest.files}
    return Bundle(bundle.folder, replace(bundle.manifest, files=files))


def failing(built: Built) -> set[str]:
    """The graphs that differ from the checkpoints."""
    runner = GraphRunner(as_it_is(built.bundle), open_backend("ort-cpu", threads=1))
    comparisons = check_graphs(built_options(built.bundle.manifest), built.target, built.drafter, runner, draft_model=built.draft_model)
    assert set(comparisons) == set(built.bundle.manifest.graph_set(SET).graphs)
    return {name for name, comparison in comparisons.items() if not comparison.passed}


def parity(built: Built) -> dict[str, Any]:
    return check_parity(as_it_is(built.bundle), built.target, built.drafter, threads=1)[SET]


# No fault.


def test_tiny_bundle_passes(tiny: Built) -> None:
    heard: list[str] = []
    results = check_parity(tiny.bundle, tiny.target, tiny.drafter, threads=1, report=heard.append)
    require_passed(results)
    result = results[SET]
    assert failures(result) == []
    assert next(iter(result)) == "passed"
    assert (result["passed"], result["graph_set"], result["tolerance"]) == (True, SET, 1e-4)
    assert set(result["graphs"]) == set(tiny.bundle.manifest.graph_set(SET).graphs)
    assert all(graph["calls"] >= 3 for graph in result["graphs"].values())
    # What is only of interest in half precision.
    assert all(graph["range"] is None and graph["fp32"] is None for graph in result["graphs"].values())
    assert "acceptance" not in result
    # Errors of fp32 on models this small are a hundredth of the tolerance.
    assert max(graph["scaled_error"] for graph in result["graphs"].values()) < 1e-6
    assert result["target"]["scaled_error"] < 1e-6
    assert result["generation"]["modes"] == ["plain", "K=2", "K=1", "K=3", "K=0", "2 draft steps", "lookup"]
    # Three prompts of 24 tokens in seven modes.
    assert result["generation"]["tokens"] == 3 * 24 * 7
    steps = {*result["graphs"], "target", *(f"generation {mode}" for mode in result["generation"]["modes"])}
    assert heard[0] == "transformers"
    assert set(heard[1:]) == {f"{SET} {step}" for step in steps}
    assert len(heard) <= parity_steps(tiny.bundle, tiny.bundle.manifest.graph_sets)


def test_complete_bundle_passes_with_every_drafter(complete: Built) -> None:
    heard: list[str] = []
    found = check_parity(complete.bundle, complete.target, complete.drafter, complete.draft_model, threads=1, report=heard.append)
    result = found["fp16-mask"]
    assert failures(result) == []
    assert set(result["graphs"]) == set(complete.bundle.manifest.graph_names)
    assert all(graph["passed"] and graph["conclusive"] for graph in result["graphs"].values())
    modes = ["plain", "K=3", "K=0", "K=3 C=8", "2 draft steps", "lookup", "autoregressive"]
    assert result["generation"]["modes"] == modes
    assert result["generation"]["tokens"] > 3 * 20 * len(modes)
    assert len(heard) <= parity_steps(complete.bundle, complete.bundle.manifest.graph_sets)
    shown = shown_parity(result)
    assert "modes plain, K=3, K=0, K=3 C=8, 2 draft steps, lookup, autoregressive: ok" in shown
    assert "same choices" in shown and "FAILED" not in shown


def test_a_draft_model_must_be_that_of_the_bundle(complete: Built, tiny: Built) -> None:
    draft_model = complete.draft_model
    check_same_checkpoints(complete.bundle, complete.target, complete.drafter, draft_model)
    other = open_draft_model(None, None, (1, 0), complete.target)
    with pytest.raises(BundleError, match="was built from another draft model than"):
        check_same_checkpoints(complete.bundle, complete.target, complete.drafter, other)
    with pytest.raises(BundleError, match="was built with a draft model, and none is given"):
        check_same_checkpoints(complete.bundle, complete.target, complete.drafter)
    with pytest.raises(BundleError, match="was built without a draft model, and one is given; leave it out"):
        check_same_checkpoints(tiny.bundle, tiny.target, tiny.drafter, draft_model)


def test_checkpoints_must_be_those_of_the_bundle(tiny: Built, tmp_path: Path) -> None:
    check_same_checkpoints(tiny.bundle, tiny.target, tiny.drafter)
    write_target(tmp_path / "target", "qwen3", seed=1)
    write_drafter(tmp_path / "drafter", tmp_path / "target", seed=1)
    with pytest.raises(BundleError, match="was built from another target than"):
        check_same_checkpoints(tiny.bundle, open_target(str(tmp_path / "target")), tiny.drafter)
    with pytest.raises(BundleError, match="was built from another drafter than"):
        check_same_checkpoints(tiny.bundle, tiny.target, open_drafter(str(tmp_path / "drafter")))


# One changed weight.


@pytest.fixture(scope="module")
def external(tiny: Built, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The tiny bundle with small tensors in the weights file too; it holds a weight of every graph then."""
    built = copied(tiny, tmp_path_factory.mktemp("external") / "bundle")
    folder = built.bundle.folder / "graphs" / SET
    (folder / WEIGHTS_FILE).unlink()
    with pytest.MonkeyPatch.context() as patch, WeightStore(folder) as weights:
        patch.setattr(weights_module, "_MIN_EXTERNAL_BYTES", 256)
        for name in built.bundle.manifest.graph_set(SET).graphs:
            model = ir.load(tiny.bundle.graph_path(SET, name))
            weights.externalize(model)
            ir.save(model, folder / f"{name}.onnx")
    return Built(as_it_is(built.bundle), built.target, built.drafter)


def test_bundle_with_all_weights_outside_passes(external: Built) -> None:
    assert failing(external) == set()


@pytest.mark.parametrize(
    ("graph", "tensor", "index", "expected"),
    [
        # The mask token's row, which every block reads.
        ("embed", "table", (60, 7), {"embed"}),
        ("head", "table", (33, 7), {"head"}),
        ("target", "layers.0.attention.qkv.weight", (3, 50), {"target"}),
        ("target", "layers.2.mlp.down.weight", (11, 39), {"target"}),
        ("drafter", "fc.weight", (79, 0), {"drafter"}),
        ("drafter", "layers.0.attention.key_value.weight", (5, 40), {"drafter"}),
        # Numbers of passes share their weights.
        ("refiner-k1", "drafted.refiner.w2", (20, 3), REFINERS),
        ("refiner-k2", "drafted.refiner.in_hidden.weight", (15, 0), REFINERS),
    ],
)
def test_one_changed_weight(external: Built, graph: str, tensor: str, index: tuple[int, ...], expected: set[str], tmp_path: Path) -> None:
    built = copied(external, tmp_path / "copy")
    model = onnx.load(built.bundle.graph_path(SET, graph), load_external_data=False)
    (entry,) = (initializer for initializer in model.graph.initializer if initializer.name == tensor)
    place = {item.key: item.value for item in entry.external_data}
    file = built.bundle.folder / "graphs" / SET / place["location"]
    stored = np.memmap(file, np.float32, "r+", int(place["offset"]), tuple(entry.dims))
    # A quarter: between one and two standard deviations of these weights.
    stored[index] += 0.25
    stored.flush()
    assert failing(built) == expected
    # The bundle itself refuses the file first.
    with pytest.raises(BundleError, match=r"content of .*weights\.bin is not what was built|has \d+ bytes"):
        Bundle.open(built.bundle.folder)


# Graphs exported from other modules than the checkpoints'.


def replace_graph(built: Built, name: str, change: Callable[[GraphSpec], None] = lambda _: None) -> None:
    """Put a graph in its place that is exported from a changed module."""
    spec = graph_makers(built.target, built.drafter, built_options(built.bundle.manifest), Precision.FP32, AttentionForm.LENGTH)[name]()
    change(spec)
    folder = built.bundle.folder / "exported"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch, WeightStore(folder) as weights:
        # All tensors inside the graph: the weights file belongs to the others.
        patch.setattr(weights_module, "_MIN_EXTERNAL_BYTES", 2**40)
        export_graph(spec, folder, weights, {}).path.replace(built.bundle.graph_path(SET, name))


def test_export_of_the_same_module_passes(copy: Built) -> None:
    replace_graph(copy, "embed")
    assert failing(copy) == set()


def test_target_that_is_not_causal(copy: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_causal(*, causal: bool, **bounds: Any) -> AttentionBounds:
        assert causal
        return AttentionBounds(causal=False, **bounds)

    with monkeypatch.context() as patch:
        patch.setattr(decoder_module, "AttentionBounds", not_causal)
        replace_graph(copy, "target")
    result = parity(copy)
    found = failures(result)
    assert found[0].startswith("graph target (output ")
    assert any(line.startswith("target logits (") for line in found)
    assert not any(line.startswith("graph ") for line in found[1:])
    with pytest.raises(CheckFailed, match="graph target"):
        require_passed({SET: result})


@pytest.mark.parametrize(("field", "difference"), [("mask_token_id", -1), ("last_start", -1), ("last_start", 1)])
def test_other_acceptance(copy: Built, field: str, difference: int) -> None:
    def change(spec: GraphSpec) -> None:
        setattr(spec.module, field, getattr(spec.module, field) + difference)

    replace_graph(copy, "accept", change)
    assert failing(copy) == {"accept"}


# Graph files changed as they are.


def change_rotary_tables(built: Built, name: str, first: int) -> None:
    """Rotary tables of base 9,000 instead of 10,000, from position ``first`` on."""
    path = built.bundle.graph_path(SET, name)
    model = onnx.load(path, load_external_data=False)
    frequencies = 9000.0 ** -(np.arange(6) / 6)
    angles = np.arange(built.bundle.manifest.cache_rows)[:, None] * frequencies
    tables = [tensor for tensor in model.graph.initializer if tensor.name in ("rotary.0.cos", "rotary.0.sin")]
    assert len(tables) == 2
    for tensor in tables:
        table = onnx.numpy_helper.to_array(tensor).copy()
        assert table.shape == angles.shape
        wrong = np.cos(angles) if tensor.name == "rotary.0.cos" else np.sin(angles)
        table[first:] = wrong[first:]
        tensor.CopyFrom(onnx.numpy_helper.from_array(table, tensor.name))
    onnx.save(model, path)


@pytest.mark.parametrize("name", ["target", "drafter"])
def test_rotary_tables_of_another_base(copy: Built, name: str) -> None:
    change_rotary_tables(copy, name, 0)
    assert failing(copy) == {name}


def test_target_that_is_wrong_far_out(copy: Built) -> None:
    """Only texts get there; the graph differs on them, and in generation its errors must not excuse themselves."""
    change_rotary_tables(copy, "target", 28)
    assert failing(copy) == set()
    result = parity(copy)
    assert {name for name, graph in result["graphs"].items() if not graph["passed"]} == {"target"}
    assert any(line.startswith("generation ") for line in failures(result))
    assert not result["passed"]


@pytest.mark.parametrize(("made", "named"), [(2, 1), (1, 2), (3, 2), (0, 1)])
def test_refiner_of_another_number_of_passes(copy: Built, made: int, named: int) -> None:
    folder = copy.bundle.folder / "graphs" / SET
    shutil.copy(folder / f"refiner-k{made}.onnx", folder / f"refiner-k{named}.onnx")
    assert failing(copy) == {f"refiner-k{named}"}


def test_graphs_in_each_others_place(copy: Built) -> None:
    """The head's table as embeddings: same operators, same shapes."""
    embed, head = (onnx.load(copy.bundle.graph_path(SET, name)) for name in ("embed", "head"))
    (table,) = (tensor for tensor in head.graph.initializer if tensor.name == "table")
    embed.graph.initializer[0].CopyFrom(table)
    onnx.save(embed, copy.bundle.graph_path(SET, "embed"))
    assert failing(copy) == {"embed"}


def test_candidates_of_equal_logits_may_come_in_any_order() -> None:
    ids, scores = np.array([[[7, 3, 5]]]), np.array([[[2.0, 1.5, 1.25]]], np.float32)
    swapped = {"candidates": ids[..., [0, 2, 1]], "refined_logits": scores[..., [0, 2, 1]], "verify_ids": np.array([[1, 7]])}
    one, other = by_candidate({"candidates": ids, "refined_logits": scores, "verify_ids": np.array([[1, 7]])}), by_candidate(swapped)
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])
    wrong = by_candidate({"candidates": ids, "refined_logits": scores[..., [0, 2, 1]]})
    assert not np.array_equal(wrong["refined_logits"], one["refined_logits"])
