"""The PyTorch modules behind a graph set's graphs, called by the names of the graphs' inputs and outputs.

A module in half precision is called under :mod:`xpress_export.parity.value_range`. Knows nothing about files or backends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from xpress_export.graphs.spec import GraphSpec, TensorSpec
from xpress_export.parity.runner import Arrays
from xpress_export.parity.value_range import ValueRange, largest_magnitude

Tensors = dict[str, Tensor]


@torch.inference_mode()
def run_module(spec: GraphSpec, inputs: Tensors) -> Tensors:
    """Call a graph's module with inputs by name, cast to the dtypes it takes; its outputs by name."""
    cast = {tensor.name: inputs[tensor.name].to(tensor.dtype) for tensor in spec.flat_inputs()}
    arguments = [cast[entry.name] if isinstance(entry, TensorSpec) else [cast[tensor.name] for tensor in entry] for entry in spec.inputs]
    return dict(zip((output.name for output in spec.outputs), _flatten(spec.module(*arguments)), strict=True))


class HalfModule:
    """A graph's module in half precision, with every operator's result rounded and its range watched."""

    def __init__(self, spec: GraphSpec, dtype: torch.dtype, original: nn.Module) -> None:
        self.spec = spec
        self.range = ValueRange(spec.module, dtype, original)

    @torch.inference_mode()
    def run(self, inputs: Tensors) -> Tensors:
        """As :func:`run_module`."""
        cast = {tensor.name: inputs[tensor.name].to(tensor.dtype) for tensor in self.spec.flat_inputs()}
        for name, tensor in cast.items():
            self.range.look("input", name, tensor, functools.partial(largest_magnitude, [inputs[name]]))
        with self.range.watching():
            return run_module(self.spec, cast)


class ModuleRunner:
    """A set's modules in the place of its graphs, for a precision whose graphs run nowhere here."""

    def __init__(self, makers: Mapping[str, Callable[[], GraphSpec]], cache_rows: int) -> None:
        self._makers = makers
        self._cache_rows = cache_rows
        self._specs: dict[str, GraphSpec] = {}

    def cache_rows(self, num_tokens: int) -> int:  # noqa: ARG002
        """As :meth:`GraphRunner.cache_rows`."""
        return self._cache_rows

    def run(self, graph: str, inputs: Arrays, dims: dict[str, int]) -> Arrays:  # noqa: ARG002
        """As :meth:`GraphRunner.run`."""
        if graph not in self._specs:
            self._specs[graph] = self._makers[graph]()
        return to_arrays(run_module(self._specs[graph], {name: torch.from_numpy(array) for name, array in inputs.items()}))


def to_arrays(tensors: Tensors) -> Arrays:
    """As numpy arrays, floats in fp32: numpy has no bf16."""
    return {name: (tensor.float() if tensor.is_floating_point() else tensor).numpy() for name, tensor in tensors.items()}


def _flatten(outputs: Any) -> Iterator[Tensor]:
    if isinstance(outputs, Tensor):
        yield outputs
    else:
        for output in outputs:
            yield from _flatten(output)
