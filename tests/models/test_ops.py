"""Each custom operator: its eager body against a reference of its own, its single ONNX operator against the eager body."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tests.models.close import assert_close
from xpress_export.graphs.exporter import export_graph
from xpress_export.graphs.spec import GraphSpec, TensorSpec
from xpress_export.graphs.translations import TRANSLATIONS
from xpress_export.graphs.weights import WeightStore
from xpress_export.models import ops

# One operator in fp32 on vectors of a dozen elements: a few units in the last place.
TOLERANCE = 1e-6

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, CAPACITY = 4, 2, 6, 16
SCALE = 0.37
# Well below the largest scores, so that it bends them; 0 is none.
CAPS = (0.0, 0.8)
# Another than the operator's default.
EPSILON = 3e-3

Visible = Callable[[int, int], range]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def attention_inputs(batch: int, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        random(batch, NUM_HEADS, num_rows, HEAD_DIM, seed=1),
        random(batch, NUM_KV_HEADS, CAPACITY, HEAD_DIM, seed=2),
        random(batch, NUM_KV_HEADS, CAPACITY, HEAD_DIM, seed=3),
    )


def attention_reference(query: Tensor, key: Tensor, value: Tensor, visible: Visible, cap: float = 0.0) -> NDArray[np.float64]:
    """Attention written out: one query row, one head at a time, over the columns that ``visible(batch row, query row)`` names.

    A capped score is cap · (e^(2x) - 1) / (e^(2x) + 1) with x = score / cap: the hyperbolic tangent, not named as one.
    """
    q, k, v = (tensor.double().numpy() for tensor in (query, key, value))
    output = np.zeros(q.shape)
    for row, head, index in np.ndindex(q.shape[:3]):
        kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
        columns = list(visible(row, index))
        scores = np.array([q[row, head, index] @ k[row, kv_head, column] * SCALE for column in columns])
        if cap:
            grown = np.exp(2 * scores / cap)
            scores = cap * (grown - 1) / (grown + 1)
        weights = np.exp(scores - scores.max())
        output[row, head, index] = weights @ v[row, kv_head, columns] / weights.sum()
    return output


def bounded(lengths: Sequence[int], num_rows: int, *, causal: bool) -> Visible:
    """The last query row sees all valid columns; causal: each earlier one sees one column less."""
    return lambda row, index: range(lengths[row] - (num_rows - 1 - index) * causal)


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("num_rows", "lengths"), [(1, [1, 9, 16]), (4, [4, 9, 16]), (3, [5, 5, 5])])
def test_length_attention(num_rows: int, lengths: list[int], causal: bool, cap: float) -> None:
    inputs = attention_inputs(3, num_rows)
    found = ops.length_attention(*inputs, torch.tensor(lengths), SCALE, cap, causal)
    assert_close(found, attention_reference(*inputs, bounded(lengths, num_rows, causal=causal), cap), TOLERANCE)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("num_rows", [1, 4])
def test_columns_behind_the_length_do_not_matter(num_rows: int, causal: bool) -> None:
    query, key, value = attention_inputs(2, num_rows)
    lengths = torch.tensor([5, 11])
    before = ops.length_attention(query, key, value, lengths, SCALE, 0.0, causal)
    for row, length in enumerate(lengths.tolist()):
        key[row, :, length:] = 1e30
        value[row, :, length:] = -1e30
    assert torch.equal(ops.length_attention(query, key, value, lengths, SCALE, 0.0, causal), before)


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("num_rows", [1, 4])
def test_mask_attention_equals_length_attention(num_rows: int, causal: bool, cap: float) -> None:
    inputs, lengths = attention_inputs(3, num_rows), [4, 9, 16]
    visible = bounded(lengths, num_rows, causal=causal)
    mask = torch.zeros(3, 1, num_rows, CAPACITY, dtype=torch.bool)
    for row in range(3):
        for index in range(num_rows):
            mask[row, 0, index, list(visible(row, index))] = True
    found = ops.mask_attention(*inputs, mask, SCALE, cap)
    assert_close(found, ops.length_attention(*inputs, torch.tensor(lengths), SCALE, cap, causal), TOLERANCE)
    assert_close(found, attention_reference(*inputs, visible, cap), TOLERANCE)


def test_cap_bends_scores_and_a_high_one_does_not() -> None:
    query, key, value = attention_inputs(2, 4)
    lengths = torch.tensor([9, 16])
    plain, low, high = (ops.length_attention(query, key, value, lengths, SCALE, cap, True) for cap in (0.0, CAPS[1], 1e6))
    assert (plain - low).abs().max() > 0.1
    assert_close(high, plain, TOLERANCE)


def test_a_capped_score_is_at_most_the_cap() -> None:
    """However large scores are, no weight of a row is more than e^(2 · cap) times another."""
    query, key, _ = attention_inputs(2, 4)
    identity = torch.eye(CAPACITY)[None, None].expand(2, NUM_KV_HEADS, -1, -1)
    mask = torch.ones(2, 1, 4, CAPACITY, dtype=torch.bool)
    largest, smallest = torch.aminmax(ops.mask_attention(1e4 * query, key, identity, mask, SCALE, 0.1), dim=-1)[::-1]
    assert largest.shape == (2, NUM_HEADS, 4)
    assert (largest / smallest - np.exp(0.2)).abs().max() < 1e-4


@pytest.mark.parametrize("num_rows", [1, 3])
def test_cache_update(num_rows: int) -> None:
    cache, update = random(3, NUM_KV_HEADS, CAPACITY, HEAD_DIM, seed=4), random(3, NUM_KV_HEADS, num_rows, HEAD_DIM, seed=5)
    before, positions = cache.clone(), [0, 6, CAPACITY - num_rows]
    updated = ops.cache_update(cache, update, torch.tensor(positions))
    assert torch.equal(cache, before)
    for row, start in enumerate(positions):
        for column in range(CAPACITY):
            written = start <= column < start + num_rows
            assert torch.equal(updated[row, :, column], update[row, :, column - start] if written else before[row, :, column])


@pytest.mark.parametrize("position", [-1, CAPACITY - 2, CAPACITY])
def test_cache_update_out_of_range(position: int) -> None:
    cache, update = torch.zeros(2, NUM_KV_HEADS, CAPACITY, HEAD_DIM), torch.zeros(2, NUM_KV_HEADS, 3, HEAD_DIM)
    with pytest.raises(IndexError, match=f"cache rows {position}…{position + 2} are outside a cache of {CAPACITY} rows"):
        ops.cache_update(cache, update, torch.tensor([0, position]))


def rotary_inputs(batch: int, num_rows: int, num_pairs: int = HEAD_DIM // 2) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    angles = torch.arange(CAPACITY)[:, None] * torch.tensor([1.0, 0.3, 0.01])[None, :num_pairs]
    positions = torch.tensor([[(7 * row + 2 * index) % CAPACITY for index in range(num_rows)] for row in range(batch)])
    return random(batch, NUM_HEADS, num_rows, HEAD_DIM, seed=6), angles.cos(), angles.sin(), positions


@pytest.mark.parametrize("num_rows", [1, 5])
def test_rotary_embedding(num_rows: int) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    states, cos, sin, positions = rotary_inputs(2, num_rows)
    wide_cos, wide_sin = (torch.cat([table, table], dim=-1)[positions] for table in (cos, sin))
    expected, _ = apply_rotary_pos_emb(states, states, wide_cos, wide_sin)
    assert_close(ops.rotary_embedding(states, cos, sin, positions), expected, TOLERANCE)


@pytest.mark.parametrize("num_pairs", [1, 2])
@pytest.mark.parametrize("num_rows", [1, 5])
def test_partial_rotary_embedding(num_rows: int, num_pairs: int) -> None:
    """Pairs of the first dims as complex numbers, turned by their angles; the dims behind them pass through."""
    states, cos, sin, positions = rotary_inputs(2, num_rows, num_pairs)
    found = ops.rotary_embedding(states, cos, sin, positions)
    wide = states.double()
    pairs = torch.complex(wide[..., :num_pairs], wide[..., num_pairs : 2 * num_pairs])
    turned = pairs * torch.complex(cos.double(), sin.double())[positions][:, None]
    assert_close(found[..., : 2 * num_pairs], torch.cat([turned.real, turned.imag], dim=-1), TOLERANCE)
    assert torch.equal(found[..., 2 * num_pairs :], states[..., 2 * num_pairs :])


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_rms_norm(scale: float) -> None:
    states, weight = scale * random(2, 5, 12, seed=7), 1 + 0.2 * random(12, seed=8)
    expected = nn.functional.rms_norm(states, (12,), weight, EPSILON)
    assert_close(ops.rms_norm(states, weight, EPSILON), expected, TOLERANCE)


def test_rms_norm_of_halves_has_its_statistics_in_fp32() -> None:
    """300² is beyond fp16, and the mean of squares must not be."""
    states, weight = (300 * random(2, 12, seed=7)).half(), torch.ones(12).half()
    found = ops.rms_norm(states, weight, EPSILON)
    assert found.dtype == torch.float16
    # Half precision has 11 bits: 5e-4 is one rounding.
    assert_close(found, nn.functional.rms_norm(states.double(), (12,), eps=EPSILON), 1e-3)


# Alone in a graph.


class Call(nn.Module):
    """A module that is one operator on a list of inputs."""

    def __init__(self, function: Callable[..., Tensor], *attributes: Any) -> None:
        super().__init__()
        self.function = function
        self.attributes = attributes

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        return self.function(*inputs, *self.attributes)


@dataclass(frozen=True)
class Case:
    """An operator alone: what it must become, its graph, and inputs of any batch and number of tokens."""

    node: str
    module: Call
    inputs: tuple[TensorSpec, ...]
    output: TensorSpec
    make: Callable[[int, int], tuple[Tensor, ...]]
    # Attributes that the node must have, among others.
    attributes: dict[str, float] = field(default_factory=dict)


FLOAT = torch.float32
QUERY = TensorSpec("query", ("B", NUM_HEADS, "S", HEAD_DIM), FLOAT)
CACHES = tuple(TensorSpec(name, ("B", NUM_KV_HEADS, CAPACITY, HEAD_DIM), FLOAT) for name in ("key", "value"))
TABLES = tuple(TensorSpec(name, (CAPACITY, HEAD_DIM // 2), FLOAT) for name in ("cos", "sin"))
PARTIAL_TABLES = tuple(TensorSpec(name, (CAPACITY, 2), FLOAT) for name in ("cos", "sin"))
LENGTHS = TensorSpec("key_lengths", ("B",))
MASK = TensorSpec("mask", ("B", 1, "S", CAPACITY), torch.bool)
STATES = TensorSpec("output", ("B", NUM_HEADS, "S", HEAD_DIM), FLOAT)


def lengths_of(batch: int, num_rows: int) -> Tensor:
    """Different valid lengths, each at least the number of query rows."""
    return torch.tensor([num_rows + (5 * row) % (CAPACITY - num_rows + 1) for row in range(batch)])


def random_mask(batch: int, num_rows: int) -> Tensor:
    mask = random(batch, 1, num_rows, CAPACITY, seed=9) > 0
    # No query row without a column: its softmax has no meaning.
    mask[..., 0] = True
    return mask


def update_inputs(batch: int, num_rows: int) -> tuple[Tensor, ...]:
    _, cache, _ = attention_inputs(batch, num_rows)
    update = random(batch, NUM_KV_HEADS, num_rows, HEAD_DIM, seed=5)
    return cache, update, lengths_of(batch, num_rows) - num_rows


def length_inputs(batch: int, num_rows: int) -> tuple[Tensor, ...]:
    return (*attention_inputs(batch, num_rows), lengths_of(batch, num_rows))


def mask_inputs(batch: int, num_rows: int) -> tuple[Tensor, ...]:
    return (*attention_inputs(batch, num_rows), random_mask(batch, num_rows))


def attention_case(causal: bool | None, cap: float) -> Case:
    """Attention bounded by lengths, or with ``causal`` None by a mask."""
    if causal is None:
        call = Call(ops.mask_attention, SCALE, cap)
        return Case("Attention", call, (QUERY, *CACHES, MASK), STATES, mask_inputs, {"softcap": cap, "scale": SCALE})
    call = Call(ops.length_attention, SCALE, cap, causal)
    attributes = {"softcap": cap, "scale": SCALE, "is_causal": int(causal)}
    return Case("Attention", call, (QUERY, *CACHES, LENGTHS), STATES, length_inputs, attributes)


CASES = {
    **{f"length-causal-{cap}": attention_case(True, cap) for cap in CAPS},
    **{f"length-{cap}": attention_case(False, cap) for cap in CAPS},
    **{f"mask-{cap}": attention_case(None, cap) for cap in CAPS},
    "cache-update": Case(
        "TensorScatter",
        Call(ops.cache_update),
        (CACHES[0], TensorSpec("update", ("B", NUM_KV_HEADS, "S", HEAD_DIM), FLOAT), TensorSpec("position", ("B",))),
        TensorSpec("output", CACHES[0].dims, FLOAT),
        update_inputs,
    ),
    "rotary": Case(
        "RotaryEmbedding", Call(ops.rotary_embedding), (QUERY, *TABLES, TensorSpec("positions", ("B", "S"))), STATES, rotary_inputs
    ),
    "rotary-partial": Case(
        "RotaryEmbedding",
        Call(ops.rotary_embedding),
        (QUERY, *PARTIAL_TABLES, TensorSpec("positions", ("B", "S"))),
        STATES,
        lambda batch, num_rows: rotary_inputs(batch, num_rows, 2),
        {"rotary_embedding_dim": 4},
    ),
    "rms-norm": Case(
        "RMSNormalization",
        Call(ops.rms_norm, EPSILON),
        (TensorSpec("states", ("B", "S", 12), FLOAT), TensorSpec("weight", (12,), FLOAT)),
        TensorSpec("output", ("B", "S", 12), FLOAT),
        lambda batch, num_rows: (random(batch, num_rows, 12, seed=7), 1 + 0.2 * random(12, seed=8)),
    ),
}


def test_every_operator_has_a_case() -> None:
    assert len({case.module.function for case in CASES.values()}) == len(TRANSLATIONS)


@pytest.mark.parametrize("name", CASES)
def test_becomes_one_onnx_operator(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    with WeightStore(tmp_path) as weights:
        exported = export_graph(GraphSpec(name, case.module, (case.inputs,), (case.output,)), tmp_path, weights, {})
    assert exported.operators == {case.node: 1}
    model = onnx.load(exported.path)
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 24)]
    assert not model.functions
    (node,) = model.graph.node
    found = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    assert {attribute: found.get(attribute, 0) for attribute in case.attributes} == pytest.approx(case.attributes)

    session = onnxruntime.InferenceSession(exported.path, providers=["CPUExecutionProvider"])
    for batch, num_rows in ((1, 1), (3, 1), (1, 4), (4, 7)):
        inputs = case.make(batch, num_rows)
        feed = {spec.name: tensor.numpy() for spec, tensor in zip(case.inputs, inputs, strict=True)}
        assert_close(session.run(None, feed)[0], case.module(inputs), TOLERANCE)
