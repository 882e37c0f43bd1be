"""Traces a graph's module to an ONNX file, checks it and counts its operators.

Knows torch.onnx and ONNX; knows nothing about what the graphs compute.
"""

from __future__ import annotations

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

# Sizes to trace with. None is 0 or 1, which torch.export would fix, and all differ, so that no two dims are taken for one.
_TRACE_SIZES = {"B": 2, "S": 5, "R": 3, "W": 4, "N": 24, "Q": 6}


@dataclass(frozen=True)
class ExportedGraph:
    """A graph file and its operator counts."""

    path: Path
    operators: dict[str, int]


def export_graph(spec: GraphSpec, folder: Path, weights: WeightStore, metadata: Mapping[str, str]) -> ExportedGraph:
    """Write ``<folder>/<name>.onnx`` with its large tensors in ``weights``; raises what torch.onnx and onnx.checker raise."""
    program = _trace(spec)
    model = program.model
    _check_signature(model, spec)
    _strip_trace(model)
    model.graph.name = spec.name
    model.metadata_props.update({**metadata, "xpress.graph": spec.name})
    weights.externalize(model)
    path = folder / f"{spec.name}.onnx"
    ir.save(model, path)
    _check_file(path)
    return ExportedGraph(path, dict(sorted(Counter(node.op_type for node in model.graph).items())))


def _trace(spec: GraphSpec) -> torch.onnx.ONNXProgram:
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
    return program


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
