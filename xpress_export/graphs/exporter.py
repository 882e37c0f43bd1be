"""Traces a graph's module to an ONNX file, checks it and counts its operators.

Knows torch.onnx and ONNX; knows nothing about what the graphs compute.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir as ir
import torch

from xpress_export.graphs.spec import DYNAMIC_DIMS, GraphSpec, TensorSpec
from xpress_export.graphs.translations import OPSET, TRANSLATIONS
from xpress_export.graphs.weights import WeightStore

# Traced models of graphs without weights, by the digest of what they follow from.
_TRACED: dict[str, bytes] = {}
# Sizes to trace with. None is 0 or 1, which torch.export would fix, and all differ, so that no two dims are taken for one.
_TRACE_SIZES = {"B": 2, "S": 5, "R": 3, "W": 4, "N": 24, "Q": 6}


@dataclass(frozen=True)
class ExportedGraph:
    """A graph file and its operator counts."""

    path: Path
    operators: dict[str, int]


def export_graph(spec: GraphSpec, folder: Path, weights: WeightStore, metadata: Mapping[str, str]) -> ExportedGraph:
    """Write ``<folder>/<name>.onnx`` with its large tensors in ``weights``; raises what torch.onnx and onnx.checker raise."""
    has_weights = next(spec.module.parameters(), None) is not None
    model = _trace(spec) if has_weights else _trace_once(spec)
    _check_signature(model, spec)
    _strip_trace(model)
    model.graph.name = spec.name
    model.metadata_props.update({**metadata, "xpress.graph": spec.name})
    weights.externalize(model)
    path = folder / f"{spec.name}.onnx"
    ir.save(model, path)
    _check_file(path)
    return ExportedGraph(path, dict(sorted(Counter(node.op_type for node in model.graph).items())))


def _trace_once(spec: GraphSpec) -> ir.Model:
    """A graph that follows from sizes alone, traced once for all precisions and bundles of a process: tracing is what takes time."""
    key = _sizes_digest(spec)
    if key not in _TRACED:
        _TRACED[key] = ir.to_proto(_trace(spec)).SerializeToString()
    model: ir.Model = ir.from_proto(onnx.load_model_from_string(_TRACED[key]))
    return model


def _sizes_digest(spec: GraphSpec) -> str:
    """All that a module without weights computes from: its parts, their settings and tables, and the graph's contract."""
    digest = hashlib.sha256(repr((spec.name, spec.inputs, spec.outputs)).encode())
    for name, part in spec.module.named_modules():
        settings = {key: value for key, value in vars(part).items() if isinstance(value, int | float | str)}
        digest.update(repr((name, type(part).__qualname__, sorted(settings.items()))).encode())
    for name, table in spec.module.named_buffers():
        digest.update(repr((name, table.shape, table.dtype)).encode() + table.numpy().tobytes())
    return digest.hexdigest()


def _trace(spec: GraphSpec) -> ir.Model:
    dims = {letter: torch.export.Dim(name, min=1) for letter, name in DYNAMIC_DIMS.items()}

    def example(tensor: TensorSpec) -> torch.Tensor:
        return torch.zeros(tensor.shape(_TRACE_SIZES), dtype=tensor.dtype)

    def dynamic(tensor: TensorSpec) -> dict[int, torch.export.Dim]:
        return {axis: dims[dim] for axis, dim in enumerate(tensor.dims) if isinstance(dim, str)}

    args = tuple(example(e) if isinstance(e, TensorSpec) else [example(t) for t in e] for e in spec.inputs)
    shapes = tuple(dynamic(e) if isinstance(e, TensorSpec) else [dynamic(t) for t in e] for e in spec.inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            spec.module.eval(),
            args,
            dynamo=True,
            opset_version=OPSET,
            dynamic_shapes=shapes,
            input_names=[tensor.name for tensor in spec.flat_inputs()],
            output_names=[tensor.name for tensor in spec.outputs],
            custom_translation_table=TRANSLATIONS,
            verbose=False,
        )
    assert program is not None
    model: ir.Model = program.model
    return model


def _strip_trace(model: ir.Model) -> None:
    """Remove the exporter's notes: on each node source lines with paths of the machine that built the graph, ten times the graph's size."""
    model.graph.metadata_props.clear()
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()


def _check_signature(model: ir.Model, spec: GraphSpec) -> None:
    found = [value.name for value in model.graph.inputs], [value.name for value in model.graph.outputs]
    wanted = [tensor.name for tensor in spec.flat_inputs()], [tensor.name for tensor in spec.outputs]
    if found != wanted:
        raise RuntimeError(f"graph {spec.name} came out of the trace with inputs and outputs {found}, expected {wanted}")


def _check_file(path: Path) -> None:
    onnx.checker.check_model(path, full_check=True)
