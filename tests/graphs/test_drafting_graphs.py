"""Graphs of denoising steps and of other drafters: in ONNX Runtime each equals its module, and TensorRT-RTX builds it in half precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor

from tests.models.close import assert_close
from tests.tiny import write_target
from xpress_engines.worker import _import_tensorrt
from xpress_export.checkpoints import open_draft_model, open_target
from xpress_export.graphs.confidence import confidence_graph
from xpress_export.graphs.denoise import denoise_graph
from xpress_export.graphs.draft_decoder import draft_decoder_graph
from xpress_export.graphs.draft_step import draft_step_graph
from xpress_export.graphs.exporter import export_graph
from xpress_export.graphs.lookup import lookup_graph
from xpress_export.graphs.refiner import refiner_graph
from xpress_export.graphs.spec import GraphSpec, TensorSpec
from xpress_export.graphs.store_taps import store_taps_graph
from xpress_export.graphs.weights import WeightStore
from xpress_export.models.markov import MarkovConfig, MarkovHead
from xpress_export.models.precision import DTYPES, in_precision
from xpress_runtime.sets import AttentionForm, Precision

# fp32 softmax, logarithms and sums over a rank of 8, two libraries.
TOLERANCE = 1e-5

VOCAB_SIZE, HIDDEN_SIZE, RANK, NUM_POSITIONS = 61, 48, 8, 32
STORE_ROWS = 16

Feed = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A graph for a block size and a precision, and inputs for a batch; ``sizes`` are the dynamic dims but for the batch."""

    make: Callable[[int, Precision], GraphSpec]
    feed: Callable[[GraphSpec, int, torch.Generator], Feed]
    sizes: tuple[dict[str, int], ...] = ({},)


def random_inputs(spec: GraphSpec, sizes: dict[str, int], generator: torch.Generator) -> Feed:
    """Normal values for every floating-point input."""
    floats = [tensor for tensor in spec.flat_inputs() if tensor.dtype.is_floating_point]
    return {tensor.name: torch.randn(tensor.shape(sizes), generator=generator).to(tensor.dtype) for tensor in floats}


def integers(high: int, *shape: int, generator: torch.Generator) -> Tensor:
    return torch.randint(high, shape, generator=generator)


def denoise_feed(spec: GraphSpec, batch: int, generator: torch.Generator) -> Feed:
    """Blocks at every stage, among them first steps, whose kept tensors hold garbage."""
    block_size = spec.outputs[3].dims[1]
    assert isinstance(block_size, int)
    filled = integers(2, batch, block_size - 1, generator=generator) * (torch.arange(batch)[:, None] % 3 > 0).long()
    return {
        "filled": filled,
        "block_ids": integers(VOCAB_SIZE, batch, block_size, generator=generator),
        "num_filled": filled.sum(dim=1) + integers(block_size, batch, generator=generator),
    }


