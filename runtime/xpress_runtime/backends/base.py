"""What the loop needs of a backend: allocate a buffer, load and bind a program, queue it, copy, and report to the host.

A buffer is memory at a fixed address. Views share that address with fewer elements, so that programs of different widths work on the same
memory; nothing is allocated once generation runs. Everything that is queued (programs, copies, writes, marks) happens in the order of its
calls; a backend may do it later than the call. Only ``read``, ``synchronise`` and :meth:`Report.wait` wait.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from xpress_runtime.bundle import Bundle


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

    def run(self) -> None:
        """Queue one run."""


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


class Report(Protocol):
    """What the host learns of a round: the content of a few small buffers, and how long its stages took."""

    def begin(self) -> None:
        """Queue the time stamp at which the first stage begins."""

    def mark(self) -> None:
        """Queue the time stamp at which a stage ends and the next one begins."""

    def send(self) -> None:
        """Queue the copies to the host, behind everything that was queued before."""

    def wait(self) -> tuple[list[NDArray[Any]], list[float]]:
        """The buffers' content and the stages' seconds, as soon as that round is through; what was queued behind it may still run."""


class Backend(Protocol):
    """One way to run the graphs of a bundle. ``graph_set`` names the set that it runs."""

    name: str
    graph_set: str
    # Whether a call may have any number of tokens, and caches any length up to the bundle's. Otherwise prompts run in whole chunks, the
    # last one padded, and caches have the bundle's length.
    flexible_shapes: bool
    # Rounds that are queued before the oldest of them is read; 1 where a call returns when its work is done.
    rounds_in_flight: int

    def admit(self, bundle: Bundle, num_rows: int) -> None:
        """Refuse ``num_rows`` rows (EnvironmentProblem) before anything is allocated, where they need more memory than there is."""

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Buffer:
        """Zeroed memory."""

    def load(self, bundle: Bundle, graph: str) -> Program:
        """A graph of the backend's set; BundleError where the bundle does not hold it for this backend."""

    def run_round(self, key: Hashable, queue: Callable[[], None]) -> None:
        """Queue what ``queue`` queues. With the same key it always queues the same work, so a backend may record it once and replay it."""

    def report(self, buffers: Sequence[Buffer]) -> Report:
        """A report on these buffers; used again and again."""

    def relayout(self, cache: Buffer, cache_rows: int, *, keep: bool) -> Buffer:
        """The same memory as a cache [B, kv heads, cache_rows, D] of another length; ``keep`` moves the rows that both have.

        Only a backend of flexible shapes is asked.
        """

    def copy(self, source: Buffer, destination: Buffer) -> None:
        """Queue a copy between two buffers of the same shape and dtype."""

    def synchronise(self) -> None:
        """Wait until everything queued has run."""

    def close(self) -> None:
        """Give back all memory; neither the backend nor what came from it can be used afterwards. A second call does nothing."""
