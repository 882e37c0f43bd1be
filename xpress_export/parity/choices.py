"""What a graph chooses, compared with its reference: drafts with the logits they came from, and choices whose logits do not show.

Two libraries add in different orders, so a choice between two that are nearly as good may fall either way. Of drafts the margins tell which
are sure. Where a graph only shows what it chose, its reference is asked again with inputs that differ by an error: what stays is sure.
Everything else is not compared, and counted.

Sizes: B rows, P block size, V vocabulary, C candidates, K passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from xpress_export.graphs.refiner import GreedyForm, RefinerGraph, SampledForm
from xpress_export.graphs.spec import GraphSpec
from xpress_export.models.markov import MarkovHead
from xpress_export.models.noise import BlockNoise
from xpress_export.parity.compare import removed
from xpress_export.parity.ids import Bools, comparable_slots
from xpress_export.parity.modules import Tensors, run_module, to_arrays
from xpress_export.parity.runner import Arrays

# Graphs that show what they chose and not from what; all of them compute in fp32.
CHOOSING = ("sample", "accept-sampled", "accept-candidates", "filter-top-k", "filter-top-p", "denoise", "draft-step-sampled")

# Beyond what fp32 errs by in sums over a vocabulary, relative to the largest magnitude.
_MOVED_BY = 1e-5
_NUM_MOVED = 3
# By which sums of probability over 50,000 tokens differ between libraries: 7e-6 was seen.
_SUM_ERROR = 5e-5
# Of the logarithms in noise, whose values stay below 25.
NOISE_ERROR = 2e-5


def sure_choices(spec: GraphSpec, inputs: Tensors, expected: Arrays) -> dict[str, Bools]:
    """Where the reference is sure of each output: of integers, and of logits whether they are removed."""
    generator = torch.Generator().manual_seed(20261130)
    sure = {name: np.ones(array.shape, np.bool_) for name, array in expected.items()}
    for turn in range(_NUM_MOVED):
        moved = {name: _moved(tensor, generator) for name, tensor in inputs.items()}
        if "top_p" in inputs:
            # Compared with a sum over the whole vocabulary, up and down in turn; off (1) stays off.
            limit = inputs["top_p"]
            moved["top_p"] = torch.where(limit == 1, limit, limit * (1 + (-1) ** turn * _SUM_ERROR))
        for name, array in to_arrays(run_module(spec, moved)).items():
            sure[name] &= _choice(array) == _choice(expected[name])
    return sure


def _moved(values: Tensor, generator: torch.Generator) -> Tensor:
    """Floats changed by an error; what is a switch (0, 1, a removed token) stays one."""
    if not values.is_floating_point():
        return values
    fixed = (values == 0) | (values == 1) | (values.abs() > 1e20)
    size = values.abs().masked_fill(fixed, 0).amax().clamp(min=1) if values.dim() > 1 else values.abs()
    return torch.where(fixed, values, values + _MOVED_BY * size * (2 * torch.rand(values.shape, generator=generator) - 1))


def _choice(output: NDArray[Any]) -> NDArray[Any]:
    return removed(output) if output.dtype.kind == "f" else output


class Drafted:
    """What a refiner graph's drafts were chosen from in one call: the output ``scores`` with ``noise`` [B, P-1, V or C] on it."""

    def __init__(self, spec: GraphSpec, inputs: Tensors, expected: Arrays) -> None:
        assert isinstance(spec.module, GreedyForm | SampledForm), f"{spec.name} is a refiner"
        self._spec = spec
        self._inputs = inputs
        self._form = spec.module
        self._expected = expected
        self.scores = "draft_scores" if isinstance(spec.module, SampledForm) else "refined_logits"
        self.noise = self._noise(expected.get("candidates"))
        self.noise_error = NOISE_ERROR if isinstance(self._form, SampledForm) else 0.0

    def reference(self) -> NDArray[Any]:
        """What the reference's drafts are the largest of."""
        chosen_from: NDArray[Any] = self._expected[self.scores] + self.noise
        return chosen_from

    def comparable(self, tolerance: float) -> Bools:
        """The slots [B, P-1] whose last scores come from the same tokens wherever errors are within the tolerance."""
        drafted, scores = self._form.drafted, self._expected[self.scores]
        if not isinstance(drafted, RefinerGraph):
            return np.ones(scores.shape[:-1], np.bool_)
        error = tolerance * max(1.0, float(np.abs(scores).max())) + self.noise_error
        if isinstance(drafted.refiner, MarkovHead):
            # From left to right: each slot reads the one before it, of the same and only pass.
            return comparable_slots([self.reference()], [error])
        before = [self._after(num_passes) for num_passes in range(1, drafted.num_passes)]
        errors = [error] * len(before)
        if isinstance(self._form, SampledForm):
            # The seed: base logits are given, so noise alone may differ. Greedy it is the same everywhere.
            before, errors = [self._after(0), *before], [self.noise_error, *errors]
        return comparable_slots(before, errors) if before else np.ones(scores.shape[:-1], np.bool_)

    def _after(self, num_passes: int) -> NDArray[Any]:
        """What the reference's tokens are the largest of after so many passes."""
        drafted = self._form.drafted
        assert isinstance(drafted, RefinerGraph)
        shorter = RefinerGraph(drafted.refiner, num_passes, drafted.shortlist)
        outputs = to_arrays(run_module(replace(self._spec, module=_with_drafted(self._form, shorter)), self._inputs))
        after: NDArray[Any] = by_candidate(outputs)[self.scores] + self.noise
        return after

    def _noise(self, candidates: NDArray[Any] | None) -> NDArray[Any]:
        if not isinstance(self._form, SampledForm):
            return np.zeros((), np.float32)
        given = {name: self._inputs[name] for name in ("noise_key", "position", "inverse_temperature", "sampled")}
        block_size = self._inputs["hidden"].shape[1]
        noise = BlockNoise(self._form.noise, **given, block_size=block_size)
        ids = None if candidates is None else torch.from_numpy(candidates)
        drawn: NDArray[Any] = noise.perturb(torch.zeros(1), slice(0, block_size - 1), ids).numpy()
        return drawn


def _with_drafted(form: GreedyForm | SampledForm, drafted: RefinerGraph) -> nn.Module:
    if isinstance(form, GreedyForm):
        return GreedyForm(drafted)
    other = SampledForm(drafted, 1)
    other.noise = form.noise
    return other


def by_candidate(outputs: Mapping[str, NDArray[Any]]) -> Arrays:
    """Candidates in the order of their ids, their scores with them: libraries sort candidates of equal logits differently."""
    if "candidates" not in outputs:
        return dict(outputs)
    order = outputs["candidates"].argsort(axis=-1)
    moved = [name for name in ("candidates", "refined_logits", "draft_scores") if name in outputs]
    return {**outputs, **{name: np.take_along_axis(outputs[name], order, axis=-1) for name in moved}}


def places(drafts: NDArray[Any], candidates: NDArray[Any] | None) -> NDArray[Any]:
    """Where drafts [B, P-1] stand among their candidates [B, P-1, C]; -1 for one that is none of them."""
    if candidates is None:
        return drafts
    same = candidates == drafts[..., None]
    return np.where(same.any(-1), same.argmax(-1), -1)
