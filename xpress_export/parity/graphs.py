"""Every graph of a bundle against the PyTorch module that it was traced from, on two rows of different length.

The graphs are fed as in a generation: prompt, first block, a round after a partial acceptance, a single token. Each graph's input comes
from PyTorch's output of the one before, so that an error shows in the graph that makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xpress_export.checkpoints import DrafterCheckpoint, TargetCheckpoint
from xpress_export.graph_set import graph_makers, graph_names
from xpress_export.graphs.spec import DYNAMIC_DIMS, GraphSpec, TensorSpec
from xpress_export.options import BuildOptions
from xpress_export.parity.compare import UNEQUAL, ArgmaxComparison, ArrayComparison, compare_argmax, compare_arrays
from xpress_export.parity.runner import Arrays, GraphRunner
from xpress_runtime.backends.base import Backend
from xpress_runtime.bundle import Bundle
from xpress_runtime.manifest import Manifest
from xpress_runtime.sets import AttentionForm

Tensors = dict[str, Tensor]

# Outputs that rank tokens: their argmax matters more than their values.
_RANKINGS = ("logits", "refined_logits")
_PROMPT_ROWS = 9
_TABLE_ROWS = 4096


@dataclass
class GraphComparison:
    """Worst error of each output over all calls of a graph, and its argmax agreement where it ranks tokens."""

    outputs: dict[str, ArrayComparison] = field(default_factory=dict)
    argmax: dict[str, ArgmaxComparison] = field(default_factory=dict)
    calls: int = 0

    def passed(self, tolerance: float) -> bool:
        errors_fit = all(output.within(tolerance) for output in self.outputs.values())
        return bool(self.calls) and errors_fit

    def to_json(self, tolerance: float) -> dict[str, Any]:
        worst_name, worst = max(self.outputs.items(), key=lambda item: item[1].scaled_error)
        return {
            "passed": self.passed(tolerance),
            "calls": self.calls,
            "worst_output": worst_name,
            "max_abs_error": worst.max_abs_error,
            "scaled_error": worst.scaled_error,
            "argmax": {name: ranking.to_json() for name, ranking in self.argmax.items()},
        }


def built_options(manifest: Manifest) -> BuildOptions:
    """The options that a bundle was built with."""
    return BuildOptions(
        num_passes=manifest.num_passes,
        shortlist=manifest.shortlist,
        capacity=manifest.capacity,
        batch=manifest.batch,
        prefill_chunk=manifest.prefill_chunk,
        cache_rows=manifest.cache_rows,
    )


def check_graphs(
    bundle: Bundle,
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    backend: Backend,
    *,
    form: AttentionForm = AttentionForm.LENGTH,
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, GraphComparison]:
    """Run and compare every graph; ``report`` hears a graph's name before it is compared."""
    options = built_options(bundle.manifest)
    makers = graph_makers(target, drafter, options, form)
    check = _GraphCheck(GraphRunner(bundle, backend))
    feed = _Feed(target, drafter, options)
    order = ("embed", "target", "head", "drafter", *(name for name in graph_names(options) if name.startswith("refiner")), "accept")
    for name in order:
        report(name)
        spec = makers[name]()
        feed.calls[name](lambda inputs, spec=spec: check.call(spec, inputs))  # type: ignore[misc]
    return check.comparisons


