"""The graphs of sampling in ONNX Runtime against their modules, with other sizes than they were traced with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor

from tests.tiny import write_drafter, write_target
from xpress_export.checkpoints import open_drafter
from xpress_export.graphs.accept import accept_sampled_graph
from xpress_export.graphs.exporter import export_graph
from xpress_export.graphs.processors import count_graph, penalise_graph, sample_graph, top_k_graph, top_p_graph
from xpress_export.graphs.refiner import refiner_graph
from xpress_export.graphs.spec import GraphSpec
from xpress_export.graphs.weights import WeightStore
from xpress_export.models.accept import Accept
from xpress_runtime.sampling import NOISE_PRIME

VOCAB_SIZE, BLOCK_SIZE, HIDDEN_SIZE, NUM_CANDIDATES = 61, 5, 40, 7
# fp32 sums over a rank of 8 and a vocabulary of 61.
TOLERANCE = 1e-5
SIZES = {"hidden_size": HIDDEN_SIZE, "vocab_size": VOCAB_SIZE, "block_size": BLOCK_SIZE, "dtype": torch.float32}

MAKERS: dict[str, Callable[[Path], GraphSpec]] = {
    "sample": lambda _: sample_graph(VOCAB_SIZE),
    "accept-sampled": lambda _: accept_sampled_graph(Accept(BLOCK_SIZE, 60, 100), VOCAB_SIZE, with_candidates=False),
    "accept-candidates": lambda _: accept_sampled_graph(Accept(BLOCK_SIZE, 60, 100), VOCAB_SIZE, with_candidates=True),
    "filter-top-k": lambda _: top_k_graph(VOCAB_SIZE),
    "filter-top-p": lambda _: top_p_graph(VOCAB_SIZE),
    "penalise": lambda _: penalise_graph(VOCAB_SIZE),
    "count": lambda _: count_graph(VOCAB_SIZE),
    "refiner-k0-sampled": lambda _: refiner_graph(None, 0, 0, sampled=True, **SIZES),
    "refiner-k2-sampled": lambda folder: refiner_graph(_refiner(folder), 2, 0, sampled=True, **SIZES),
    "refiner-k2-c7-sampled": lambda folder: refiner_graph(_refiner(folder), 2, NUM_CANDIDATES, sampled=True, **SIZES),
}
# What makes sense of an integer input, where any token does not.
RANGES = {"noise_key": (0, NOISE_PRIME), "active": (0, 2), "sampled": (0, 2), "position": (1, 90), "num_emitted": (0, 4), "top_k": (1, 80)}


def _refiner(folder: Path):  # type: ignore[no-untyped-def]
    write_target(folder / "target")
    write_drafter(folder / "drafter", folder / "target", block_size=BLOCK_SIZE)
    return open_drafter(str(folder / "drafter")).refiner_module()


def feed(spec: GraphSpec, batch: int, width: int, seed: int) -> dict[str, Tensor]:
    """Random inputs; limits and rates are between 0.1 and 1.1, so that some are off."""
    generator = torch.Generator().manual_seed(seed)
    inputs = {}
    for tensor in spec.flat_inputs():
        shape = tensor.shape({"B": batch, "W": width, "Q": NUM_CANDIDATES})
        if tensor.name == "candidates":
            inputs[tensor.name] = torch.rand(*shape[:2], VOCAB_SIZE, generator=generator).argsort(dim=-1)[..., :NUM_CANDIDATES]
        elif tensor.dtype == torch.int64:
            inputs[tensor.name] = torch.randint(*RANGES.get(tensor.name, (0, VOCAB_SIZE)), shape, generator=generator)
        else:
            inputs[tensor.name] = (
                torch.rand(shape, generator=generator) + 0.1 if len(shape) == 1 else torch.randn(shape, generator=generator)
            )
    return inputs


@pytest.mark.parametrize("name", MAKERS)
def test_equals_the_module(tmp_path: Path, name: str) -> None:
    spec = MAKERS[name](tmp_path)
    assert spec.name == name
    with WeightStore(tmp_path) as weights:
        exported = export_graph(spec, tmp_path, weights, {})
    session = onnxruntime.InferenceSession(exported.path, providers=["CPUExecutionProvider"])
    answers = set()
    for batch, width in ((1, 2), (3, BLOCK_SIZE), (7, 3)):
        inputs = feed(spec, batch, width, seed=batch)
        expected = spec.module(*inputs.values())
        found = session.run(None, {tensor: value.numpy() for tensor, value in inputs.items()})
        for output, ours, theirs in zip(spec.outputs, found, [expected] if isinstance(expected, Tensor) else expected, strict=True):
            if output.dtype == torch.int64:
                np.testing.assert_array_equal(ours, theirs.numpy())
            else:
                np.testing.assert_allclose(ours, theirs.numpy(), rtol=TOLERANCE, atol=TOLERANCE)
            answers.add(ours.tobytes())
    # Else a graph that always answers the same would pass.
    assert len(answers) >= 3
