"""Runs single graphs of a bundle on arrays: fresh buffers for every call, nothing kept between calls."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from xpress_runtime.backends.base import Backend, Program
from xpress_runtime.bundle import Bundle

Arrays = dict[str, NDArray[Any]]


class Runner(Protocol):
    """What runs graphs by name."""

    def run(self, graph: str, inputs: Arrays, dims: dict[str, int]) -> Arrays: ...

    def cache_rows(self, num_tokens: int) -> int: ...


class GraphRunner:
    """Graphs of a bundle on a backend, by name."""

    def __init__(self, bundle: Bundle, backend: Backend) -> None:
        self._bundle = bundle
        self._backend = backend
        self._programs: dict[str, Program] = {}

    def program(self, graph: str) -> Program:
        """A graph of the backend's set, loaded once."""
        if graph not in self._programs:
            self._programs[graph] = self._backend.load(self._bundle, graph)
        return self._programs[graph]

    def release(self) -> None:
        """Unload the graphs; the next run loads its own again."""
        self._programs.clear()

    def cache_rows(self, num_tokens: int) -> int:
        """Rows that caches of ``num_tokens`` tokens must have: exactly as many, or what the graphs are fixed to."""
        rows = self.program("target").inputs["key_cache.0"].dims[2]
        return rows if isinstance(rows, int) else num_tokens

    def run(self, graph: str, inputs: Arrays, dims: dict[str, int]) -> Arrays:
        """Run one graph on copies of the arrays, floats cast to what it takes; ``dims`` gives the length of each dynamic dim."""
        program = self.program(graph)
        buffers = {}
        for name, array in inputs.items():
            with np.errstate(over="ignore"):
                # What leaves the range is the range check's to say.
                cast = array.astype(program.inputs[name].dtype) if array.dtype.kind == "f" and name in program.inputs else array
            buffers[name] = self._backend.allocate(cast.shape, cast.dtype)
            buffers[name].write(cast)
        for name, info in program.outputs.items():
            if (in_place := updated_in_place(name)) in inputs:
                buffers[name] = buffers[in_place]
            else:
                shape = tuple(dims[dim] if isinstance(dim, str) else dim for dim in info.dims)
                buffers[name] = self._backend.allocate(shape, info.dtype)
        program.bind(buffers).run()
        self._backend.synchronise()
        return {name: buffers[name].read() for name in program.outputs}


def updated_in_place(output: str) -> str | None:
    """The input whose memory an output shares where a graph updates it in place."""
    return "store" if output == "store_out" else output.replace("_cache_out.", "_cache.") if "_cache_out." in output else None


def int64(values: Any) -> NDArray[np.int64]:
    """Token ids, positions or counts as a graph takes them."""
    return np.asarray(values, np.int64)
