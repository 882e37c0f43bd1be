"""Runs single graphs of a bundle on arrays: fresh buffers for every call, nothing kept between calls."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xpress_runtime.backends.base import Backend, Program
from xpress_runtime.bundle import Bundle

Arrays = dict[str, NDArray[Any]]


class GraphRunner:
    """Graphs of a bundle on a backend, by name."""

    def __init__(self, bundle: Bundle, backend: Backend) -> None:
        self._bundle = bundle
        self._backend = backend
        self._programs: dict[str, Program] = {}

    def run(self, graph: str, inputs: Arrays, dims: dict[str, int]) -> Arrays:
        """Run one graph; ``dims`` gives the length of each dynamic dim. The arrays given are copied first, so they stay as they are."""
        if graph not in self._programs:
            self._programs[graph] = self._backend.load(self._bundle.graph_path(self._backend.graph_set, graph))
        program = self._programs[graph]
        buffers = {}
        for name, array in inputs.items():
            buffers[name] = self._backend.allocate(array.shape, array.dtype)
            buffers[name].write(array)
        for name, info in program.outputs.items():
            in_place = name.replace("_cache_out.", "_cache.")
            if in_place in inputs:
                buffers[name] = buffers[in_place]
            else:
                shape = tuple(dims[dim] if isinstance(dim, str) else dim for dim in info.dims)
                buffers[name] = self._backend.allocate(shape, info.dtype)
        program.bind(buffers).run()
        self._backend.synchronise()
        return {name: buffers[name].read() for name in program.outputs}


def int64(values: Any) -> NDArray[np.int64]:
    """Token ids, positions or counts as a graph takes them."""
    return np.asarray(values, np.int64)