def lookup_feed(spec: GraphSpec, batch: int, generator: torch.Generator) -> Feed:
    """Texts of three different tokens; the first row is a single token in its first round."""
    block_size = spec.outputs[1].dims[1]
    assert isinstance(block_size, int)
    context = integers(NUM_POSITIONS // 2, batch, generator=generator)
    new = integers(block_size + 1, batch, generator=generator)
    context[0] = new[0] = 0
    return {
        "history": integers(3, batch, NUM_POSITIONS, generator=generator),
        "tokens": integers(3, batch, block_size, generator=generator),
        "context_position": context,
        "position": context + new,
    }


def noise_feed(batch: int, generator: torch.Generator) -> Feed:
    sampled = torch.arange(batch) % 2
    temperature = torch.where(sampled == 1, 0.5 + torch.rand(batch, generator=generator), torch.ones(batch))
    return {
        "noise_key": integers(2**29, batch, 4, generator=generator),
        "position": integers(NUM_POSITIONS, batch, generator=generator),
        "inverse_temperature": 1 / temperature,
        "sampled": sampled,
    }


def step_feed(_spec: GraphSpec, batch: int, generator: torch.Generator) -> Feed:
    return {"slot": torch.tensor([1])} | noise_feed(batch, generator)


def block_feed(_spec: GraphSpec, batch: int, generator: torch.Generator) -> Feed:
    names = ("anchor", "predecessor")
    return {name: integers(VOCAB_SIZE, batch, generator=generator) for name in names} | noise_feed(batch, generator)


def store_feed(_spec: GraphSpec, batch: int, generator: torch.Generator) -> Feed:
    return {"start": integers(STORE_ROWS - 8, batch, generator=generator)}


def markov(block_size: int, precision: Precision, *, shortlist: int, sampled: bool) -> GraphSpec:
    head = MarkovHead(MarkovConfig(VOCAB_SIZE, RANK, block_size))
    generator = torch.Generator().manual_seed(1)
    for table in (head.w1, head.w2):
        table.copy_(torch.randn(table.shape, generator=generator) * RANK**-0.25)
    return refiner_graph(
        in_precision(head, precision),
        block_size - 1,
        shortlist,
        sampled=sampled,
        hidden_size=HIDDEN_SIZE,
        vocab_size=VOCAB_SIZE,
        block_size=block_size,
        dtype=DTYPES[precision],
    )


def step(block_size: int, _precision: Precision, *, sampled: bool, draft_vocab_size: int) -> GraphSpec:
    return draft_step_graph(sampled=sampled, draft_vocab_size=draft_vocab_size, vocab_size=VOCAB_SIZE, block_size=block_size)


def denoise(block_size: int, precision: Precision) -> GraphSpec:
    return denoise_graph(hidden_size=HIDDEN_SIZE, vocab_size=VOCAB_SIZE, block_size=block_size, dtype=DTYPES[precision])


def store_taps(_block_size: int, precision: Precision) -> GraphSpec:
    return store_taps_graph(num_rows=STORE_ROWS, taps_size=HIDDEN_SIZE, dtype=DTYPES[precision])


CASES: dict[str, Case] = {
    "denoise": Case(denoise, denoise_feed),
    "confidence": Case(lambda block_size, _: confidence_graph(block_size), lambda *_: {}, ({"Q": 1}, {"Q": 5}, {"Q": VOCAB_SIZE})),
    "store-taps": Case(store_taps, store_feed, ({"W": 1}, {"W": 4}, {"W": 8})),
    "lookup": Case(lambda block_size, _: lookup_graph(block_size, NUM_POSITIONS), lookup_feed),
    "lookup in a growing history": Case(lambda block_size, _: lookup_graph(block_size, "N"), lookup_feed),
    **{
        f"draft-step, {rows} rows{', sampled' * sampled}": Case(partial(step, sampled=sampled, draft_vocab_size=rows), step_feed)
        for sampled in (False, True)
        for rows in (VOCAB_SIZE - 3, VOCAB_SIZE, VOCAB_SIZE + 2)
    },
    **{
        f"markov, shortlist {shortlist}{', sampled' * sampled}": Case(partial(markov, shortlist=shortlist, sampled=sampled), block_feed)
        for sampled in (False, True)
        for shortlist in (0, 7)
    },
}


def export(spec: GraphSpec, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    with WeightStore(folder) as weights:
        return export_graph(spec, folder, weights, {}).path


def session_of(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    # It warns that caches are copied, which they are here.
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def assert_equals_module(spec: GraphSpec, session: onnxruntime.InferenceSession, feed: Feed) -> list[Tensor]:
    arguments = [feed[entry.name] if isinstance(entry, TensorSpec) else [feed[one.name] for one in entry] for entry in spec.inputs]
    with torch.no_grad():
        results = spec.module(*arguments)
    results = [results] if isinstance(results, Tensor) else results
    expected = [one for result in results for one in (result if isinstance(result, list) else [result])]
    found = session.run(None, {tensor.name: feed[tensor.name].numpy() for tensor in spec.flat_inputs()})
    for tensor, one, other in zip(spec.outputs, found, expected, strict=True):
        assert one.shape == tuple(other.shape), tensor.name
        if tensor.dtype.is_floating_point:
            assert_close(one, other, TOLERANCE)
        else:
            assert np.array_equal(one, other.numpy()), tensor.name
    return expected


# With one proposal a block, what comes before it is empty: every graph that has a case for that, once.
SMALLEST = ("denoise", "lookup", f"draft-step, {VOCAB_SIZE - 3} rows, sampled", "markov, shortlist 7")


@pytest.mark.parametrize(("name", "block_size"), [*((name, 5) for name in CASES), *((name, 2) for name in SMALLEST)])
def test_equals_the_module(name: str, block_size: int, tmp_path: Path) -> None:
    case = CASES[name]
    spec = case.make(block_size, Precision.FP32)
    session = session_of(export(spec, tmp_path))
    generator = torch.Generator().manual_seed(block_size)
    for batch in (1, 2, 5):
        for sizes in case.sizes:
            inputs = random_inputs(spec, {"B": batch, **sizes}, generator)
            assert_equals_module(spec, session, inputs | case.feed(spec, batch, generator))


# The other cases have no operator that these have not.
BUILT = (
    *("denoise", "confidence", "store-taps", "lookup"),
    *(f"draft-step, {VOCAB_SIZE + 2} rows", f"draft-step, {VOCAB_SIZE - 3} rows, sampled"),
    *("markov, shortlist 0", "markov, shortlist 7, sampled"),
)


@pytest.mark.parametrize("name", BUILT)
def test_tensorrt_rtx_builds_it_in_half_precision(name: str, tmp_path: Path) -> None:
    _import_tensorrt("tensorrt_rtx")
    from polygraphy.backend.trt import Profile, create_config, engine_bytes_from_network, network_from_onnx_path

    spec = CASES[name].make(4, Precision.FP16)
    builder, network, parser = network_from_onnx_path(str(export(spec, tmp_path)), strongly_typed=True)
    assert {network.get_output(index).name for index in range(network.num_outputs)} == {tensor.name for tensor in spec.outputs}
    profile = Profile()
    for tensor in spec.flat_inputs():
        least, most = (tensor.shape({"B": batch, "W": rows, "Q": rows, "N": NUM_POSITIONS}) for batch, rows in ((1, 2), (4, 8)))
        profile.add(tensor.name, least, most, most)
    content = engine_bytes_from_network((builder, network, parser), config=create_config(builder, network, profiles=[profile]))
    assert memoryview(content).nbytes > 0


# In place.


def run_in_place(session: onnxruntime.InferenceSession, spec: GraphSpec, feed: Feed, places: dict[str, str]) -> dict[str, Tensor]:
    """Outputs of a run in which each output of ``places`` has the address of the input that it names."""
    # Copies, because they are written to.
    values = {one.name: onnxruntime.OrtValue.ortvalue_from_numpy(feed[one.name].numpy().copy()) for one in spec.flat_inputs()}
    binding = session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for tensor in spec.outputs:
        if tensor.name in places:
            binding.bind_ortvalue_output(tensor.name, values[places[tensor.name]])
        else:
            binding.bind_output(tensor.name)
    session.run_with_iobinding(binding)
    return {tensor.name: torch.tensor(value.numpy()) for tensor, value in zip(spec.outputs, binding.get_outputs(), strict=True)}


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("store-taps", {"store_out": "store"}),
        ("lookup", {"history_out": "history"}),
        ("denoise", {"out_hidden": "kept_hidden", "out_logits": "kept_logits"}),
    ],
)
def test_updates_in_place(name: str, places: dict[str, str], tmp_path: Path) -> None:
    case = CASES[name]
    spec = case.make(5, Precision.FP32)
    session = session_of(export(spec, tmp_path))
    generator = torch.Generator().manual_seed(9)
    feed = random_inputs(spec, {"B": 4, **case.sizes[-1]}, generator) | case.feed(spec, 4, generator)
    apart, in_place = run_in_place(session, spec, feed, {}), run_in_place(session, spec, feed, places)
    for output in apart:
        assert torch.equal(apart[output], in_place[output]), output
    for output, place in places.items():
        assert not torch.equal(in_place[output], feed[place])


# The decoder.


@pytest.mark.parametrize("form", AttentionForm)
def test_draft_decoder_equals_the_module(form: AttentionForm, tmp_path: Path) -> None:
    write_target(tmp_path / "target", "qwen3", hidden_size=HIDDEN_SIZE)
    target = open_target(str(tmp_path / "target"))
    spec = draft_decoder_graph(open_draft_model(None, None, (0, 2), target).decoder(NUM_POSITIONS, form))
    assert [tensor.name for tensor in spec.outputs] == [
        "hidden",
        *(f"{kind}_cache_out.{layer}" for kind in ("key", "value") for layer in (0, 1)),
    ]
    session = session_of(export(spec, tmp_path / "graphs"))
    generator = torch.Generator().manual_seed(3)
    for batch, num_tokens in ((1, 1), (3, 1), (2, 7)):
        inputs = random_inputs(spec, {"B": batch, "S": num_tokens, "N": NUM_POSITIONS}, generator)
        assert_equals_module(spec, session, inputs | {"position": integers(NUM_POSITIONS - 7, batch, generator=generator)})


def test_draft_decoder_shares_the_targets_weights(tmp_path: Path) -> None:
    """What both use is stored once."""
    from xpress_export.graphs.target import target_graph

    write_target(tmp_path / "target", hidden_size=HIDDEN_SIZE)
    target = open_target(str(tmp_path / "target"))
    folder = tmp_path / "graphs"
    folder.mkdir()
    sizes = []
    with WeightStore(folder) as weights:
        for spec in (
            target_graph(target.decoder((0,), NUM_POSITIONS, AttentionForm.LENGTH)),
            draft_decoder_graph(open_draft_model(None, None, (0, 2), target).decoder(NUM_POSITIONS, AttentionForm.LENGTH)),
        ):
            export_graph(spec, folder, weights, {})
            sizes.append((folder / "weights.bin").stat().st_size)
    assert sizes[0] == sizes[1] > 0
