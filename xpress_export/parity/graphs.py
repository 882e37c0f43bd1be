"""Every graph of a set against the fp32 PyTorch module that it was traced from.

In half precision the module is called rounded as well, and where its values leave the range of the precision the graph fails: see
:mod:`xpress_export.parity.value_range`. Each call's input comes from the fp32 modules before it, so that an error shows in the graph that
makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from xpress_export.checkpoints import DrafterCheckpoint, DraftModelCheckpoint, TargetCheckpoint
from xpress_export.graph_set import graph_makers
from xpress_export.graphs.refiner import GreedyForm, SampledForm
from xpress_export.graphs.spec import DYNAMIC_DIMS, GraphSpec
from xpress_export.models.precision import DTYPES
from xpress_export.options import BuildOptions
from xpress_export.parity.choices import CHOOSING, Drafted, by_candidate, places, sure_choices
from xpress_export.parity.compare import UNEQUAL, ArrayComparison, compare_arrays, tolerance
from xpress_export.parity.feed import Feed
from xpress_export.parity.fp32_parts import fp32_parts
from xpress_export.parity.ids import Bools, IdComparison, compare_choices, compare_ids
from xpress_export.parity.modules import HalfModule, Tensors, run_module, to_arrays
from xpress_export.parity.runner import Arrays, GraphRunner
from xpress_export.parity.value_range import ValueRange
from xpress_runtime.manifest import Manifest
from xpress_runtime.sets import AttentionForm, Precision


@dataclass
class GraphComparison:
    """Worst error of each output over all calls of a graph, its choices where it makes some, and its range where it is in half."""

    tolerance: float
    outputs: dict[str, ArrayComparison] = field(default_factory=dict)
    ids: IdComparison | None = None
    range: ValueRange | None = None
    calls: int = 0

    @property
    def conclusive(self) -> bool:
        """Whether at least half of the choices could be compared; of a refiner with less, little more than its first pass was."""
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
        shortlists=manifest.shortlists,
        capacity=manifest.capacity,
        batch=manifest.batch,
        prefill_chunk=manifest.prefill_chunk,
        cache_rows=manifest.cache_rows,
        sampling=manifest.sampling,
        base_head=manifest.base_head,
    )


def check_graphs(
    options: BuildOptions,
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    runner: GraphRunner | None,
    *,
    precision: Precision = Precision.FP32,
    form: AttentionForm = AttentionForm.LENGTH,
    draft_model: DraftModelCheckpoint | None = None,
    texts: Sequence[Sequence[int]] = (),
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, GraphComparison]:
    """Compare every graph of the set of ``precision`` and ``form``; ``report`` hears a graph's name before it is compared.

    ``runner`` None compares the rounded modules themselves, for a precision whose graphs do not run here. ``texts``: token ids that are fed
    besides random ones, at least two each.
    """
    references = graph_makers(target, drafter, options, Precision.FP32, form, draft_model)
    halves = graph_makers(target, drafter, options, precision, form, draft_model)
    comparisons = {}
    for name, calls in Feed(target, drafter, options, form, texts, draft_model).calls.items():
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
        found = by_candidate(to_arrays(rounded) if self._runner is None else self._run(self._runner, inputs))
        expected = by_candidate(to_arrays(reference))
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
        # A graph of another kind in this one's place may lack an output, or have it in another shape.
        same_shape = {name: name in found and found[name].shape == array.shape for name, array in expected.items()}
        errors = {name: UNEQUAL for name, same in same_shape.items() if not same}
        if not errors and {"token", "logits"} <= expected.keys():
            errors["token"] = self._record(compare_ids(found["token"], found["logits"], expected["logits"]))
        elif not errors and isinstance(self._spec.module, GreedyForm | SampledForm):
            errors = self._refiner_errors(inputs, found, expected)
        elif not errors and self._spec.name in CHOOSING:
            errors = self._choice_errors(sure_choices(self._spec, inputs, expected), found, expected)
        return errors | {name: compare_arrays(found[name], array) for name, array in expected.items() if name not in errors}

    def _refiner_errors(self, inputs: Tensors, found: Arrays, expected: Arrays) -> dict[str, ArrayComparison]:
        drafted = Drafted(self._spec, inputs, expected)
        if drafted.scores not in expected:
            # The greedy seed chooses from what it is given.
            return {}
        comparable = drafted.comparable(self.comparison.tolerance)
        chosen = places(found["verify_ids"][:, 1:], found.get("candidates"))
        compared = compare_ids(
            chosen, found[drafted.scores] + drafted.noise, drafted.reference(), comparable, noise_error=drafted.noise_error
        )
        same_anchor = np.array_equal(found["verify_ids"][:, 0], expected["verify_ids"][:, 0])
        verdict = self._record(compared)
        return {
            "verify_ids": verdict if same_anchor else UNEQUAL,
            drafted.scores: compare_arrays(found[drafted.scores][comparable], expected[drafted.scores][comparable]),
        }

    def _choice_errors(self, sure: dict[str, Bools], found: Arrays, expected: Arrays) -> dict[str, ArrayComparison]:
        errors = {}
        for name, array in expected.items():
            if array.dtype.kind == "f":
                errors[name] = compare_arrays(found[name][sure[name]], array[sure[name]])
            else:
                errors[name] = self._record(compare_choices(found[name], array, sure[name]))
        return errors

    def _record(self, compared: IdComparison) -> ArrayComparison:
        self.comparison.ids = compared if self.comparison.ids is None else self.comparison.ids + compared
        return UNEQUAL if compared.different else ArrayComparison(0.0, 0.0, True)
