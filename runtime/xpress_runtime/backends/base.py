"""What the loop needs of a backend: allocate a buffer, load and bind a program, run it, copy, synchronise.

A buffer is memory at a fixed address. Views share that address with fewer elements, so that programs of different widths work on the same
memory; nothing is allocated once generation runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray


class Buffer(Protocol):
    """Memory of a backend with a shape and a dtype."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def view(self, *shape: int) -> Self:
        """The first elements of this memory under another shape of at most as many elements."""

    def row(self, index: int) -> Self:
        """Row ``index`` of the first axis, kept as an axis of length 1."""

    def write(self, values: NDArray[Any]) -> None:
        """Copy host values in; same shape and dtype."""

    def read(self) -> NDArray[Any]:
        """A host copy of the content."""


class BoundProgram(Protocol):
    """A program with its buffers."""

    def run(self) -> None: ...


class Program(Protocol):
    """A loaded graph. ``inputs`` and ``outputs`` map each name to its dims (a number, or the name of a dynamic dim) and dtype."""

    @property
    def inputs(self) -> Mapping[str, TensorInfo]: ...

    @property
    def outputs(self) -> Mapping[str, TensorInfo]: ...

    def bind(self, buffers: Mapping[str, Buffer]) -> BoundProgram:
        """Bind every input and output to a buffer; what is missing or misshapen raises ValueError."""


class TensorInfo:
    """Dims and dtype of a graph input or output."""

    def __init__(self, dims: tuple[int | str, ...], dtype: np.dtype[Any]) -> None:
        self.dims = dims
        self.dtype = dtype

    def accepts(self, buffer: Buffer) -> bool:
        """Whether a buffer fits: same dtype and rank, and the same length on every fixed axis."""
        if buffer.dtype != self.dtype or len(buffer.shape) != len(self.dims):
            return False
        return all(isinstance(dim, str) or dim == length for dim, length in zip(self.dims, buffer.shape, strict=True))


class Backend(Protocol):
    """One way to run the graphs of a bundle. ``graph_set`` names the set that it runs."""

    name: str
    graph_set: str
    # Whether caches may be shorter than the capacity, and grow with the text.
    flexible_caches: bool

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Buffer:
        """Zeroed memory."""

    def load(self, path: Path) -> Program: ...

    def relayout(self, cache: Buffer, cache_rows: int, *, keep: bool) -> Buffer:
        """The same memory as a cache [B, kv heads, cache_rows, D] of another length; ``keep`` moves the rows that both have.

        A backend whose caches have one length only is never asked.
        """

    def copy(self, source: Buffer, destination: Buffer) -> None:
        """Copy between two buffers of the same shape and dtype."""

    def synchronise(self) -> None:
        """Wait until everything queued has run."""
