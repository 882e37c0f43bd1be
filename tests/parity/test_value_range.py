"""An overflow is found where it happens and named; what is no overflow is not taken for one."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from xpress_export.models import ops
from xpress_export.models.layers import Linear
from xpress_export.parity.report import overflow
from xpress_export.parity.value_range import ValueRange


def watched(module: nn.Module, *inputs: Tensor, dtype: torch.dtype = torch.float16) -> tuple[ValueRange, Tensor]:
    """The range of one call in ``dtype``, and its output."""
    rounded = copy.deepcopy(module).to(dtype)
    found = ValueRange(rounded, dtype, module)
    cast = [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in inputs]
    with torch.inference_mode(), found.watching():
        output: Tensor = rounded(*cast)
    return found, output


class Computed(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


def linear(rows: int, columns: int, value: float) -> Linear:
    made = Linear(rows, columns)
    made.weight.copy_(torch.full((rows, columns), value))
    return made


class Hidden(nn.Module):
    """128,000 times 0.001 is 128: in fp16 the product in between has no number."""

    def __init__(self) -> None:
        super().__init__()
        self.first = linear(64, 4, 1000.0)
        self.second = linear(4, 1, 0.001)

    def forward(self, states: Tensor) -> Tensor:
        product: Tensor = self.second(self.first(states))
        return product


STATES = torch.full((1, 2, 64), 2.0)


def test_overflow_is_named_with_its_value_and_what_to_do() -> None:
    found, output = watched(Hidden(), STATES)
    assert found.to_json() == {
        "passed": False,
        "operator": "matmul",
        "module": "first",
        "largest": 128000.0,
        "limit": 65504.0,
        "headroom": pytest.approx(65504 / 128000),
        # Two rows of four: the infinities that the next product makes of them are none of its own.
        "not_finite": 8,
    }
    assert not output.isfinite().all()
    assert overflow(found.to_json() or {}) == (
        "matmul in first reaches 1.28e+05, beyond 65504 (8 values overflow); build with --precision bf16"
    )


def test_the_same_in_bf16_has_room() -> None:
    found, output = watched(Hidden(), STATES, dtype=torch.bfloat16)
    assert (found.overflow, found.num_not_finite) == (None, 0)
    assert found.largest is not None
    assert (found.largest.module, found.largest.magnitude) == ("first", 128000.0)
    assert output.float().max() == pytest.approx(512, rel=1e-2)


def test_overflow_that_disappears_again() -> None:
    """An infinity of which an activation makes one: the output is finite, and the overflow is found nonetheless."""
    found, output = watched(nn.Sequential(linear(4, 2, 20000.0), nn.Tanh()), torch.ones(1, 1, 4))
    assert output.tolist() == [[[1, 1]]]
    assert found.overflow is not None
    assert (found.overflow.module, found.overflow.magnitude) == ("0", 80000.0)


def test_largest_value_of_a_module_that_stays_in_range() -> None:
    found, _ = watched(Hidden(), STATES / 4)
    assert found.overflow is None
    shown = found.to_json()
    assert shown is not None
    assert (shown["passed"], shown["operator"], shown["module"], shown["largest"]) == (True, "matmul", "first", 32000.0)
    assert shown["headroom"] == pytest.approx(2.047)


@pytest.mark.parametrize(
    "masked",
    [
        lambda scores, hidden: scores.masked_fill(hidden, float("-inf")).softmax(-1),
        lambda scores, hidden: (scores + torch.zeros_like(scores).masked_fill(hidden, float("-inf"))).softmax(-1),
        lambda scores, hidden: torch.where(hidden, torch.full_like(scores, float("-inf")), scores).softmax(-1),
    ],
)
def test_masks_do_not_count(masked: Callable[..., Tensor]) -> None:
    found, output = watched(Computed(masked), torch.tensor([[1.0, 2, 3]]), torch.tensor([[False, True, True]]))
    assert output.tolist() == [[1, 0, 0]]
    assert (found.overflow, found.num_not_finite) == (None, 0)


@pytest.mark.parametrize("form", ["mask", "length"])
@pytest.mark.parametrize("sign", [1, -1])
def test_attention_scores_overflow_where_softmax_hides_it(form: str, sign: int) -> None:
    """Minus infinity among other scores is as good as a mask: the output is finite."""
    query, key = torch.full((1, 2, 1, 4), 200.0), torch.zeros(1, 1, 3, 4)
    key[0, 0, 1] = sign * 100.0

    def attend(query: Tensor, key: Tensor) -> Tensor:
        if form == "length":
            return ops.length_attention(query, key, key, torch.tensor([3]), 0.5, 0.0, False)  # type: ignore[no-any-return]
        return ops.mask_attention(query, key, key, torch.ones(1, 1, 1, 3, dtype=torch.bool), 0.5, 0.0)  # type: ignore[no-any-return]

    found, output = watched(Computed(attend), query, key)
    assert output.isfinite().all()
    assert found.overflow is not None
    assert (found.overflow.operator, found.overflow.magnitude, found.num_not_finite) == ("attention scores", 80000.0, 2)


def test_weight_and_cast_beyond_the_range() -> None:
    found, _ = watched(linear(2, 2, 1e5), torch.zeros(1, 2))
    assert found.overflow is not None
    assert (found.overflow.operator, found.overflow.module, found.num_not_finite) == ("weight", "weight", 4)
    cast, _ = watched(Computed(lambda states: (states.float() * 4).to(states.dtype)), torch.tensor([3e4, 1.0]))
    assert cast.overflow is not None
    assert (cast.overflow.operator, cast.num_not_finite) == ("to", 1)
    assert cast.overflow.magnitude == pytest.approx(1.2e5, rel=1e-3)


def test_fp32_results_have_their_own_range() -> None:
    found, _ = watched(Computed(lambda states: states.float() * 1e6), torch.tensor([3e4]))
    assert found.overflow is None
    assert found.largest is None
    assert found.to_json() is None


def test_rounding_is_that_of_the_precision() -> None:
    """The next operator reads the rounded result, as it does on a GPU."""
    found, output = watched(Computed(lambda states: (states @ torch.ones(2, 1, dtype=states.dtype)) - 2048), torch.tensor([[2048.0, 1.0]]))
    assert output.item() == 0
    assert found.overflow is None
