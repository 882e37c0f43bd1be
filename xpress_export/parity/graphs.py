"""Every graph of a set against the fp32 PyTorch module that it was traced from.

In half precision the module is called rounded as well, and where its values leave the range of the precision the graph fails: see
:mod:`xpress_export.parity.value_range`. Each call's input comes from the fp32 modules before it, so that an error shows in the graph that
makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xpress_export.checkpoints import DrafterCheckpoint, TargetCheckpoint
from xpress_export.graph_set import graph_makers
from xpress_export.graphs.refiner import RefinerGraph
from xpress_export.graphs.spec import DYNAMIC_DIMS, GraphSpec
from xpress_export.models.precision import DTYPES
from xpress_export.options import BuildOptions
from xpress_export.parity.compare import UNEQUAL, ArrayComparison, compare_arrays, tolerance
from xpress_export.parity.feed import Feed
from xpress_export.parity.fp32_parts import fp32_parts
from xpress_export.parity.ids import Bools, IdComparison, comparable_slots, compare_ids
from xpress_export.parity.modules import HalfModule, Tensors, run_module, to_arrays
from xpress_export.parity.runner import Arrays, GraphRunner
from xpress_export.parity.value_range import ValueRange
from xpress_runtime.manifest import Manifest
from xpress_runtime.sets import AttentionForm, Precision


@dataclass
class GraphComparison:
    """Worst error of each output over all calls of a graph, its token ids where it chooses some, and its range where it is in half."""

    tolerance: float
    outputs: dict[str, ArrayComparison] = field(default_factory=dict)
    ids: IdComparison | None = None
    range: ValueRange | None = None
    calls: int = 0

    @property
    def conclusive(self) -> bool:
        """Whether at least half of the ids could be compared; of a refiner with less than that, little more than its first pass was."""
        return self.ids is None or 2 * self.ids.not_comparable <= self.ids.rows

    @property
    def passed(self) -> bool:
        errors_fit = all(output.within(self.tolerance) for output in self.outputs.values())
        in_range = self.range is None or self.range.overflow is None
        return bool(self.calls) and errors_fit and in_range

    def to_json(self, name: str) -> dict[str, Any]:
        worst_name, worst = max(self.outputs.items(), key=lambda item: item[1].scaled_error)
        return {
            "passed": self.passed,
            "conclusive": self.conclusive,
            "calls": self.calls,
            "tolerance": self.tolerance,
            "worst_output": worst_name,
            "max_abs_error": worst.max_abs_error,
            "scaled_error": worst.scaled_error,
            "fp32": fp32_parts(name) if self.range else None,
            "ids": self.ids.to_json() if self.ids else None,
            "range": self.range.to_json() if self.range else None,
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
    options: BuildOptions,
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    runner: GraphRunner | None,
    *,
    precision: Precision = Precision.FP32,
    form: AttentionForm = AttentionForm.LENGTH,
    texts: Sequence[Sequence[int]] = (),
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, GraphComparison]:
    """Compare every graph of the set of ``precision`` and ``form``; ``report`` hears a graph's name before it is compared.

    ``runner`` None compares the rounded modules themselves, for a precision whose graphs do not run here. ``texts``: token ids that are fed
    besides random ones, at least two each.
    """
    references = graph_makers(target, drafter, options, Precision.FP32, form)
    halves = graph_makers(target, drafter, options, precision, form)
    comparisons = {}
    for name, calls in Feed(target, drafter, options, form, texts).calls.items():
        report(name)
        # The half module first: converting a tied table would convert the one that a module in fp32 holds.
        half_spec = halves[name]() if precision is not Precision.FP32 else None
        reference = references[name]()
        half = HalfModule(half_spec, DTYPES[precision], reference.module) if half_spec is not None else None
        check = _GraphCheck(reference, half, runner, tolerance(precision, name))
        calls(check.call)
        comparisons[name] = check.comparison
        # One graph in memory at a time, beside its modules.
        if runner is not None:
            runner.release()
    return comparisons


class _GraphCheck:
    """Calls a graph in fp32, rounded and on the backend, keeps the worst errors and answers with the fp32 outputs."""

    def __init__(self, spec: GraphSpec, half: HalfModule | None, runner: GraphRunner | None, largest_error: float) -> None:
        assert half is not None or runner is not None, "something is compared"
        self._spec = spec
        self._half = half
        self._runner = runner
        self.comparison = GraphComparison(largest_error, range=half.range if half else None)

    def call(self, inputs: Tensors) -> Tensors:
        reference = run_module(self._spec, inputs)
        rounded = self._half.run(inputs) if self._half else {}
        found = to_arrays(rounded) if self._runner is None else self._run(self._runner, inputs)
        expected = to_arrays(reference)
        if "candidates" in expected and "candidates" in found:
            found, expected = by_candidate(found), by_candidate(expected)
        self.comparison.calls += 1
        for name, error in self._errors(inputs, found, expected).items():
            worst = self.comparison.outputs.get(name)
            if worst is None or error.scaled_error > worst.scaled_error:
                self.comparison.outputs[name] = error
        return reference

    def _run(self, runner: GraphRunner, inputs: Tensors) -> Arrays:
        dims: dict[str, int] = {}
        for tensor in self._spec.flat_inputs():
            for axis, dim in enumerate(tensor.dims):
                if isinstance(dim, str):
                    dims[DYNAMIC_DIMS[dim]] = inputs[tensor.name].shape[axis]
        return runner.run(self._spec.name, {name: tensor.numpy() for name, tensor in inputs.items()}, dims)

    def _errors(self, inputs: Tensors, found: Arrays, expected: Arrays) -> dict[str, ArrayComparison]:
        # A graph of another kind in this one's place may lack an output.
        present = {name: array for name, array in expected.items() if name in found}
        errors = {name: UNEQUAL for name in expected if name not in found}
        if {"token", "logits"} <= present.keys():
            errors["token"] = self._compare_ids(found["token"], found["logits"], expected["logits"])
        if {"verify_ids", "refined_logits"} <= present.keys() and found["verify_ids"].shape == expected["verify_ids"].shape:
            scores = expected["refined_logits"]
            comparable = self._comparable(inputs, scores)
            drafts = _places(found["verify_ids"][:, 1:], found.get("candidates"))
            errors["verify_ids"] = self._compare_ids(drafts, found["refined_logits"], scores, comparable)
            if not np.array_equal(found["verify_ids"][:, 0], expected["verify_ids"][:, 0]):
                errors["verify_ids"] = UNEQUAL
            if found["refined_logits"].shape == scores.shape:
                errors["refined_logits"] = compare_arrays(found["refined_logits"][comparable], scores[comparable])
        return errors | {name: compare_arrays(found[name], array) for name, array in present.items() if name not in errors}

    def _comparable(self, inputs: Tensors, scores: NDArray[Any]) -> Bools:
        """The slots [B, P-1] whose last pass reads the same tokens wherever errors are within the tolerance."""
        module = self._spec.module
        assert isinstance(module, RefinerGraph), "only refiners give refined logits"
        error = self.comparison.tolerance * max(1.0, float(np.abs(scores).max()))
        passes = [
            run_module(replace(self._spec, module=RefinerGraph(module.refiner, passes, module.shortlist)), inputs)["refined_logits"].numpy()
            for passes in range(1, module.num_passes)
        ]
        return comparable_slots(passes, error) if passes else np.ones(scores.shape[:-1], np.bool_)

    def _compare_ids(
        self, ids: NDArray[Any], found: NDArray[Any], reference: NDArray[Any], comparable: Bools | None = None
    ) -> ArrayComparison:
        compared = compare_ids(ids, found, reference, comparable)
        self.comparison.ids = compared if self.comparison.ids is None else self.comparison.ids + compared
        return UNEQUAL if compared.different else ArrayComparison(0.0, 0.0, True)


def by_candidate(outputs: Arrays) -> Arrays:
    """Candidates in the order of their ids, their scores with them: libraries sort candidates of equal logits differently."""
    order = outputs["candidates"].argsort(axis=-1)
    return {**outputs, **{name: np.take_along_axis(outputs[name], order, axis=-1) for name in ("candidates", "refined_logits")}}


def _places(drafts: NDArray[Any], candidates: NDArray[Any] | None) -> NDArray[Any]:
    """Where drafts [B, P-1] stand among their candidates [B, P-1, C]; -1 for one that is none of them."""
    if candidates is None:
        return drafts
    same = candidates == drafts[..., None]
    return np.where(same.any(-1), same.argmax(-1), -1)
