"""Checks on a parsed network, before it is built: it must compute what the graph says, or no engine comes of it.

TensorRT's parser drops what it does not know without a word. So every attention layer must be bounded, every cache updated in place by a
cache update layer, and nothing may run in another precision than the graph's. Works on the network's own objects; knows nothing about
profiles.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from xpress_engines.contract import GraphContract
from xpress_runtime.errors import CheckFailed


@dataclass(frozen=True)
class Fp32Island:
    """An operator that computes in fp32 in a half-precision graph. With ``reads`` only where it reads that input of the graph as it is,
    with ``follows`` only where it is computed from that input and nothing in half precision lies between.
    """

    graph: str
    operator: str
    reads: str | None
    reason: str
    follows: str | None = None


_SCORES = "logits are fp32"
_NOISE = "noise is drawn for fp32 logits: a draw in half precision would have other odds"

# All of fp32 that a graph with half-precision tensors may have.
FP32_ISLANDS = (
    Fp32Island("*", "RMSNormalization", None, "the sum of squares of a norm leaves the range of fp16"),
    *(
        island
        for graph in ("head", "base-head", "draft-head")
        for island in (
            Fp32Island(graph, "Gemm", "hidden", "logits of a half-precision product lie on a grid so coarse that they tie"),
            # A family's scale and cap, and the best.
            *(Fp32Island(graph, operator, None, _SCORES) for operator in ("Mul", "Div", "Tanh", "ArgMax")),
        )
    ),
    Fp32Island("drafter", "MatMul", "taps", "taps of real models exceed 2e4, and their sum the range of fp16"),
    Fp32Island("refiner-k*", "Add", "base_logits", _SCORES),
    Fp32Island("refiner-k*", "ArgMax", None, _SCORES),
    Fp32Island("refiner-k*", "TopK", None, _SCORES),
    Fp32Island("refiner-k*", "ReduceSum", None, "the mixer's sum over the block's slots"),
    # Noise is computed from the key, and meets logits that were scaled by the temperature.
    *(
        Fp32Island("refiner-k*-sampled", operator, None, _NOISE, follows="noise_key")
        for operator in ("Add", "Mul", "Sub", "Neg", "Log", "Clip", "Less")
    ),
    Fp32Island("refiner-k*-sampled", "Mul", None, _SCORES, follows="inverse_temperature"),
    # The confidence of each slot, and how they rank.
    *(
        Fp32Island("denoise", operator, None, _SCORES, follows="base_logits")
        for operator in ("Softmax", "ReduceMax", "Greater", "Equal", "ArgMax")
    ),
)

# Graphs that are fp32 in every precision, inputs and outputs included, and have no weights: nothing in them may be of another one.
FP32_GRAPHS = {
    "sample": _NOISE,
    "draft-step": _SCORES,
    "draft-step-sampled": _NOISE,
    "accept-sampled": "probabilities of two models are compared: their quotient decides",
    "accept-candidates": "probabilities of two models are compared: their quotient decides",
    "filter-top-k": "a limit is a threshold among logits, of which half precision would make many equal",
    "filter-top-p": "a sum over the vocabulary, and a threshold among logits",
    "penalise": _SCORES,
    "count": "counts are added to logits",
    "confidence": _SCORES,
    "lookup": "its confidences are compared with those of other drafters",
}

# The input from which the bound of each graph's attention follows, and the one from which its caches are written.
_BOUND_BY = {"target": "position", "drafter": "block_position", "draft-decoder": "position"}
_WRITTEN_FROM = {"target": "position", "drafter": "context_position", "draft-decoder": "position", "store-taps": "start"}

# Layers that move values and compute none. A cast computes nothing by itself: what reads it shows in its own inputs.
_MOVING = {
    "CONSTANT",
    "CAST",
    "SHUFFLE",
    "SLICE",
    "CONCATENATION",
    "GATHER",
    "SQUEEZE",
    "UNSQUEEZE",
    "IDENTITY",
    "SHAPE",
    "FILL",
    "SELECT",
}
# What the bound of attention is made of: columns compared with positions, and in layers with a window with where that begins.
_BOUNDING = {
    "Add",
    "And",
    "Cast",
    "Concat",
    "Constant",
    "Expand",
    "Gather",
    "Greater",
    "Identity",
    "Less",
    "LessOrEqual",
    "Range",
    "Reshape",
    "Shape",
    "Slice",
    "Squeeze",
    "Sub",
    "Unsqueeze",
}
_FLOATS = {"FLOAT", "HALF", "BF16"}
_HALVES = {"HALF", "BF16"}
_ARITHMETIC = {"ELEMENTWISE", "UNARY", "REDUCE", "CUMULATIVE"}
PRECISIONS = {"fp32": "FLOAT", "fp16": "HALF", "bf16": "BF16"}


def check_network(trt: Any, network: Any, contract: GraphContract, precision: str) -> None:
    """CheckFailed, in one line that names graph and layer, unless the network is what ``contract`` and ``precision`` say."""
    parsed = _Parsed(trt, network, contract)
    _check_signature(parsed)
    _check_precision(parsed, "FLOAT" if contract.graph in FP32_GRAPHS else PRECISIONS[precision])
    _check_integers(parsed)
    _check_caches(parsed)
    if contract.num_layers or contract.attention:
        _check_attention(parsed)


class _Parsed:
    """The layers of a network by what they read and write."""

    def __init__(self, trt: Any, network: Any, contract: GraphContract) -> None:
        self.trt = trt
        self.network = network
        self.contract = contract
        self.layers = [network.get_layer(index) for index in range(network.num_layers)]
        self.producers: dict[str, Any] = {}
        self.readers: dict[str, list[Any]] = {}
        for layer in self.layers:
            for tensor in outputs(layer):
                self.producers[tensor.name] = layer
            for tensor in inputs(layer):
                self.readers.setdefault(tensor.name, []).append(layer)

    def fails(self, layer: Any, what: str) -> CheckFailed:
        node = node_name(layer)
        origin = f" of node {node} ({self.contract.operators.get(node, 'unknown')})" if node else ""
        return CheckFailed(f"graph {self.contract.graph}: layer {layer.name}{origin} {what}; no engine was built")

    def graph_fails(self, what: str) -> CheckFailed:
        return CheckFailed(f"graph {self.contract.graph}: {what}; no engine was built")

    def depends_on(self, tensor: Any, name: str) -> bool:
        """Whether the tensor is computed from the network input ``name``."""
        waiting, seen = [tensor], set()
        while waiting:
            one = waiting.pop()
            if one.name == name:
                return True
            if one.name in seen or one.name not in self.producers:
                continue
            seen.add(one.name)
            waiting += inputs(self.producers[one.name])
        return False

    def follows(self, tensor: Any, name: str) -> bool:
        """Whether the tensor is computed from the network input ``name`` without anything in half precision between."""
        waiting, seen = [tensor], set()
        while waiting:
            one = waiting.pop()
            if one.name == name:
                return True
            if one.name not in seen and one.dtype.name not in _HALVES and one.name in self.producers:
                waiting += inputs(self.producers[one.name])
            seen.add(one.name)
        return False

    def computed_by(self, tensor: Any) -> list[Any]:
        """Every layer that the tensor is computed by, from the network's inputs on."""
        waiting, found = [tensor], {}
        while waiting:
            layer = self.producers.get(waiting.pop().name)
            if layer is not None and layer.name not in found:
                found[layer.name] = layer
                waiting += inputs(layer)
        return list(found.values())

    def moved_from(self, tensor: Any) -> set[str]:
        """Names of the inputs and results whose values the tensor holds, rearranged at most."""
        waiting, names = [tensor], set()
        while waiting:
            one = waiting.pop()
            layer = self.producers.get(one.name)
            names.add(one.name)
            if layer is not None and kind(layer) in (*_MOVING, "TOPK"):
                waiting += [source for source in inputs(layer) if source.dtype.name in _FLOATS and source.name not in names]
        return names


