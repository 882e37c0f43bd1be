"""The checks on a parsed network: the graphs pass, and every planted fault is refused in one line that names its layer."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from tests.conftest import Built
from xpress_engines.contract import read_contract
from xpress_engines.network import check_network
from xpress_engines.worker import _import_tensorrt
from xpress_export.graph_set import graph_makers
from xpress_export.graphs.exporter import export_graph
from xpress_export.graphs.weights import WeightStore
from xpress_export.options import resolve_options
from xpress_runtime.errors import CheckFailed
from xpress_runtime.sets import AttentionForm, Precision

Model = Any
Edit = Callable[[Model], str | None]


def check(path: Path, precision: str = "fp16", edit: Callable[[Any, Any], None] = lambda _trt, _network: None, **changes: Any) -> None:
    """Parse a graph file and check it; ``edit`` may change the network, and ``changes`` go into what its contract says."""
    trt = _import_tensorrt("tensorrt_rtx")
    from polygraphy.backend.trt import network_from_onnx_path

    _builder, network, _parser = network_from_onnx_path(str(path), strongly_typed=True)
    edit(trt, network)
    check_network(trt, network, replace(read_contract(path.stem, path), **changes), precision)


def assert_refused(path: Path, *named: str, precision: str = "fp16", **changes: Any) -> None:
    with pytest.raises(CheckFailed) as caught:
        check(path, precision, **changes)
    message = str(caught.value)
    assert "\n" not in message
    for part in (f"graph {path.stem}", "no engine was built", *named):
        assert part in message, message


@pytest.fixture
def graphs(half: Built, tmp_path: Path) -> Path:
    """A copy of the fp16 graphs, to be spoilt."""
    shutil.copytree(half.bundle.folder / "graphs" / "fp16-mask", tmp_path / "graphs")
    return tmp_path / "graphs"


def spoil(path: Path, edit: Edit) -> str | None:
    model = onnx.load(path, load_external_data=False)
    found = edit(model)
    onnx.save(model, path)
    return found


def nodes(model: Model, operator: str) -> list[Any]:
    return [node for node in model.graph.node if node.op_type == operator]


def insert_before(model: Model, node: Any, *new: Any) -> None:
    """Nodes must stand in the order of their values."""
    index = list(model.graph.node).index(node)
    for offset, added in enumerate(new):
        model.graph.node.insert(index + offset, added)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_every_graph_passes(precision: str, half: Built) -> None:
    graph_set = half.bundle.manifest.graph_set(f"{precision}-mask")
    models = {"embed", "target", "head", "drafter", "refiner-k2", "refiner-k0"}
    assert set(graph_set.graphs) == models | {"accept", "denoise", "lookup", "confidence", "store-taps"}
    for record in graph_set.graphs.values():
        check(half.bundle.folder / record.file, precision)


@pytest.mark.parametrize("graph", ["refiner-k1", "refiner-k3"])
def test_refiner_over_a_shortlist_passes(graph: str, half: Built, tmp_path: Path) -> None:
    options = resolve_options(half.target, half.drafter, num_passes=(1, 3), shortlists=(8,), capacity=64, sampling=False)
    make = graph_makers(half.target, half.drafter, options, Precision.FP16, AttentionForm.MASK)[f"{graph}-c8"]
    with WeightStore(tmp_path) as weights:
        check(export_graph(make(), tmp_path, weights, {}).path)


def test_every_graph_of_a_complete_bundle_passes(complete: Built) -> None:
    graphs = complete.bundle.manifest.graph_set("fp16-mask").graphs
    assert {"sample", "accept-candidates", "filter-top-p", "refiner-k3-c8-sampled", "draft-step-sampled", "draft-decoder"} < set(graphs)
    for record in graphs.values():
        check(complete.bundle.folder / record.file)


# Bounds.


@pytest.mark.parametrize("graph", ["target", "drafter"])
def test_graph_that_is_bounded_by_lengths_is_refused(graph: str, half: Built, tmp_path: Path) -> None:
    """The CPU's form, with caches of one length: the parser drops the lengths without a word."""
    options = resolve_options(half.target, half.drafter, capacity=64)
    make = graph_makers(half.target, half.drafter, options, Precision.FP16, AttentionForm.LENGTH)[graph]
    with WeightStore(tmp_path) as weights:
        path = export_graph(make(), tmp_path, weights, {}).path

    def fix_length(model: Model) -> None:
        del model.graph.value_info[:]
        for value in (*model.graph.input, *model.graph.output):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param == "cache_rows":
                    dim.dim_value = options.cache_rows

    spoil(path, fix_length)
    assert_refused(path, "node_length_attention", "neither a mask nor lengths", "cache bound was lost")


