"""What an ONNX graph promises: inputs and outputs, attention nodes, caches. Read from the file without its weights.

Knows ONNX; knows nothing about TensorRT.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Element types of ONNX by the names that TensorRT has for them.
_DTYPES = {"FLOAT": "FLOAT", "FLOAT16": "HALF", "BFLOAT16": "BF16", "INT64": "INT64", "INT32": "INT32", "BOOL": "BOOL"}


@dataclass(frozen=True)
class Tensor:
    """Dims (a number, or the name of a dynamic dim) and the element type of an input or output."""

    dims: tuple[int | str, ...]
    dtype: str


@dataclass(frozen=True)
class GraphContract:
    """``operators`` maps each node's name to its operator; ``attention`` lists the attention nodes in order."""

    graph: str
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    operators: Mapping[str, str]
    attention: tuple[str, ...]

    @property
    def caches(self) -> dict[str, str]:
        """Every input that is updated in place (keys, values, stored taps), and the output that it is then."""
        found = {name: name.replace("_cache.", "_cache_out.") for name in self.inputs if "_cache." in name}
        return found | ({"store": "store_out"} if "store" in self.inputs else {})

    @property
    def num_layers(self) -> int:
        """Layers of attention that have a cache."""
        return sum(name.startswith("key_cache.") for name in self.inputs)

    @property
    def dynamic_inputs(self) -> dict[str, tuple[int | str, ...]]:
        return {name: tensor.dims for name, tensor in self.inputs.items() if any(isinstance(dim, str) for dim in tensor.dims)}


def read_contract(graph: str, path: Path) -> GraphContract:
    """The contract of the graph in a file."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    nodes = model.graph.node
    return GraphContract(
        graph,
        {value.name: _tensor(value) for value in model.graph.input},
        {value.name: _tensor(value) for value in model.graph.output},
        {node.name: node.op_type for node in nodes},
        tuple(node.name for node in nodes if node.op_type == "Attention"),
    )


def _tensor(value: Any) -> Tensor:
    import onnx

    tensor = value.type.tensor_type
    name = onnx.TensorProto.DataType.Name(tensor.elem_type)
    dims = tuple(dim.dim_param if dim.HasField("dim_param") else dim.dim_value for dim in tensor.shape.dim)
    return Tensor(dims, _DTYPES.get(name, name))
