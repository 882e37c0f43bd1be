"""The checks on parsed networks of the graphs between the models, and of the draft model: every planted fault is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto, helper

from tests.conftest import Built
from tests.engines.test_network import Model, assert_refused, check, computed_in, insert_before, nodes, spoil, widen


@pytest.fixture
def graphs(complete: Built, tmp_path: Path) -> Path:
    """A copy of the fp16 graphs, to be spoilt."""
    shutil.copytree(complete.bundle.folder / "graphs" / "fp16-mask", tmp_path / "graphs")
    return tmp_path / "graphs"


def in_half(model: Model, operator: str) -> list[Any]:
    """The nodes of an operator whose result is fp16."""
    half = {value.name for value in model.graph.value_info if value.type.tensor_type.elem_type == TensorProto.FLOAT16}
    return [node for node in nodes(model, operator) if node.output[0] in half]


# Precision.


@pytest.mark.parametrize("graph", ["refiner-k3-sampled", "refiner-k3-c8-sampled"])
@pytest.mark.parametrize("operator", ["Mul", "Add", "MatMul"])
@pytest.mark.parametrize("index", [0, -1])
def test_refinement_moved_to_fp32_is_no_noise(graph: str, operator: str, index: int, graphs: Path) -> None:
    """The operators that noise takes in fp32, but on half-precision values; in the first pass and in the last, which reads drawn tokens."""
    name = spoil(graphs / f"{graph}.onnx", lambda model: widen(model, in_half(model, operator)[index]))
    assert name is not None
    assert_refused(graphs / f"{graph}.onnx", f"of node {name} ({operator})", "computes in fp32, expected HALF")


def test_hidden_states_that_denoising_computes_with(graphs: Path) -> None:
    def double(model: Model) -> None:
        model.graph.node.insert(0, helper.make_node("Add", ["hidden", "hidden"], ["doubled"], name="node_double"))
        for node in model.graph.node[1:]:
            node.input[:] = ["doubled" if name == "hidden" else name for name in node.input]
        widen(model, model.graph.node[0])

    spoil(graphs / "denoise.onnx", double)
    assert_refused(graphs / "denoise.onnx", "node_double", "computes in fp32, expected HALF")


@pytest.mark.parametrize(
    ("graph", "operator"), [("sample", "Log"), ("accept-sampled", "Exp"), ("filter-top-p", "ReduceSum"), ("count", "Add")]
)
def test_half_precision_in_a_graph_that_has_none(graph: str, operator: str, graphs: Path) -> None:
    def narrow(model: Model) -> str:
        node = nodes(model, operator)[0]
        return computed_in(model, node, TensorProto.FLOAT16, TensorProto.FLOAT, 2 if operator == "Add" else 1)

    name = spoil(graphs / f"{graph}.onnx", narrow)
    assert name is not None
    assert_refused(graphs / f"{graph}.onnx", f"of node {name} ({operator})", "computes in HALF, expected FLOAT")


@pytest.mark.parametrize("graph", ["sample", "accept-candidates", "refiner-k0-sampled", "draft-step-sampled"])
def test_noise_in_32_bits_would_wrap_around(graph: str, graphs: Path) -> None:
    def shorten(model: Model) -> str:
        integers = {value.name for value in model.graph.value_info if value.type.tensor_type.elem_type == TensorProto.INT64}
        node = next(node for node in nodes(model, "Mul") if node.output[0] in integers and node.input[0] == node.input[1])
        return computed_in(model, node, TensorProto.INT32, TensorProto.INT64)

    name = spoil(graphs / f"{graph}.onnx", shorten)
    assert name is not None
    assert_refused(graphs / f"{graph}.onnx", f"of node {name} (Mul)", "integers of 32 bits, expected 64")


# What is updated in place.


def write_at_the_front(model: Model, position: str) -> None:
    node = nodes(model, "TensorScatter")[0]
    insert_before(model, node, helper.make_node("Sub", [position, position], ["zero"], name="node_zero"))
    model.graph.initializer.append(helper.make_tensor("front", TensorProto.INT64, [2], [0, 0]))
    node.input[2] = "front"


@pytest.mark.parametrize(("graph", "position"), [("store-taps", "start"), ("draft-decoder", "position")])
def test_rows_written_at_a_fixed_place(graph: str, position: str, graphs: Path) -> None:
    spoil(graphs / f"{graph}.onnx", lambda model: write_at_the_front(model, position))
    assert_refused(graphs / f"{graph}.onnx", "node_cache_update", f"rows that do not follow from the input {position}")


def test_a_store_that_only_passes_through(graphs: Path) -> None:
    def pass_through(model: Model) -> None:
        (node,) = nodes(model, "TensorScatter")
        node.op_type = "Identity"
        del node.input[1:], node.attribute[:]

    spoil(graphs / "store-taps.onnx", pass_through)
    assert_refused(graphs / "store-taps.onnx", "store")


def test_a_store_that_is_not_updated_in_place(graphs: Path) -> None:
    """The taps behind what was stored, as a new tensor."""

    def behind(model: Model) -> None:
        (node,) = nodes(model, "TensorScatter")
        num_rows = model.graph.input[0].type.tensor_type.shape.dim[2].dim_value
        model.graph.initializer.append(helper.make_tensor("to", TensorProto.INT64, [1], [num_rows]))
        model.graph.initializer.append(helper.make_tensor("from", TensorProto.INT64, [1], [0]))
        model.graph.initializer.append(helper.make_tensor("rows", TensorProto.INT64, [1], [2]))
        insert_before(model, node, helper.make_node("Concat", [node.input[1], node.input[0]], ["longer"], name="node_longer", axis=2))
        node.op_type, node.name = "Slice", "node_slice"
        node.input[:] = ["longer", "from", "to", "rows"]
        del node.attribute[:]

    spoil(graphs / "store-taps.onnx", behind)
    assert_refused(graphs / "store-taps.onnx", "node_longer", "CONCATENATION", "reads cache store", "no update in place")


def test_attention_of_the_draft_model_without_its_mask(graphs: Path) -> None:
    def drop(model: Model) -> None:
        node = nodes(model, "Attention")[1]
        node.input[3:] = []

    spoil(graphs / "draft-decoder.onnx", drop)
    assert_refused(graphs / "draft-decoder.onnx", "node_mask_attention_1", "neither a mask nor lengths", "cache bound was lost")


def test_the_unspoilt_copies_pass(graphs: Path) -> None:
    for graph in ("refiner-k3-sampled", "refiner-k3-c8-sampled", "denoise", "sample", "accept-sampled", "store-taps", "draft-decoder"):
        check(graphs / f"{graph}.onnx")