def drop_mask(model: Model, *, causal: int = 1) -> str:
    """The second attention node bounded by lengths and causality instead."""
    node = nodes(model, "Attention")[1]
    node.input[3:] = ["", "", "", "position"]
    node.attribute.append(helper.make_attribute("is_causal", causal))
    return str(node.name)


@pytest.mark.parametrize("causal", [0, 1])
def test_attention_without_its_mask(causal: int, graphs: Path) -> None:
    name = spoil(graphs / "target.onnx", lambda model: drop_mask(model, causal=causal))
    assert name == "node_mask_attention_1"
    assert_refused(graphs / "target.onnx", name, "neither a mask nor lengths", "cache bound was lost")


@pytest.mark.parametrize(("causal", "named"), [("UPPER_LEFT", "UPPER_LEFT"), ("LOWER_RIGHT", None), ("NONE", None)])
def test_lengths_set_on_the_network(causal: str, named: str | None, graphs: Path) -> None:
    spoil(graphs / "target.onnx", drop_mask)

    def bound(trt: Any, network: Any) -> None:
        layers = [network.get_layer(index) for index in range(network.num_layers)]
        layer = [layer for layer in layers if layer.type.name == "ATTENTION_INPUT"][1]
        layer.__class__ = trt.IAttentionBoundaryLayer
        position = next(tensor for tensor in map(network.get_input, range(network.num_inputs)) if tensor.name == "position")
        layer.attention.key_value_lengths = network.add_cast(position, trt.int32).get_output(0)
        layer.attention.causal_kind = getattr(trt.CausalMaskKind, causal)

    if named is None:
        check(graphs / "target.onnx", edit=bound)
    else:
        with pytest.raises(CheckFailed, match=named):
            check(graphs / "target.onnx", edit=bound)


@pytest.mark.parametrize("graph", ["target", "drafter"])
def test_mask_that_does_not_follow_from_the_position(graph: str, graphs: Path) -> None:
    def let_all_through(model: Model) -> str:
        node = nodes(model, "Attention")[0]
        cache_rows = next(value for value in model.graph.input if value.name == "key_cache.0").type.tensor_type.shape.dim[2].dim_value
        model.graph.initializer.append(helper.make_tensor("all", TensorProto.BOOL, [1, 1, 1, cache_rows], [True] * cache_rows))
        node.input[3] = "all"
        return str(node.name)

    name = spoil(graphs / f"{graph}.onnx", let_all_through)
    assert name is not None
    assert_refused(graphs / f"{graph}.onnx", name, "does not follow from the input")


def test_mask_that_is_weakened_on_the_way(graphs: Path) -> None:
    def weaken(model: Model) -> str:
        (compare,) = nodes(model, "LessOrEqual")
        everything = helper.make_node("Not", ["nothing"], ["everything"], name="everything")
        nothing = helper.make_node("Less", [compare.input[1], compare.input[1]], ["nothing"], name="nothing")
        weaker = helper.make_node("Or", ["bounded", "everything"], [compare.output[0]], name="weaker")
        compare.output[0] = "bounded"
        at = list(model.graph.node).index(compare) + 1
        for node in (weaker, everything, nothing):
            model.graph.node.insert(at, node)
        return "weaker"

    name = spoil(graphs / "target.onnx", weaken)
    assert name is not None
    assert_refused(graphs / "target.onnx", name, "takes part in the bound of", "it could be lost")