def kind(layer: Any) -> str:
    name: str = layer.type.name
    return name


def node_name(layer: Any) -> str:
    """The ONNX node that a layer comes from; empty for the parser's helper layers."""
    found = re.fullmatch(r"\[ONNX Layer: (.*)\]", layer.metadata)
    return found[1] if found else ""


def contract_operator(parsed: _Parsed, layer: Any) -> str:
    """The ONNX operator that a layer comes from; empty for the parser's helper layers."""
    return parsed.contract.operators.get(node_name(layer), "")


def inputs(layer: Any) -> list[Any]:
    return [tensor for index in range(layer.num_inputs) if (tensor := layer.get_input(index)) is not None]


def outputs(layer: Any) -> Iterator[Any]:
    return (layer.get_output(index) for index in range(layer.num_outputs))


def _check_signature(parsed: _Parsed) -> None:
    network, contract = parsed.network, parsed.contract
    for what, promised, found in (
        ("input", contract.inputs, [network.get_input(index) for index in range(network.num_inputs)]),
        ("output", contract.outputs, [network.get_output(index) for index in range(network.num_outputs)]),
    ):
        if (names := {tensor.name for tensor in found}) != set(promised):
            different = sorted(names ^ set(promised))[0]
            raise parsed.graph_fails(f"{what} {different} is {'missing from' if different in promised else 'new in'} the parsed network")
        for tensor in found:
            if tensor.dtype.name != promised[tensor.name].dtype:
                raise parsed.graph_fails(f"{what} {tensor.name} became {tensor.dtype.name}, expected {promised[tensor.name].dtype}")


