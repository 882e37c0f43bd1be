"""Exported files of the tiny bundle: operators, opset, dims, metadata, weights; the masked form; and what the exporter refuses."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from tests.conftest import Built
from tests.models.close import assert_close
from tests.tiny import write_target
from xpress_export.checkpoints import open_target
from xpress_export.graph_set import graph_makers
from xpress_export.graphs.embed import embed_graph
from xpress_export.graphs.exporter import _check_file, export_graph
from xpress_export.graphs.head import head_graph
from xpress_export.graphs.spec import DYNAMIC_DIMS, GraphSpec, TensorSpec
from xpress_export.graphs.weights import WEIGHTS_FILE, WeightStore
from xpress_export.models.accept import Accept
from xpress_export.parity.graphs import built_options
from xpress_runtime.sets import AttentionForm, Precision

# Tested elsewhere: test_drafting_graphs.
OTHER_GRAPHS = ("denoise", "lookup", "confidence", "store-taps")
GRAPHS = ("accept", "refiner-k0", "refiner-k1", "refiner-k2", "refiner-k3", "embed", "head", "drafter", "target")
TARGET_LAYERS, DRAFTER_LAYERS = 3, 2
ALIGNMENT = 4096
MIN_EXTERNAL_BYTES = 16 * 1024
# Three layers in fp32, two libraries.
TOLERANCE = 1e-5

# Pieces of a norm, a rotation or an attention that did not stay one operator.
SPELLED_OUT = {"Pow", "Sqrt", "Reciprocal", "Sin", "Cos", "Softmax", "ScatterND", "ScatterElements", "LayerNormalization", "Neg"}


def graph_file(built: Built, name: str) -> Path:
    return built.bundle.graph_path("fp32-length", name)


def load(path: Path) -> onnx.ModelProto:
    return onnx.load(path, load_external_data=False)


def dims_of(value: onnx.ValueInfoProto) -> tuple[int | str, ...]:
    return tuple(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim)


def attribute(node: onnx.NodeProto, name: str) -> object:
    return next(onnx.helper.get_attribute_value(entry) for entry in node.attribute if entry.name == name)


def external(model: onnx.ModelProto) -> dict[str, dict[str, str]]:
    return {
        tensor.name: {entry.key: entry.value for entry in tensor.external_data}
        for tensor in model.graph.initializer
        if tensor.data_location == onnx.TensorProto.EXTERNAL
    }


# Operators.


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Per layer: two norms, and one each for queries and keys; the final norm; the drafter's context norm.
        ("target", {"Attention": TARGET_LAYERS, "TensorScatter": 2 * TARGET_LAYERS, "RMSNormalization": 4 * TARGET_LAYERS + 1}),
        ("drafter", {"Attention": DRAFTER_LAYERS, "TensorScatter": 2 * DRAFTER_LAYERS, "RMSNormalization": 4 * DRAFTER_LAYERS + 2}),
    ],
)
def test_models_are_made_of_single_operators(tiny: Built, name: str, expected: dict[str, int]) -> None:
    operators = Counter(node.op_type for node in load(graph_file(tiny, name)).graph.node)
    assert {kind: operators[kind] for kind in expected} == expected
    assert operators["RotaryEmbedding"] == 2 * expected["Attention"]
    # Packed products: qkv, output, gate and up, down. The drafter's queries are a product of their own, and fc comes on top.
    products = 4 * TARGET_LAYERS if name == "target" else 5 * DRAFTER_LAYERS + 1
    assert operators["MatMul"] + operators["Gemm"] == products


@pytest.mark.parametrize("name", GRAPHS)
def test_nothing_is_spelled_out(tiny: Built, name: str) -> None:
    model = load(graph_file(tiny, name))
    assert not {node.op_type for node in model.graph.node} & SPELLED_OUT
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 24)]
    assert {node.domain for node in model.graph.node} == {""}
    assert not model.functions


def test_manifest_counts_operators(tiny: Built) -> None:
    for name, record in tiny.bundle.manifest.graph_set("fp32-length").graphs.items():
        assert record.operators == Counter(node.op_type for node in load(tiny.bundle.folder / record.file).graph.node), name


def test_length_form_is_bounded_by_lengths(tiny: Built) -> None:
    for name, causal in (("target", 1), ("drafter", 0)):
        nodes = [node for node in load(graph_file(tiny, name)).graph.node if node.op_type == "Attention"]
        for node in nodes:
            # Query, key, value; no mask, no past; lengths. One output: presents beside lengths are invalid.
            assert [bool(value) for value in node.input] == [True, True, True, False, False, False, True]
            assert len(node.output) == 1
            assert attribute(node, "is_causal") == causal
            assert attribute(node, "scale") == pytest.approx(12**-0.5)


# The contract.


def test_graphs_of_a_set(tiny: Built) -> None:
    assert set(tiny.bundle.manifest.graph_set("fp32-length").graphs) == {*GRAPHS, *OTHER_GRAPHS}


CACHE = ("batch", 2, "cache_rows", 12)
# Of capacity 64, chunk 8 and block 4: 76, rounded up.
MASKED_CACHE_ROWS = 80


def caches(prefix: str, num_layers: int) -> dict[str, tuple[int | str, ...]]:
    return {f"{kind}_{prefix}.{layer}": CACHE for kind in ("key", "value") for layer in range(num_layers)}


def contract(name: str) -> tuple[dict[str, tuple[int | str, ...]], dict[str, tuple[int | str, ...]]]:
    """Inputs and outputs as design and plan have them: block 4, hidden 40, vocabulary 61, two taps, capacity 64 + 8 + 4."""
    row: tuple[int | str, ...] = ("batch",)
    match name:
        case "embed":
            return {"ids": ("batch", "tokens")}, {"embeddings": ("batch", "tokens", 40)}
        case "target":
            return (
                {"embeddings": ("batch", "tokens", 40), "position": row, **caches("cache", TARGET_LAYERS)},
                {"hidden": ("batch", "tokens", 40), "taps": ("batch", "tokens", 80), **caches("cache_out", TARGET_LAYERS)},
            )
        case "head":
            return (
                {"hidden": ("batch", "tokens", 40), "rows": ("batch", "rows")},
                {"logits": ("batch", "rows", 61), "token": ("batch", "rows")},
            )
        case "drafter":
            positions = {"context_position": row, "block_position": row}
            return (
                {"embeddings": ("batch", 4, 40), "taps": ("batch", "tokens", 80), **positions, **caches("cache", DRAFTER_LAYERS)},
                {"hidden": ("batch", 4, 40), **caches("cache_out", DRAFTER_LAYERS)},
            )
        case "accept":
            verified = ("batch", "verified")
            state = ("next_anchor", "next_predecessor", "next_position", "context_position", "next_active")
            return (
                {"verify_ids": verified, "target_tokens": verified, "position": row, "predecessor": row, "active": row},
                {"accepted": row, "tokens": verified, "num_emitted": row, "block_ids": ("batch", 4), **dict.fromkeys(state, row)},
            )
    refined = {} if name == "refiner-k0" else {"refined_logits": ("batch", 3, 61)}
    inputs = {"hidden": ("batch", 4, 40), "base_logits": ("batch", 3, 61), "anchor": row, "predecessor": row}
    return inputs, {"verify_ids": ("batch", 4), **refined}


@pytest.mark.parametrize("name", GRAPHS)
def test_inputs_outputs_and_dims(tiny: Built, name: str) -> None:
    graph = load(graph_file(tiny, name)).graph
    inputs, outputs = contract(name)
    assert {value.name: dims_of(value) for value in graph.input} == inputs
    assert {value.name: dims_of(value) for value in graph.output} == outputs
    integers = {"ids", "rows", "token", "tokens", "verify_ids", "target_tokens", "anchor", "predecessor", "position", "active"}
    integers |= {"accepted", "num_emitted", "block_ids", "context_position", "block_position"}
    for value in (*graph.input, *graph.output):
        is_integer = value.name.removeprefix("next_") in integers
        assert value.type.tensor_type.elem_type == (onnx.TensorProto.INT64 if is_integer else onnx.TensorProto.FLOAT), value.name


@pytest.mark.parametrize("name", GRAPHS)
def test_shape_inference_finds_every_output(tiny: Built, name: str) -> None:
    """With the declared shapes taken away: rank and fixed dims must follow from the operators."""
    model = load(graph_file(tiny, name))
    declared = {value.name: dims_of(value) for value in model.graph.output}
    del model.graph.value_info[:]
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    for value in inferred.graph.output:
        assert value.type.tensor_type.HasField("shape"), value.name
        found = dims_of(value)
        assert len(found) == len(declared[value.name])
        assert all(have == want for have, want in zip(found, declared[value.name], strict=True) if isinstance(want, int)), value.name


@pytest.mark.parametrize("name", GRAPHS)
def test_metadata(tiny: Built, name: str) -> None:
    metadata = {entry.key: entry.value for entry in load(graph_file(tiny, name)).metadata_props}
    assert metadata == {
        "xpress.graph": name,
        "xpress.format_version": "1",
        "xpress.target": tiny.target.identity(),
        "xpress.drafter": tiny.drafter.identity(),
        "xpress.precision": "fp32",
        "xpress.attention_form": "length",
    }


@pytest.mark.parametrize("name", GRAPHS)
def test_file_names_no_place_of_the_machine(tiny: Built, name: str) -> None:
    content = graph_file(tiny, name).read_bytes()
    for place in (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), str(tiny.bundle.folder), str(Path.home())):
        assert place.encode() not in content
    for note in (rb"\.py\b", rb"stack_trace", rb"line \d", rb"pkg\.torch", rb"namespace"):
        assert not re.search(note, content)
    model = load(graph_file(tiny, name))
    assert not any(node.metadata_props or node.doc_string for node in model.graph.node)
    assert not any(tensor.doc_string for tensor in model.graph.initializer)


def test_frozen_row_still_fits_the_caches(tiny: Built) -> None:
    """Every graph runs on frozen rows too, round after round, as long as another row goes on."""
    options = built_options(tiny.bundle.manifest)
    accept = graph_makers(tiny.target, tiny.drafter, options, Precision.FP32, AttentionForm.LENGTH)["accept"]().module
    assert isinstance(accept, Accept)
    width = accept.block_size
    position = context = torch.tensor([accept.last_start])
    active, tokens = torch.tensor([1]), torch.arange(width)[None]
    for _ in range(3):
        # The drafter writes as many context rows as were verified, and a block; the target a block.
        assert int(context) + 2 * width <= options.cache_rows
        assert int(position) + width <= options.cache_rows
        block = accept(tokens - 1, tokens, position, tokens[:, 0], active)
        position, context, active = block.position, block.context_position, block.active
    assert int(active) == 0
    assert accept.last_start >= options.capacity


# Weights.


def weight_ranges(folder: Path) -> Iterator[tuple[int, int, str]]:
    for path in sorted(folder.glob("*.onnx")):
        for tensor, reference in external(load(path)).items():
            assert reference["location"] == WEIGHTS_FILE
            yield int(reference["offset"]), int(reference["length"]), f"{path.stem}: {tensor}"


def assert_stored_once(folder: Path) -> None:
    ranges = list(weight_ranges(folder))
    assert ranges
    content = (folder / WEIGHTS_FILE).read_bytes()
    distinct = {(offset, length) for offset, length, _ in ranges}
    assert all(offset % ALIGNMENT == 0 and length >= MIN_EXTERNAL_BYTES for offset, length in distinct)
    assert len({content[offset : offset + length] for offset, length in distinct}) == len(distinct)
    # Page after page, nothing between and nothing behind.
    assert len(content) == sum(-(-length // ALIGNMENT) * ALIGNMENT for _, length in distinct)


def test_weights_are_stored_once(tiny: Built) -> None:
    folder = graph_file(tiny, "target").parent
    assert_stored_once(folder)
    for path in folder.glob("*.onnx"):
        model = load(path)
        inline = [tensor for tensor in model.graph.initializer if tensor.name not in external(model)]
        assert all(len(onnx.numpy_helper.to_array(tensor).tobytes()) < MIN_EXTERNAL_BYTES for tensor in inline)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_tables_are_stored_once(tied: bool, tmp_path: Path) -> None:
    write_target(tmp_path / "target", vocab_size=131, tie_word_embeddings=tied)
    target = open_target(str(tmp_path / "target"))
    with WeightStore(tmp_path) as weights:
        embed = export_graph(embed_graph(target.embedding()), tmp_path, weights, {})
        head = export_graph(head_graph(target.head()), tmp_path, weights, {})
    (table,), (other,) = (external(load(graph.path)).values() for graph in (embed, head))
    assert (other == table) == tied
    assert_stored_once(tmp_path)
    size = 131 * 40 * 4
    assert (tmp_path / WEIGHTS_FILE).stat().st_size == (1 if tied else 2) * -(-size // ALIGNMENT) * ALIGNMENT


def test_weights_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / WEIGHTS_FILE).write_bytes(b"weights of another set")
    with pytest.raises(FileExistsError):
        WeightStore(tmp_path)
    assert (tmp_path / WEIGHTS_FILE).read_bytes() == b"weights of another set"


# Checks.


@pytest.mark.parametrize("name", GRAPHS)
def test_checker_passes(tiny: Built, name: str) -> None:
    onnx.checker.check_model(graph_file(tiny, name), full_check=True)


def wrong_type(model: onnx.ModelProto) -> None:
    """Only inference over the whole graph sees this: every node on its own is valid."""
    model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.INT64


def unknown_input(model: onnx.ModelProto) -> None:
    model.graph.node[0].input[0] = "nowhere"


def unknown_operator(model: onnx.ModelProto) -> None:
    model.graph.node[0].op_type = "FusedEverything"


@pytest.mark.parametrize("corrupt", [wrong_type, unknown_input, unknown_operator])
def test_corrupted_graph_fails_the_check(tiny: Built, corrupt: Callable[[onnx.ModelProto], None], tmp_path: Path) -> None:
    model = load(graph_file(tiny, "drafter"))
    path = tmp_path / "drafter.onnx"
    onnx.save(model, path)
    _check_file(path)
    corrupt(model)
    onnx.save(model, path)
    with pytest.raises((onnx.checker.ValidationError, onnx.shape_inference.InferenceError)):
        _check_file(path)


class Twice(nn.Module):
    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        return states + 1, states * 2


STATES = TensorSpec("states", ("B", 3), torch.float32)


@pytest.mark.parametrize("outputs", [("sum",), ("sum", "product", "third")])
def test_another_signature_is_refused(outputs: tuple[str, ...], tmp_path: Path) -> None:
    spec = GraphSpec("twice", Twice(), (STATES,), tuple(TensorSpec(name, ("B", 3), torch.float32) for name in outputs))
    with WeightStore(tmp_path) as weights, pytest.raises(RuntimeError, match="graph twice came out of the trace with inputs and outputs"):
        export_graph(spec, tmp_path, weights, {})
    assert not (tmp_path / "twice.onnx").exists()


# The masked form.


@pytest.fixture(scope="module")
def masked(tiny: Built, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, GraphSpec]]:
    """Target and drafter of the tiny checkpoints in masked form."""
    folder = tmp_path_factory.mktemp("masked")
    makers = graph_makers(tiny.target, tiny.drafter, built_options(tiny.bundle.manifest), Precision.FP32, AttentionForm.MASK)
    specs = {name: makers[name]() for name in ("target", "drafter")}
    with WeightStore(folder) as weights:
        for spec in specs.values():
            export_graph(spec, folder, weights, {})
    return folder, specs


@pytest.mark.parametrize(("name", "rows"), [("target", "tokens"), ("drafter", 4)])
def test_masked_form_has_a_mask_and_no_lengths(masked: tuple[Path, dict[str, GraphSpec]], name: str, rows: int | str) -> None:
    model = onnx.shape_inference.infer_shapes(load(masked[0] / f"{name}.onnx"), data_prop=True)
    nodes = [node for node in model.graph.node if node.op_type == "Attention"]
    assert len(nodes) == (TARGET_LAYERS if name == "target" else DRAFTER_LAYERS)
    values = {value.name: value for value in model.graph.value_info}
    for node in nodes:
        assert len(node.input) == 4 and all(node.input)
        assert len(node.output) == 1
        assert "is_causal" not in {entry.name for entry in node.attribute} or attribute(node, "is_causal") == 0
        mask = values[node.input[3]]
        assert mask.type.tensor_type.elem_type == onnx.TensorProto.BOOL
        assert dims_of(mask) == ("batch", 1, rows, MASKED_CACHE_ROWS)
    for values_of, dims in zip((model.graph.input, model.graph.output), contract(name), strict=True):
        fixed = {value: tuple(MASKED_CACHE_ROWS if dim == "cache_rows" else dim for dim in shape) for value, shape in dims.items()}
        assert {value.name: dims_of(value) for value in values_of} == fixed


def feed_of(spec: GraphSpec, batch: int, num_tokens: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(batch + num_tokens)
    sizes = dict.fromkeys(DYNAMIC_DIMS, 0) | {"B": batch, "S": num_tokens, "N": MASKED_CACHE_ROWS}
    feed = {
        tensor.name: torch.randn(tensor.shape(sizes), generator=generator)
        for tensor in spec.flat_inputs()
        if tensor.dtype.is_floating_point
    }
    position = torch.arange(batch) * 7 + 3
    if spec.name == "target":
        return feed | {"position": position}
    return feed | {"context_position": position, "block_position": position + torch.arange(batch) % (num_tokens + 1)}


@pytest.mark.parametrize("name", ["target", "drafter"])
def test_masked_form_computes_the_same(tiny: Built, masked: tuple[Path, dict[str, GraphSpec]], name: str) -> None:
    folder, specs = masked
    spec = specs[name]
    by_mask = onnxruntime.InferenceSession(folder / f"{name}.onnx", providers=["CPUExecutionProvider"])
    options = onnxruntime.SessionOptions()
    # It warns that caches are copied, which they are here.
    options.log_severity_level = 3
    by_length = onnxruntime.InferenceSession(graph_file(tiny, name), options, providers=["CPUExecutionProvider"])
    for batch, num_tokens in ((1, 1), (2, 5), (3, 2), (1, 8)):
        inputs = feed_of(spec, batch, num_tokens)
        feed = {tensor: values.numpy() for tensor, values in inputs.items()}
        arguments = [inputs[entry.name] if isinstance(entry, TensorSpec) else [inputs[one.name] for one in entry] for entry in spec.inputs]
        with torch.no_grad():
            eager = spec.module(*arguments)
        found = by_mask.run(None, feed)
        assert_close(found[0], eager[0], TOLERANCE)
        for output, same in zip(found, by_length.run(None, feed), strict=True):
            assert_close(output, same, TOLERANCE)
        # The random caches were seen: without them the result is another.
        blank = {tensor: np.zeros_like(values) if "_cache." in tensor else values for tensor, values in feed.items()}
        assert np.abs(by_mask.run(None, blank)[0] - found[0]).max() > 1e-2


def test_specs_of_both_forms_differ_in_the_length_of_caches_only(tiny: Built) -> None:
    options = built_options(tiny.bundle.manifest)
    by_form = [graph_makers(tiny.target, tiny.drafter, options, Precision.FP32, form) for form in AttentionForm]
    for name in GRAPHS:
        length, mask = (makers[name]() for makers in by_form)
        sizes = {"B": 2, "S": 3, "R": 4, "W": 5, "N": MASKED_CACHE_ROWS}
        for one, other in zip((*length.flat_inputs(), *length.outputs), (*mask.flat_inputs(), *mask.outputs), strict=True):
            assert (one.name, one.dtype, one.shape(sizes)) == (other.name, other.dtype, other.shape(sizes))
