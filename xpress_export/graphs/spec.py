"""What a graph is: a module, and the names, dims and dtypes of its inputs and outputs.

A dim is a number (fixed at build time) or one of the letters of :data:`DYNAMIC_DIMS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from xpress_runtime.sets import AttentionForm

DYNAMIC_DIMS = {"B": "batch", "S": "tokens", "R": "rows", "W": "verified", "N": "cache_rows", "Q": "scored"}

Dim = int | str


@dataclass(frozen=True)
class TensorSpec:
    """One graph input or output."""

    name: str
    dims: tuple[Dim, ...]
    dtype: torch.dtype = torch.int64

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The concrete shape under ``sizes`` of the dynamic dims."""
        return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in self.dims)


@dataclass(frozen=True)
class GraphSpec:
    """A module with its contract. A tuple among ``inputs`` is passed to the module as one list (the caches)."""

    name: str
    module: nn.Module
    inputs: tuple[TensorSpec | tuple[TensorSpec, ...], ...]
    outputs: tuple[TensorSpec, ...]

    def flat_inputs(self) -> Iterator[TensorSpec]:
        for entry in self.inputs:
            if isinstance(entry, TensorSpec):
                yield entry
            else:
                yield from entry


def cache_dims(num_kv_heads: int, head_dim: int, num_positions: int, form: AttentionForm) -> tuple[Dim, ...]:
    """Dims of one cache. In the masked form the length is fixed: TensorRT's cache update layer takes no other."""
    return ("B", num_kv_heads, "N" if form is AttentionForm.LENGTH else num_positions, head_dim)


def cache_specs(prefix: str, num_layers: int, shape: tuple[Dim, ...], dtype: torch.dtype) -> tuple[TensorSpec, ...]:
    """One spec a layer: ``prefix.0``, ``prefix.1``, …"""
    return tuple(TensorSpec(f"{prefix}.{layer}", shape, dtype) for layer in range(num_layers))