def _check_precision(parsed: _Parsed, dtype: str) -> None:
    """Every layer that computes does so in ``dtype``, or is an island of fp32 that the table names."""
    for layer in parsed.layers:
        if kind(layer) in _MOVING:
            continue
        found = {tensor.dtype.name for tensor in (*inputs(layer), *outputs(layer))} & _FLOATS
        if found <= {dtype}:
            continue
        if found - {dtype, "FLOAT"}:
            raise parsed.fails(layer, f"computes in {', '.join(sorted(found))}, expected {dtype}")
        operator = contract_operator(parsed, layer)
        if not any(_is_island(island, parsed, layer, operator) for island in FP32_ISLANDS):
            raise parsed.fails(layer, f"computes in fp32, expected {dtype}: it is none of the operators that are fp32 on purpose")


def _is_island(island: Fp32Island, parsed: _Parsed, layer: Any, operator: str) -> bool:
    if operator != island.operator or not fnmatchcase(parsed.contract.graph, island.graph):
        return False
    if island.follows is not None:
        return any(parsed.follows(tensor, island.follows) for tensor in inputs(layer))
    return island.reads is None or any(island.reads in parsed.moved_from(tensor) for tensor in inputs(layer))


def _check_integers(parsed: _Parsed) -> None:
    """Integers are computed with in 64 bits: products of noise are that wide, and wrap around in fewer without a word."""
    for layer in parsed.layers:
        if kind(layer) in _ARITHMETIC and any(tensor.dtype.name == "INT32" for tensor in (*inputs(layer), *outputs(layer))):
            raise parsed.fails(layer, "computes with integers of 32 bits, expected 64")


def _check_caches(parsed: _Parsed) -> None:
    """Every cache is read by one cache update layer, which writes the output of that name, in place from the position on."""
    contract = parsed.contract
    updates = [layer for layer in parsed.layers if kind(layer) == "KV_CACHE_UPDATE"]
    for name, promised in contract.caches.items():
        readers = [layer for layer in parsed.readers.get(name, []) if kind(layer) != "SHAPE"]
        for layer in readers:
            if kind(layer) != "KV_CACHE_UPDATE":
                raise parsed.fails(layer, f"is {kind(layer)} and reads cache {name}, expected KV_CACHE_UPDATE: no update in place")
        if len(readers) != 1:
            raise parsed.graph_fails(f"cache {name} is updated by {len(readers)} layers, expected 1")
        (update,) = readers
        (output,) = outputs(update)
        if output.name != promised or not output.is_network_output:
            raise parsed.fails(update, f"updates cache {name} and writes {output.name}, expected the output {promised}")
        start = _WRITTEN_FROM.get(contract.graph)
        if start is None or not parsed.depends_on(update.get_input(2), start):
            raise parsed.fails(update, f"writes cache {name} at rows that do not follow from the input {start or 'of a position'}")
    if len(updates) != len(contract.caches):
        raise parsed.graph_fails(f"{len(updates)} cache update layers, expected {len(contract.caches)}")


