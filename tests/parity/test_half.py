"""Half-precision sets: a trained bundle passes in fp16, and every planted fault is found, the one included that ONNX Runtime hides."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import CONFORMANCE, Built
from tests.parity.test_check import as_it_is, copied
from xpress_export.checkpoints import open_pair
from xpress_export.cli.show_parity import shown_parity
from xpress_export.graph_set import graph_makers
from xpress_export.graphs import weights as weights_module
from xpress_export.graphs.exporter import export_graph
from xpress_export.graphs.weights import WeightStore
from xpress_export.models.layers import AttentionBounds
from xpress_export.options import resolve_options
from xpress_export.parity.check import check_parity
from xpress_export.parity.fp32_parts import FP32_PARTS
from xpress_export.parity.graphs import GraphComparison, built_options, check_graphs
from xpress_export.parity.report import failures
from xpress_export.parity.runner import GraphRunner
from xpress_runtime.backends.ort_cpu import OrtCpuBackend
from xpress_runtime.bundle import Bundle
from xpress_runtime.sets import AttentionForm, Precision

SET = "fp16-mask"
FP16_LARGEST = 65504


def half_set(bundle: Bundle) -> Any:
    return bundle.manifest.graph_set(SET)


def compare(built: Built, precision: Precision = Precision.FP16) -> dict[str, GraphComparison]:
    runner = GraphRunner(as_it_is(built.bundle), OrtCpuBackend(1, SET)) if precision is Precision.FP16 else None
    options = built_options(built.bundle.manifest)
    return check_graphs(options, built.target, built.drafter, runner, precision=precision, form=AttentionForm.MASK)


def failing(built: Built) -> set[str]:
    return {name for name, comparison in compare(built).items() if not comparison.passed}


def parity(built: Built, **options: Any) -> dict[str, Any]:
    bundle = as_it_is(built.bundle)
    return check_parity(bundle, built.target, built.drafter, graph_sets=[half_set(bundle)], threads=1, **options)[SET]


def test_trained_bundle_passes(half: Built) -> None:
    results = check_parity(half.bundle, half.target, half.drafter, threads=1)
    assert list(results) == ["fp32-length", SET]
    result = results[SET]
    assert failures(result) == []
    assert result["passed"]
    assert result["compared_in"] == "ONNX Runtime on the CPU"
    for name, graph in result["graphs"].items():
        assert graph["conclusive"], name
        # Half precision at work, and well inside what is allowed.
        assert graph["scaled_error"] < graph["tolerance"] / 2 or name in ("embed", "denoise", "store-taps"), name
    ranges = {name: graph["range"] for name, graph in result["graphs"].items()}
    # They compute with integers or fp32 logits alone.
    assert all(ranges.pop(name) is None for name in ("accept", "lookup", "confidence"))
    assert all(found["passed"] and found["headroom"] > 1000 and found["not_finite"] == 0 for found in ranges.values())
    assert result["graphs"]["drafter"]["fp32"] == [part for part, _ in FP32_PARTS["drafter"]]
    assert result["graphs"]["refiner-k2"]["fp32"] == ["base and refined logits, and their sum"]
    assert set(result["acceptance"]["modes"]) == {"K=2", "K=1", "K=0", "2 draft steps", "lookup"}
    assert all(abs(mode["rounds"] - mode["reference_rounds"]) <= 2 for mode in result["acceptance"]["modes"].values())
    for divergence in result["generation"]["divergences"]:
        assert divergence["margin"] <= 2 * divergence["logit_error"]
    shown = shown_parity(result)
    assert "FAILED" not in shown
    for part in (
        "fp16-mask, compared in ONNX Runtime on the CPU",
        "headroom",
        "two best logits equal in 0 of",
        "fc and hidden_norm",
        "acceptance K=2",
    ):
        assert part in shown


def test_fp32_weights_are_those_of_the_table(half: Built) -> None:
    for name in half_set(half.bundle).graphs:
        model = onnx.load(half.bundle.graph_path(SET, name))
        arrays = (tensor for tensor in model.graph.initializer if np.prod(tensor.dims) > 1)
        wide = {tensor.name for tensor in arrays if tensor.data_type == onnx.TensorProto.FLOAT}
        # A table as small as this one is cast when the graph is exported, larger ones when it runs.
        assert wide == {"drafter": {"fc.weight", "hidden_norm.weight"}, "head": {"_to_copy_1"}}.get(name, set()), name


def test_bf16_is_compared_in_pytorch(half: Built) -> None:
    """No graph is exported for it: none would run here."""
    bundle = half.bundle
    graph_set = replace(half_set(bundle), precision="bf16")
    result = check_parity(bundle, half.target, half.drafter, graph_sets=[graph_set], threads=1)["bf16-mask"]
    assert failures(result) == []
    assert result["passed"]
    assert result["compared_in"].startswith("PyTorch only")
    assert result["generation"]["not_compared"] == result["acceptance"]["not_compared"] == result["compared_in"]
    assert all(graph["passed"] for graph in result["graphs"].values())
    assert "generation and acceptance: not compared (PyTorch only" in shown_parity(result)
    # Eight times coarser than fp16.
    assert result["graphs"]["target"]["scaled_error"] > 5e-3
    assert result["graphs"]["target"]["range"]["limit"] == torch.finfo(torch.bfloat16).max


# An overflow.


def scaled_checkpoints(folder: Path, scale: float) -> tuple[Path, Path]:
    """The trained checkpoints with the target's second MLP scaled up inside and down again: the same function."""
    for role in ("target", "xpress"):
        shutil.copytree(CONFORMANCE / "qwen3-b4" / role, folder / role)
    path = folder / "target" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"] *= scale
    tensors["model.layers.1.mlp.down_proj.weight"] /= scale
    save_file(tensors, path, metadata={"format": "pt"})
    return folder / "target", folder / "xpress"


