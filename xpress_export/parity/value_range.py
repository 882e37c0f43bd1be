"""Where a module in half precision comes close to the largest number of its precision, or leaves it.

ONNX Runtime's CPU keeps the intermediate results of fp16 graphs in fp32, so that an overflow stays hidden there and shows on a GPU. Here
the PyTorch module runs with the output of every operator rounded to its precision, and each is looked at. Knows operators and names of
modules; knows nothing about graphs or about what a result should be.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

_ATTENTIONS = ("mask_attention", "length_attention")
# Computed in fp32 and rounded once, as kernels that accumulate in fp32 do: PyTorch's own fp16 products take fifteen times as long on a CPU.
_PRODUCTS = ("matmul", "linear", *_ATTENTIONS)
# Memory without a value yet.
_UNSET = ("empty", "empty_like")
_CASTS = ("to", "_to_copy")


@dataclass(frozen=True)
class Peak:
    """What an operator of a module gave at most: a magnitude, as it was before it was rounded."""

    operator: str
    module: str
    magnitude: float


class ValueRange:
    """Over all calls of a module: its largest result in ``dtype``, the first result that left the range, and how many values did.

    ``original`` is the same module in fp32, whose weights tell what became of one that left the range.
    What counts is where a value stops being finite: not where it is handed on, nor an infinity that was asked for, as masks do. Results in
    fp32 count for that alone. Scores of attention, before scale and mask, count as if they were in ``dtype``.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, original: nn.Module) -> None:
        self.dtype = dtype
        self.limit = torch.finfo(dtype).max
        self.largest: Peak | None = None
        self.overflow: Peak | None = None
        self.num_not_finite = 0
        self._module = module
        unrounded = {**dict(original.named_parameters()), **dict(original.named_buffers())}
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            self.look("weight", name, tensor, functools.partial(largest_magnitude, [unrounded[name]]))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at every result while the body calls the module."""
        path: list[str] = []
        hooks = []
        for name, child in self._module.named_modules():
            hooks.append(child.register_forward_pre_hook(functools.partial(_enter, path, name)))
            hooks.append(child.register_forward_hook(functools.partial(_leave, path), always_call=True))
        try:
            with _Watch(self, path):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def look(self, operator: str, module: str, result: Tensor, exact: Callable[[], float | None]) -> None:
        """Count one result. ``exact`` is asked where it left the range: the magnitude in fp32, or None where it does not count."""
        if not result.is_floating_point() or not result.numel():
            return
        low, high = result.aminmax()
        magnitude = float(torch.maximum(-low, high))
        if not math.isfinite(magnitude):
            before = exact()
            if before is None:
                return
            magnitude = before
            self.num_not_finite += int((~result.isfinite()).sum())
            self.overflow = self.overflow or Peak(operator, module, magnitude)
        if result.dtype == self.dtype and (self.largest is None or magnitude > self.largest.magnitude):
            self.largest = Peak(operator, module, magnitude)

    def to_json(self) -> dict[str, Any] | None:
        """The overflow if there is one, else the largest magnitude, and how often it fits into the range; None where nothing is in half."""
        peak = self.overflow or self.largest
        if peak is None:
            return None
        return {
            "passed": self.overflow is None,
            "operator": peak.operator,
            "module": peak.module,
            "largest": peak.magnitude,
            "limit": self.limit,
            "headroom": self.limit / peak.magnitude if peak.magnitude else None,
            "not_finite": self.num_not_finite,
        }


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """``path`` holds the names of the modules that are running, the innermost last."""

    def __init__(self, found: ValueRange, path: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found
        self._path = path

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        found, kwargs = self._found, kwargs or {}
        operator, module = func.overloadpacket.__name__, self._path[-1] if self._path else ""
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        wide_args = functools.partial(tree_map_only, Tensor, lambda tensor: tensor.float() if tensor.dtype == found.dtype else tensor, args)

        def of_finite(largest: Callable[[], float]) -> float | None:
            """``largest()`` where no infinity was asked for or handed on."""
            asked = any(isinstance(leaf, float) and math.isinf(leaf) for leaf in tree_leaves(args))
            return None if asked or not all(bool(tensor.isfinite().all()) for tensor in tensors) else largest()

        def exact() -> float:
            # A cast has no other result in fp32 than what is cast.
            return largest_magnitude(tensors if operator in _CASTS else tree_leaves(func(*wide_args(), **kwargs)))

        if operator in _PRODUCTS and args[0].dtype == found.dtype:
            wide = wide_args()
            if operator in _ATTENTIONS:
                scores = _scores(*wide[:2])
                of_scores = functools.partial(of_finite, functools.partial(largest_magnitude, [scores]))
                found.look("attention scores", module, scores.to(found.dtype), of_scores)
            result = func(*wide, **kwargs).to(found.dtype)
        else:
            result = func(*args, **kwargs)
        # A view holds what its origin held.
        if operator not in _UNSET and (operator in _CASTS or not func.is_view):
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    found.look(operator, module, leaf, functools.partial(of_finite, exact))
        return result


def _scores(query: Tensor, key: Tensor) -> Tensor:
    """Products of query [B, heads, S, D] and cached keys [B, kv heads, N, D] for every head and row."""
    batch, num_heads, num_rows, head_dim = query.shape
    grouped = query.reshape(batch, key.shape[1], num_heads // key.shape[1] * num_rows, head_dim)
    return grouped @ key.transpose(-1, -2)


def largest_magnitude(tensors: Sequence[Tensor]) -> float:
    """The largest magnitude in fp32; the largest float stands for what fp32 cannot hold either."""
    return min(max(float(tensor.float().abs().nan_to_num(math.inf).max()) for tensor in tensors), sys.float_info.max)


def _enter(path: list[str], name: str, _module: nn.Module, _inputs: Any) -> None:
    path.append(name)


def _leave(path: list[str], _module: nn.Module, _inputs: Any, _outputs: Any) -> None:
    path.pop()