def _check_attention(parsed: _Parsed) -> None:
    """Every attention node became a fused attention layer that reads its own layer's caches and is bounded by position."""
    trt, contract = parsed.trt, parsed.contract
    found = {}
    for layer in parsed.layers:
        if kind(layer) == "ATTENTION_INPUT":
            # The bindings hand out the base class; this is how Polygraphy comes by a layer's own.
            layer.__class__ = trt.IAttentionBoundaryLayer
            found[layer.attention.name] = layer
    for node in contract.attention:
        if node not in found:
            raise parsed.graph_fails(f"attention node {node} did not become a fused attention layer")
    if len(found) != len(contract.attention) or len(found) != contract.num_layers:
        raise parsed.graph_fails(
            f"{len(found)} attention layers for {len(contract.attention)} attention nodes and {contract.num_layers} layers with caches"
        )
    for index, node in enumerate(contract.attention):
        layer = found[node]
        for place, name in ((1, f"key_cache_out.{index}"), (2, f"value_cache_out.{index}")):
            source = _unscaled(parsed, layer.attention.get_input(place))
            if source != name:
                raise parsed.fails(layer, f"attends to {source}, expected {name}")
        _check_bound(parsed, layer, cache_rows=contract.inputs[f"key_cache.{index}"].dims[2])


def _check_bound(parsed: _Parsed, layer: Any, cache_rows: int | str) -> None:
    """By a mask over the cache's rows or by lengths, and either follows from the position."""
    attention, start = layer.attention, _BOUND_BY.get(parsed.contract.graph)
    causal = attention.causal_kind.name
    bound = attention.mask if attention.mask is not None else attention.key_value_lengths
    if bound is None:
        raise parsed.fails(layer, f"is bounded by neither a mask nor lengths (causal: {causal}): the cache bound was lost")
    if causal != "NONE" and (attention.mask is not None or causal != "LOWER_RIGHT"):
        # On a cache the last row sees all that is valid; aligned to the upper left it would see next to nothing.
        raise parsed.fails(layer, f"is causal ({causal}), expected a mask alone, or lengths and LOWER_RIGHT")
    if attention.mask is not None and tuple(bound.shape)[-1] != cache_rows:
        raise parsed.fails(layer, f"has a mask over {tuple(bound.shape)[-1]} columns, expected the cache's {cache_rows} rows")
    for source in parsed.computed_by(bound):
        operator = contract_operator(parsed, source)
        if operator and operator not in _BOUNDING:
            raise parsed.fails(source, f"takes part in the bound of {layer.name}, which is compared with positions alone: it could be lost")
    if start is None or not parsed.depends_on(bound, start):
        raise parsed.fails(layer, f"has a bound that does not follow from the input {start or 'of a position'}: the cache bound was lost")


def _unscaled(parsed: _Parsed, tensor: Any) -> str:
    """The name of what an attention layer reads, before the parser's multiplication with a constant (the square root of the scale)."""
    layer = parsed.producers.get(tensor.name)
    if layer is not None and kind(layer) == "ELEMENTWISE":
        variable = [source for source in inputs(layer) if not _is_constant(parsed, source)]
        if len(variable) == 1 and not node_name(layer):
            tensor = variable[0]
    name: str = tensor.name
    return name


def _is_constant(parsed: _Parsed, tensor: Any) -> bool:
    """A constant, cast or not."""
    layer = parsed.producers.get(tensor.name)
    while layer is not None and kind(layer) == "CAST":
        layer = parsed.producers.get(layer.get_input(0).name)
    return layer is not None and kind(layer) == "CONSTANT"