class _GraphCheck:
    """Calls a graph in PyTorch and on the backend, keeps the worst errors and answers with PyTorch's outputs."""

    def __init__(self, runner: GraphRunner) -> None:
        self._runner = runner
        self.comparisons: dict[str, GraphComparison] = {}

    @torch.inference_mode()
    def call(self, spec: GraphSpec, inputs: Tensors) -> Tensors:
        arguments = [inputs[entry.name] if isinstance(entry, TensorSpec) else [inputs[t.name] for t in entry] for entry in spec.inputs]
        reference = dict(zip((output.name for output in spec.outputs), _flatten(spec.module(*arguments)), strict=True))
        dims = _dims(spec, inputs)
        found = self._runner.run(
            spec.name,
            {name: tensor.numpy() for name, tensor in inputs.items()},
            {DYNAMIC_DIMS[letter]: size for letter, size in dims.items()},
        )
        expected = {name: tensor.numpy() for name, tensor in reference.items()}
        if "candidates" in expected and "candidates" in found:
            found, expected = by_candidate(found), by_candidate(expected)
        comparison = self.comparisons.setdefault(spec.name, GraphComparison())
        comparison.calls += 1
        for name, array in expected.items():
            # A graph of another kind in this one's place may lack an output.
            error = compare_arrays(found[name], array) if name in found else UNEQUAL
            worst = comparison.outputs.get(name)
            if worst is None or error.scaled_error > worst.scaled_error:
                comparison.outputs[name] = error
            if name in _RANKINGS and name in found:
                comparison.argmax[name] = _added(comparison.argmax.get(name), compare_argmax(found[name], array))
        return reference


Call = Callable[[Tensors], Tensors]


class _Feed:
    """The inputs of each graph's calls. ``calls[graph](call)`` makes them in order and keeps what later graphs read."""

    def __init__(self, target: TargetCheckpoint, drafter: DrafterCheckpoint, options: BuildOptions) -> None:
        self._generator = torch.Generator().manual_seed(20260802)
        self._vocab_size = target.config.vocab_size
        cache_rows = _PROMPT_ROWS + 4 * drafter.config.block_size
        self._target_caches = _empty_caches(target.config, cache_rows)
        self._drafter_caches = _empty_caches(drafter.config.backbone, cache_rows)
        self._cache_rows = options.cache_rows
        self._block_size = drafter.config.block_size
        self._mask_token_id = drafter.config.mask_token_id
        self._embeddings: list[Tensor] = []
        self._taps: list[Tensor] = []
        self._hidden: list[Tensor] = []
        self._draft_hidden: list[Tensor] = []
        self._base_logits: list[Tensor] = []
        self._head: Call | None = None
        refiners = {f"refiner-k{passes}": self._refiner for passes in options.num_passes}
        self.calls: dict[str, Callable[[Call], None]] = {
            "embed": self._embed,
            "target": self._target,
            "head": self._rank,
            "drafter": self._drafter,
            **refiners,
            "accept": self._accept,
        }

    def _ids(self, *shape: int) -> Tensor:
        return torch.randint(self._vocab_size, shape, generator=self._generator)

    def _embed(self, call: Call) -> None:
        block = self._ids(2, self._block_size)
        block[:, 1:] = self._mask_token_id
        # Every row of the table: a damaged one would show in few texts.
        for first in range(0, self._vocab_size, _TABLE_ROWS):
            call({"ids": torch.arange(first, min(first + _TABLE_ROWS, self._vocab_size))[None]})
        for ids in (self._ids(2, _PROMPT_ROWS), self._ids(2, self._block_size), self._ids(2, 1), block):
            self._embeddings.append(call({"ids": ids})["embeddings"])

    def _target(self, call: Call) -> None:
        caches = self._target_caches
        # The second row was shorter: its second call overwrites rows of the first, as after a rejected block.
        for embeddings, position in zip(self._embeddings, ([0, 0], [9, 6], [11, 9]), strict=False):
            outputs = call({"embeddings": embeddings, "position": torch.tensor(position), **caches})
            self._hidden.append(outputs["hidden"])
            self._taps.append(outputs["taps"])
            caches = _next_caches(outputs)

    def _rank(self, call: Call) -> None:
        self._head = call
        last = torch.tensor([[_PROMPT_ROWS - 1], [5]])
        call({"hidden": self._hidden[0], "rows": last})
        call({"hidden": self._hidden[1], "rows": torch.arange(self._block_size).expand(2, -1).contiguous()})

    def _drafter(self, call: Call) -> None:
        caches = self._drafter_caches
        block = self._embeddings[3]
        draft_rows = torch.arange(1, self._block_size).expand(2, -1).contiguous()
        assert self._head is not None, "the head is compared before the drafter"
        # Prompt rows, a first block without new context, and one after different acceptances.
        for taps, context, position in (
            (self._taps[0], [0, 0], [9, 6]),
            (self._taps[1], [9, 6], [9, 6]),
            (self._taps[1], [9, 6], [9 + self._block_size, 7]),
        ):
            outputs = call(
                {
                    "embeddings": block,
                    "taps": taps,
                    "context_position": torch.tensor(context),
                    "block_position": torch.tensor(position),
                    **caches,
                }
            )
            caches = _next_caches(outputs)
            self._draft_hidden.append(outputs["hidden"])
            self._base_logits.append(self._head({"hidden": outputs["hidden"], "rows": draft_rows})["logits"])

    def _refiner(self, call: Call) -> None:
        for hidden, base in zip(self._draft_hidden, self._base_logits, strict=True):
            call({"hidden": hidden, "base_logits": base, "anchor": self._ids(2), "predecessor": self._ids(2)})

    def _accept(self, call: Call) -> None:
        for inputs in self._accept_cases():
            call(inputs)

    def _accept_cases(self) -> Iterator[Tensors]:
        width = self._block_size
        target = self._ids(2, width)
        for accepted in range(width):
            verify = torch.cat([self._ids(2, 1), target[:, :-1]], dim=1)
            if accepted < width - 1:
                verify[0, accepted + 1] = (verify[0, accepted + 1] + 1) % self._vocab_size
            yield {
                "verify_ids": verify,
                "target_tokens": target,
                "position": torch.tensor([40, 3]),
                "predecessor": self._ids(2),
                "active": torch.tensor([1, accepted % 2]),
            }
        # Plain decoding, up to and past the position from which rows are frozen.
        for position in range(max(0, self._cache_rows - 4 * width), self._cache_rows, 2):
            yield {
                "verify_ids": self._ids(2, 1),
                "target_tokens": self._ids(2, 1),
                "position": torch.tensor([position, position + 1]),
                "predecessor": self._ids(2),
                "active": torch.tensor([1, 1]),
            }


