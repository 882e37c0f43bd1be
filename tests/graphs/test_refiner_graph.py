"""Refiner graphs in ONNX Runtime against the module: every number of passes, with and without a shortlist, on one weights file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor

from tests.models.close import assert_close
from tests.tiny import write_drafter, write_target
from xpress_export.checkpoints import open_drafter
from xpress_export.graphs.exporter import export_graph
from xpress_export.graphs.refiner import refiner_graph
from xpress_export.graphs.weights import WEIGHTS_FILE, WeightStore
from xpress_export.models.refiner import Refiner

# fp32, the largest sum is over a rank of 72.
TOLERANCE = 1e-5

BLOCK_SIZE, HIDDEN_SIZE, VOCAB_SIZE, RANK = 4, 40, 61, 72
SHORTLIST = 5
VARIANTS = ((1, 0), (2, 0), (1, SHORTLIST), (3, SHORTLIST))
SHARED = ("drafted.refiner.w1", "drafted.refiner.w2")


@dataclass
class Case:
    refiner: Refiner
    # A set has one shortlist; here one folder for each shares one weights file all the same.
    files: dict[tuple[int, int], Path]
    weights: Path


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("refiners")
    write_target(folder / "target")
    # A rank at which w1 and w2 are large enough for the weights file.
    write_drafter(folder / "drafter", folder / "target", rank=RANK)
    refiner = open_drafter(str(folder / "drafter")).refiner_module()
    files = {}
    with WeightStore(folder) as weights:
        for passes, shortlist in VARIANTS:
            spec = refiner_graph(
                refiner,
                passes,
                shortlist,
                hidden_size=HIDDEN_SIZE,
                vocab_size=VOCAB_SIZE,
                block_size=BLOCK_SIZE,
                dtype=torch.float32,
            )
            exported = export_graph(spec, folder, weights, {})
            files[passes, shortlist] = exported.path.rename(folder / f"k{passes}-c{shortlist}.onnx")
    return Case(refiner, files, folder / WEIGHTS_FILE)


def block(batch: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(batch)
    return {
        "hidden": torch.randn(batch, BLOCK_SIZE, HIDDEN_SIZE, generator=generator),
        "base_logits": torch.randn(batch, BLOCK_SIZE - 1, VOCAB_SIZE, generator=generator),
        "anchor": torch.randint(VOCAB_SIZE, (batch,), generator=generator),
        "predecessor": torch.randint(VOCAB_SIZE, (batch,), generator=generator),
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_module(case: Case, variant: tuple[int, int]) -> None:
    passes, shortlist = variant
    session = onnxruntime.InferenceSession(case.files[variant], providers=["CPUExecutionProvider"])
    names = ["verify_ids", "refined_logits"] + (["candidates"] if shortlist else [])
    assert [value.name for value in session.get_outputs()] == names
    changed = False
    for batch in (1, 2, 5):
        inputs = block(batch)
        expected = case.refiner(*inputs.values(), passes, shortlist)
        found = dict(zip(names, session.run(None, {name: value.numpy() for name, value in inputs.items()}), strict=True))
        assert found["verify_ids"].tolist() == torch.cat([inputs["anchor"][:, None], expected.drafts], dim=1).tolist()
        assert_close(found["refined_logits"], expected.scores, TOLERANCE)
        assert found["refined_logits"].shape == (batch, BLOCK_SIZE - 1, shortlist or VOCAB_SIZE)
        if shortlist:
            assert found["candidates"].tolist() == expected.candidates.tolist()
        changed |= not torch.equal(expected.drafts, expected.passes[0])
    # Else the seed alone would pass.
    assert changed


def references(path: Path) -> dict[str, dict[str, str]]:
    tensors = onnx.load(path, load_external_data=False).graph.initializer
    return {tensor.name: {entry.key: entry.value for entry in tensor.external_data} for tensor in tensors if tensor.external_data}


def test_token_tables_are_shared(case: Case) -> None:
    """By every number of passes, and by both readouts: one product with w2, one gather of its rows."""
    first, *others = (references(path) for path in case.files.values())
    for other in others:
        assert {name: other[name] for name in SHARED} == {name: first[name] for name in SHARED}
    size = VOCAB_SIZE * RANK * 4
    content = case.weights.read_bytes()
    for name, parameter in zip(SHARED, (case.refiner.w1, case.refiner.w2), strict=True):
        assert int(first[name]["length"]) == size
        offset = int(first[name]["offset"])
        stored = parameter.numpy().tobytes()
        assert content[offset : offset + size] == stored
        assert content.count(stored) == 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_passes_are_unrolled_on_one_static_half(case: Case, variant: tuple[int, int]) -> None:
    """Per pass one lookup of the previous tokens; the hidden half and the shortlist's rows are computed once."""
    passes, shortlist = variant
    nodes = onnx.load(case.files[variant], load_external_data=False).graph.node
    weights = (*SHARED, "drafted.refiner.in_hidden.weight", "drafted.refiner.in_token.weight")
    count = {name: sum(name in node.input for node in nodes) for name in weights}
    assert count == {
        "drafted.refiner.w1": passes,
        "drafted.refiner.w2": 1 if shortlist else passes,
        "drafted.refiner.in_hidden.weight": 1,
        "drafted.refiner.in_token.weight": passes,
    }