def test_overflow_that_onnx_runtime_hides(half: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = open_pair(*map(str, scaled_checkpoints(tmp_path, 2.0**15)))
    built = Built(copied(half, tmp_path / "copy").bundle, target, drafter)
    replace_half_graph(built, "target", monkeypatch)
    comparisons = compare(built)
    # The graph's own outputs are right, as its intermediate results are kept in fp32 …
    assert all(output.within(comparisons["target"].tolerance) for output in comparisons["target"].outputs.values())
    # … and are not on a GPU.
    assert {name for name, comparison in comparisons.items() if not comparison.passed} == {"target"}
    found = comparisons["target"].range
    assert found is not None
    assert found.overflow is not None
    assert (found.overflow.operator, found.overflow.module) in {("mul", "layers.1.mlp"), ("matmul", "layers.1.mlp.gate_up")}
    assert FP16_LARGEST < found.overflow.magnitude < 1e7
    result = {"graphs": {name: comparison.to_json(name) for name, comparison in comparisons.items()}, "target": {"passed": True}}
    (line,) = failures({**result, "generation": {"passed": True, "divergences": []}})
    assert line.startswith(f"graph target: {found.overflow.operator} in layers.1.mlp")
    assert line.endswith("build with --precision bf16")
    # bf16 has the range.
    in_bf16 = compare(built, Precision.BF16)
    assert all(comparison.passed for comparison in in_bf16.values())


# Other faults.


def replace_half_graph(built: Built, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Export a graph of the set again, all tensors inside: the weights file belongs to the others."""
    makers = graph_makers(built.target, built.drafter, built_options(built.bundle.manifest), Precision.FP16, AttentionForm.MASK)
    folder = built.bundle.folder / "exported"
    folder.mkdir()
    with monkeypatch.context() as patch, WeightStore(folder) as weights:
        patch.setattr(weights_module, "_MIN_EXTERNAL_BYTES", 2**40)
        export_graph(makers[name](), folder, weights, {}).path.replace(built.bundle.graph_path(SET, name))


@pytest.fixture
def copy(half: Built, tmp_path: Path) -> Built:
    return copied(half, tmp_path / "copy")


def test_wrong_scale(copy: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention scores a tenth too large."""
    attend = AttentionBounds.attend
    with monkeypatch.context() as patch:
        patch.setattr(AttentionBounds, "attend", lambda self, q, k, v, scale, cap: attend(self, q, k, v, 1.1 * scale, cap))
        replace_half_graph(copy, "target", monkeypatch)
    assert failing(copy) == {"target"}


@pytest.mark.parametrize(
    ("graph", "tensor"),
    [
        ("drafter", "layers.0.mlp.down.weight"),
        ("head", "_to_copy_1"),
        ("embed", "table"),
        ("refiner-k2", "drafted.refiner.in_hidden.weight"),
    ],
)
def test_one_changed_weight(copy: Built, graph: str, tensor: str) -> None:
    path = copy.bundle.graph_path(SET, graph)
    model = onnx.load(path)
    (entry,) = (initializer for initializer in model.graph.initializer if initializer.name == tensor)
    values = onnx.numpy_helper.to_array(entry).copy()
    values[3, 5] += 0.5
    entry.CopyFrom(onnx.numpy_helper.from_array(values, tensor))
    onnx.save(model, path)
    assert failing(copy) == {graph}


def test_drafter_that_no_longer_fits(copy: Built) -> None:
    """Its last norm turns everything around: output is what it was, and acceptance is not."""
    path = copy.bundle.graph_path(SET, "drafter")
    model = onnx.load(path)
    (entry,) = (initializer for initializer in model.graph.initializer if initializer.name == "norm.weight")
    entry.CopyFrom(onnx.numpy_helper.from_array(-onnx.numpy_helper.to_array(entry), entry.name))
    onnx.save(model, path)
    result = parity(copy)
    assert result["generation"]["passed"]
    found = failures(result)
    off = {line.split(":")[0] for line in found if line.startswith("acceptance")}
    assert off == {"acceptance K=2", "acceptance K=1", "acceptance K=0", "acceptance 2 draft steps"}
    assert not result["passed"]


def test_acceptance_needs_an_fp32_set(half: Built) -> None:
    alone = Bundle(half.bundle.folder, replace(half.bundle.manifest, graph_sets=(half_set(half.bundle),)))
    result = check_parity(alone, half.target, half.drafter, threads=1, max_new_tokens=4)[SET]
    assert result["acceptance"] == {"passed": True, "not_compared": "the bundle holds no fp32-length set"}
    assert result["passed"]


def test_options_of_a_bundle_are_those_it_was_built_with(half: Built) -> None:
    resolved = resolve_options(half.target, half.drafter, num_passes=(2, 1), capacity=96, prefill_chunk=16, sampling=False)
    assert built_options(half.bundle.manifest) == resolved
