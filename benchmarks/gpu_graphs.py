"""Every graph of a bundle on a backend against ONNX Runtime's CPU, on the same graphs and random inputs: the first part of the GPU check.

Knows what each input may hold; knows nothing about generation or reports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xpress_engines.profiles import BlockSizes, ProfileSet, graph_calls
from xpress_export.parity.compare import compare_arrays, removed, tolerance
from xpress_export.parity.runner import Arrays, updated_in_place
from xpress_runtime.backends import Backend
from xpress_runtime.backends.base import Program
from xpress_runtime.backends.ort_cpu import OrtCpuBackend
from xpress_runtime.bundle import Bundle
from xpress_runtime.sampling import NOISE_PRIME
from xpress_runtime.sets import Precision

MakeBackend = Callable[[], Backend]

# Argmaxes of random logits are now and then nearer than a rounding.
_MAX_DIFFERENT_IDS = 0.05
# Nothing but integers goes in.
_EXACT = ("accept", "draft-start", "lookup")

# What is the same in every row.
_CONSTANTS: dict[str, float] = {
    "active": 1,
    "sampled": 1,
    "slot": 1,
    "start": 0,
    "position": 2,
    "context_position": 2,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.05,
    "repetition": 1.2,
    "presence": 0.5,
    "frequency": 0.25,
    "inverse_temperature": 1.25,
}
# Integers below these; few different ones where some shall agree. Floats of that name count.
_BELOW = {
    "noise_key": NOISE_PRIME,
    "history": 3,
    "tokens": 3,
    "verify_ids": 2,
    "target_tokens": 2,
    "filled": 2,
    "counts": 3,
    "in_prompt": 2,
}


def random_inputs(bundle: Bundle, program: Program, sizes: Mapping[str, int], seed: int) -> Arrays:
    """Inputs of one call that a graph may get: ``sizes`` are its dynamic dims. Positions leave room, other floats are near 1."""
    manifest, generator = bundle.manifest, np.random.default_rng(seed)
    inputs: Arrays = {}
    for name, info in program.inputs.items():
        shape = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in info.dims)
        if name in _CONSTANTS:
            values: NDArray[Any] = np.full(shape, _CONSTANTS[name])
        elif name in _BELOW:
            values = generator.integers(0, _BELOW[name], shape)
        elif info.dtype.kind == "f":
            values = generator.standard_normal(shape)
        elif name == "rows":
            values = np.tile(np.arange(shape[1]) + sizes["tokens"] - shape[1], (shape[0], 1))
        elif name == "block_position":
            values = np.full(shape, 2 + min(sizes["tokens"], 3))
        elif name == "num_emitted":
            values = generator.integers(1, sizes["verified"] + 1, shape)
        elif name == "num_filled":
            values = np.full(shape, manifest.drafter.num_proposals)
        elif name == "candidates":
            # The drafts among them, where there is room.
            values = np.broadcast_to(np.arange(shape[2]), shape)
        else:
            values = generator.integers(0, manifest.target.vocab_size, shape)
        inputs[name] = np.ascontiguousarray(values.astype(info.dtype))
    return inputs


def run_program(backend: Backend, program: Program, inputs: Arrays, output_shapes: Mapping[str, tuple[int, ...]]) -> Arrays:
    """One run on fresh buffers; caches are updated in place."""
    buffers = {}
    for name, array in inputs.items():
        buffers[name] = backend.allocate(array.shape, array.dtype)
        buffers[name].write(array)
    for name, info in program.outputs.items():
        cache = updated_in_place(name)
        buffers[name] = buffers[cache] if cache in inputs else backend.allocate(output_shapes[name], info.dtype)
    program.bind(buffers).run()
    backend.synchronise()
    return {name: buffers[name].read() for name in program.outputs}


def compare_graphs(bundle: Bundle, make: MakeBackend) -> dict[str, Any]:
    """Every graph in every call that the runtime makes: worst scaled error of its floats, share of its ids that differ."""
    backend = make()
    try:
        backend.admit(bundle, 1)
        cpu = OrtCpuBackend(graph_set=backend.graph_set)
        precision = Precision(bundle.manifest.graph_set(backend.graph_set).precision)
        names = bundle.manifest.graph_names
        return {graph: _compare_graph(bundle, backend, cpu, graph, tolerance(precision, graph)) for graph in names}
    finally:
        backend.close()


def _compare_graph(bundle: Bundle, backend: Backend, cpu: Backend, graph: str, largest_error: float) -> dict[str, Any]:
    manifest = bundle.manifest
    profile = ProfileSet(manifest.prefill_chunk, 1, manifest.capacity)
    on_gpu, on_cpu = backend.load(bundle, graph), cpu.load(bundle, graph)
    worst, num_calls = 0.0, 0
    # Of each output that holds choices.
    different, num_ids = Counter[str](), Counter[str]()
    for seed, sizes in enumerate(graph_calls(graph, profile, BlockSizes.of(manifest))):
        inputs = random_inputs(bundle, on_cpu, sizes, seed)
        shapes = {name: tuple(sizes[dim] if isinstance(dim, str) else dim for dim in info.dims) for name, info in on_cpu.outputs.items()}
        expected = run_program(cpu, on_cpu, inputs, shapes)
        found = run_program(backend, on_gpu, inputs, shapes)
        num_calls += 1
        for name, array in expected.items():
            ours, theirs = _valid(name, found[name], sizes), _valid(name, array, sizes)
            if array.dtype.kind == "f":
                # Which tokens a filter removes is a choice as well.
                kept = ~removed(ours) & ~removed(theirs)
                worst = max(worst, compare_arrays(ours[kept], theirs[kept]).scaled_error)
                ours, theirs = removed(ours), removed(theirs)
            if array.dtype.kind != "f" or theirs.any():
                different[name] += int((ours != theirs).sum())
                num_ids[name] += theirs.size
    allowed = 0 if graph in _EXACT else _MAX_DIFFERENT_IDS
    return {
        "passed": worst <= largest_error and all(different[name] <= allowed * num_ids[name] for name in num_ids),
        "calls": num_calls,
        "scaled_error": worst,
        "tolerance": largest_error,
        "ids": num_ids.total(),
        "different_ids": different.total(),
    }


def _valid(name: str, array: NDArray[Any], sizes: Mapping[str, int]) -> NDArray[Any]:
    """Of a cache the rows that were written; of everything else all."""
    return array[:, :, : 2 + sizes["tokens"]] if "_cache_out." in name else array