def by_candidate(outputs: Arrays) -> Arrays:
    """Candidates in the order of their ids, their scores with them: libraries sort candidates of equal logits differently."""
    order = outputs["candidates"].argsort(axis=-1)
    return {**outputs, **{name: np.take_along_axis(outputs[name], order, axis=-1) for name in ("candidates", "refined_logits")}}


def _empty_caches(config: Any, cache_rows: int) -> Tensors:
    shape = (2, config.num_kv_heads, cache_rows, config.head_dim)
    return {f"{kind}_cache.{layer}": torch.zeros(shape) for kind in ("key", "value") for layer in range(config.num_layers)}


def _next_caches(outputs: Tensors) -> Tensors:
    return {name.replace("_cache_out.", "_cache."): tensor for name, tensor in outputs.items() if "_cache_out." in name}


def _dims(spec: GraphSpec, inputs: Tensors) -> dict[str, int]:
    dims: dict[str, int] = {}
    for tensor in spec.flat_inputs():
        for axis, dim in enumerate(tensor.dims):
            if isinstance(dim, str):
                dims[dim] = inputs[tensor.name].shape[axis]
    return dims


def _flatten(outputs: Any) -> Iterator[Tensor]:
    if isinstance(outputs, Tensor):
        yield outputs
    else:
        for output in outputs:
            yield from _flatten(output)


def _added(total: ArgmaxComparison | None, more: ArgmaxComparison) -> ArgmaxComparison:
    if total is None:
        return more
    return ArgmaxComparison(total.rows + more.rows, total.agreeing + more.agreeing)