def test_mask_over_fewer_columns_than_the_cache_has(graphs: Path) -> None:
    contract = read_contract("target", graphs / "target.onnx")
    longer = {**contract.inputs}
    for index in range(contract.num_layers):
        cache = longer[f"key_cache.{index}"]
        longer[f"key_cache.{index}"] = replace(cache, dims=(*cache.dims[:2], 99, cache.dims[3]))
    assert_refused(graphs / "target.onnx", "node_mask_attention", "columns, expected the cache's 99 rows", inputs=longer)


def test_attention_that_became_something_else(graphs: Path) -> None:
    def forget(model: Model) -> None:
        node = nodes(model, "Attention")[0]
        node.op_type = "Identity"
        del node.input[1:], node.attribute[:]

    spoil(graphs / "target.onnx", forget)
    assert_refused(graphs / "target.onnx", "1 attention layers", "2 layers with caches")


def test_attention_node_without_a_layer(graphs: Path) -> None:
    assert_refused(graphs / "drafter.onnx", "node_gone", "did not become a fused attention layer", attention=("node_gone",))


# Caches.


def test_cache_update_by_selection(graphs: Path) -> None:
    """What an update looks like for one row without TensorScatter."""

    def select(model: Model) -> None:
        node = nodes(model, "TensorScatter")[2]
        cache, update, position = node.input
        cache_rows = next(value for value in model.graph.input if value.name == cache).type.tensor_type.shape.dim[2].dim_value
        model.graph.initializer.append(helper.make_tensor("columns", TensorProto.INT64, [1, 1, cache_rows, 1], range(cache_rows)))
        model.graph.initializer.append(helper.make_tensor("axes", TensorProto.INT64, [3], [1, 2, 3]))
        model.graph.initializer.append(helper.make_tensor("rows", TensorProto.INT64, [1], [2]))
        insert_before(
            model,
            node,
            helper.make_node("Unsqueeze", [position, "axes"], ["at"], name="node_at"),
            helper.make_node("Equal", ["columns", "at"], ["chosen"], name="node_chosen"),
            helper.make_node("ReduceMax", [update, "rows"], ["one"], name="node_one", keepdims=1),
        )
        node.op_type, node.name = "Where", "node_select"
        node.input[:] = ["chosen", "one", cache]
        del node.attribute[:]

    spoil(graphs / "target.onnx", select)
    assert_refused(graphs / "target.onnx", "node_select", "SELECT", "key_cache.1", "KV_CACHE_UPDATE")


def test_cache_that_only_passes_through(graphs: Path) -> None:
    def pass_through(model: Model) -> None:
        node = nodes(model, "TensorScatter")[1]
        node.op_type = "Identity"
        del node.input[1:], node.attribute[:]

    spoil(graphs / "target.onnx", pass_through)
    assert_refused(graphs / "target.onnx", "value_cache")


def test_cache_written_at_a_fixed_row(graphs: Path) -> None:
    def fix(model: Model) -> None:
        node = nodes(model, "TensorScatter")[0]
        insert_before(model, node, helper.make_node("Sub", ["position", "position"], ["zero"], name="node_zero"))
        model.graph.initializer.append(helper.make_tensor("front", TensorProto.INT64, [2], [0, 0]))
        node.input[2] = "front"

    spoil(graphs / "target.onnx", fix)
    assert_refused(graphs / "target.onnx", "node_cache_update", "rows that do not follow from the input position")


