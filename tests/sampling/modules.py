"""A backend that runs the PyTorch modules behind the graphs, on the buffers of the CPU backend: a plan without an export.

That a graph computes what its module does is tested where graphs are. Here many kinds of rounds are sampled, and some tests plant a fault
in one module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from xpress_export.graphs.spec import GraphSpec, TensorSpec
from xpress_export.models import decoder, drafter
from xpress_runtime.backends.base import Buffer, TensorInfo
from xpress_runtime.backends.ort_cpu import OrtCpuBackend
from xpress_runtime.bundle import Bundle

_DTYPES: dict[torch.dtype, np.dtype[Any]] = {torch.float32: np.dtype(np.float32), torch.int64: np.dtype(np.int64)}


class ModuleBackend(OrtCpuBackend):
    """``specs``: what each graph is, by name."""

    def __init__(self, specs: Mapping[str, Callable[[], GraphSpec]]) -> None:
        super().__init__(threads=1)
        self._specs = specs

    def load(self, bundle: Bundle, graph: str) -> Any:  # noqa: ARG002
        return _ModuleProgram(self._specs[graph]())

    def replacing(self, graph: str, change: Callable[[nn.Module], nn.Module]) -> ModuleBackend:
        """The same with another module in one graph."""

        def changed() -> GraphSpec:
            spec = self._specs[graph]()
            return GraphSpec(spec.name, change(spec.module), spec.inputs, spec.outputs)

        return ModuleBackend({**self._specs, graph: changed})


class _ModuleProgram:
    def __init__(self, spec: GraphSpec) -> None:
        self._spec = spec
        self.inputs = {tensor.name: _info(tensor) for tensor in spec.flat_inputs()}
        self.outputs = {tensor.name: _info(tensor) for tensor in spec.outputs}

    def bind(self, buffers: Mapping[str, Buffer]) -> _BoundModule:
        for name, info in {**self.inputs, **self.outputs}.items():
            if name not in buffers or not info.accepts(buffers[name]):
                raise ValueError(f"{name} has no buffer that fits {info.dims}")
        tensors = {name: torch.from_numpy(buffer.array) for name, buffer in buffers.items()}
        arguments = [
            tensors[one.name] if isinstance(one, TensorSpec) else [tensors[each.name] for each in one] for one in self._spec.inputs
        ]
        return _BoundModule(self._spec.module, arguments, [tensors[name] for name in self.outputs])


class _BoundModule:
    def __init__(self, module: nn.Module, arguments: list[Any], outputs: list[Tensor]) -> None:
        self._module = module
        self._arguments = arguments
        self._outputs = outputs

    @torch.inference_mode()
    def run(self) -> None:
        with _all_rows_at_once():
            results = self._module(*self._arguments)
        for output, result in zip(self._outputs, _flat(results), strict=True):
            output.copy_(result)


@contextmanager
def _all_rows_at_once() -> Iterator[None]:
    """The cache update's eager body goes from row to row, which is long for a thousand of them."""
    operator = decoder.cache_update
    decoder.cache_update = drafter.cache_update = _cache_update
    try:
        yield
    finally:
        decoder.cache_update = drafter.cache_update = operator


def _cache_update(cache: Tensor, update: Tensor, position: Tensor) -> Tensor:
    rows = position[:, None] + torch.arange(update.shape[2])
    return cache.scatter(2, rows[:, None, :, None].expand(update.shape), update)


def _flat(results: Any) -> Iterator[Tensor]:
    if isinstance(results, Tensor):
        yield results
        return
    for result in results:
        yield from _flat(result)


def _info(tensor: TensorSpec) -> TensorInfo:
    return TensorInfo(tensor.dims, _DTYPES[tensor.dtype])