def test_keys_and_values_of_a_layer_swapped(graphs: Path) -> None:
    def swap(model: Model) -> None:
        node = nodes(model, "Attention")[1]
        node.input[1], node.input[2] = node.input[2], node.input[1]

    spoil(graphs / "target.onnx", swap)
    assert_refused(graphs / "target.onnx", "node_mask_attention_1", "attends to value_cache_out.1, expected key_cache_out.1")


@pytest.mark.parametrize("kind", ["key", "value"])
def test_cache_of_another_layer(kind: str, graphs: Path) -> None:
    def take_the_first(model: Model) -> None:
        nodes(model, "Attention")[1].input[1 if kind == "key" else 2] = f"{kind}_cache_out.0"

    spoil(graphs / "target.onnx", take_the_first)
    assert_refused(graphs / "target.onnx", "node_mask_attention_1", f"attends to {kind}_cache_out.0, expected {kind}_cache_out.1")


def test_outputs_of_two_caches_swapped(graphs: Path) -> None:
    def swap(model: Model) -> None:
        other = {"key_cache_out.0": "key_cache_out.1", "key_cache_out.1": "key_cache_out.0"}
        for node in model.graph.node:
            node.input[:] = [other.get(name, name) for name in node.input]
            node.output[:] = [other.get(name, name) for name in node.output]

    spoil(graphs / "target.onnx", swap)
    assert_refused(graphs / "target.onnx", "updates cache key_cache.0 and writes key_cache_out.1")


# Precision.


def computed_in(model: Model, node: Any, dtype: int, own: int, num_inputs: int | None = None) -> str:
    """Compute a node of type ``own`` in another, between casts of its inputs (or of the first ones) and of its output; returns its name."""
    taken = list(node.input)[:num_inputs]
    casts = [
        helper.make_node("Cast", [name], [f"{name}_cast"], name=f"node_cast_{place}", to=dtype)
        for place, name in enumerate(dict.fromkeys(taken))
    ]
    insert_before(model, node, *casts)
    output = node.output[0]
    node.input[: len(taken)] = [f"{name}_cast" for name in taken]
    node.output[0] = f"{output}_cast"
    place = list(model.graph.node).index(node) + 1
    model.graph.node.insert(place, helper.make_node("Cast", [node.output[0]], [output], name="node_cast_back", to=own))
    return str(node.name)


def widen(model: Model, node: Any) -> str:
    """Compute a node of a graph in half precision in fp32; returns its name."""
    return computed_in(model, node, TensorProto.FLOAT, TensorProto.FLOAT16)


@pytest.mark.parametrize(("graph", "operator", "index"), [("target", "MatMul", 3), ("target", "Add", -1), ("drafter", "MatMul", 2)])
def test_operator_moved_to_fp32(graph: str, operator: str, index: int, graphs: Path) -> None:
    name = spoil(graphs / f"{graph}.onnx", lambda model: widen(model, nodes(model, operator)[index]))
    assert name is not None
    assert_refused(graphs / f"{graph}.onnx", f"of node {name} ({operator})", "computes in fp32, expected HALF")


@pytest.mark.parametrize(("made", "said", "named"), [("bf16", "fp16", "BF16, expected HALF"), ("fp16", "bf16", "HALF, expected BF16")])
def test_another_half_precision(made: str, said: str, named: str, half: Built) -> None:
    path = half.bundle.folder / f"graphs/{made}-mask/target.onnx"
    assert_refused(path, "computes in", named, precision=said)


def test_input_or_output_of_another_type_or_name(graphs: Path) -> None:
    path = graphs / "head.onnx"
    contract = read_contract("head", path)
    logits = {**contract.outputs, "logits": replace(contract.outputs["logits"], dtype="HALF")}
    assert_refused(path, "output logits became FLOAT, expected HALF", outputs=logits)
    assert_refused(path, "input more is missing", inputs={**contract.inputs, "more": contract.inputs["rows"]})
    assert_refused(path, "output token is new", outputs={"logits": contract.outputs["logits"]})
