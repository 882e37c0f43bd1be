"""Every graph's comparison, on PyTorch modules in the place of graphs: as they are they pass, and a fault in any of them is found there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.complete import CASE, OPTIONS, SHORTLIST
from tests.conftest import Built
from tests.tiny import write_markov_drafter, write_target
from xpress_export.checkpoints import DrafterCheckpoint, DraftModelCheckpoint, TargetCheckpoint, open_draft_model, open_pair, open_target
from xpress_export.graph_set import graph_makers, set_graph_names
from xpress_export.graphs.spec import GraphSpec
from xpress_export.options import BuildOptions, resolve_options
from xpress_export.parity.choices import CHOOSING, Drafted, sure_choices
from xpress_export.parity.compare import tolerance
from xpress_export.parity.fp32_parts import FP32_PARTS, fp32_parts, is_fp32
from xpress_export.parity.graphs import GraphComparison, check_graphs
from xpress_export.parity.modules import ModuleRunner, run_module, to_arrays
from xpress_runtime.graph_names import graph_names
from xpress_runtime.sets import AttentionForm, Precision

TEXTS = [[3, 9, 27, 59, 50, 7, 21, 60, 4, 12, 36, 20], [58, 2, 2, 2, 2, 2, 2]]


class Case:
    """Checkpoints and what is built of them."""

    def __init__(self, target: TargetCheckpoint, drafter: DrafterCheckpoint, draft_model: DraftModelCheckpoint, **options: Any) -> None:
        self.target, self.drafter, self.draft_model = target, drafter, draft_model
        self.options: BuildOptions = resolve_options(target, drafter, **options)
        self.makers = graph_makers(target, drafter, self.options, Precision.FP32, AttentionForm.LENGTH, draft_model)

    def check(self, makers: dict[str, Callable[[], GraphSpec]]) -> dict[str, GraphComparison]:
        """Compare these graphs, run as modules, with what they should be."""
        runner: Any = Modules(makers, self.options.cache_rows)
        return check_graphs(self.options, self.target, self.drafter, runner, draft_model=self.draft_model, texts=TEXTS)


class Modules(ModuleRunner):
    def release(self) -> None:
        self._specs.clear()


@pytest.fixture(scope="module")
def trained() -> Case:
    """A refiner, and a draft model of the target's layers."""
    target, drafter = open_pair(str(CASE / "target"), str(CASE / "xpress"))
    return Case(target, drafter, open_draft_model(None, None, (0, 1), target), **OPTIONS)


@pytest.fixture(scope="module")
def markov(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A Markov head, and a draft model of its own whose table has fewer rows than the target's, as one without padding has."""
    folder = tmp_path_factory.mktemp("markov")
    write_target(folder / "target", "qwen3")
    write_target(folder / "draft", "llama", num_hidden_layers=1, hidden_size=24, vocab_size=57, seed=3)
    write_markov_drafter(folder / "drafter", folder / "target")
    target, drafter = open_pair(str(folder / "target"), str(folder / "drafter"))
    draft_model = DraftModelCheckpoint(open_target(str(folder / "draft")), None, shares_tables=False)
    return Case(target, drafter, draft_model, capacity=64, shortlists=(0, SHORTLIST))


@pytest.fixture(params=["trained", "markov"])
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.getfixturevalue(request.param)
    return found


def test_every_graph_is_compared_and_passes_as_it_is(case: Case) -> None:
    comparisons = case.check(case.makers)
    assert set(comparisons) == set(set_graph_names(case.options, case.draft_model))
    for name, comparison in comparisons.items():
        assert comparison.passed and comparison.conclusive and comparison.calls >= 3, name
        assert all(output.exact for output in comparison.outputs.values()), name
    compared = {name for name, comparison in comparisons.items() if comparison.ids is not None}
    refiners = {name for name in comparisons if name.startswith("refiner-") and name != "refiner-k0"}
    heads = {"head", "draft-head"} & set(comparisons)
    assert compared == heads | refiners | set(CHOOSING) - {"filter-top-k", "filter-top-p"}


def test_half_precision_is_within_what_is_allowed(case: Case) -> None:
    comparisons = check_graphs(
        case.options, case.target, case.drafter, None, precision=Precision.FP16, draft_model=case.draft_model, texts=TEXTS
    )
    assert {name for name, comparison in comparisons.items() if not comparison.passed} == set()
    for name, comparison in comparisons.items():
        if is_fp32(name):
            assert comparison.tolerance == tolerance(Precision.FP32), name
            assert all(output.exact for output in comparison.outputs.values()), name


# One fault in each graph.


class Faulty(nn.Module):
    """A module that gets other inputs."""

    def __init__(self, module: nn.Module, place: int, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.module = module
        self.place = place
        self.change = change

    def forward(self, *inputs: Tensor) -> Any:
        changed = list(inputs)
        changed[self.place] = self.change(changed[self.place])
        return self.module(*changed)


def faulty(make: Callable[[], GraphSpec], name: str, change: Callable[[Tensor], Tensor]) -> GraphSpec:
    spec = make()
    place = [entry.name if not isinstance(entry, tuple) else "" for entry in spec.inputs].index(name)
    return replace(spec, module=Faulty(spec.module, place, change))


def later(tensor: Tensor) -> Tensor:
    return tensor + 1


def of_another_slot(tensor: Tensor) -> Tensor:
    return tensor.roll(1, dims=1)


FAULTS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "denoise": ("num_filled", lambda number: number - 1),
    "lookup": ("tokens", of_another_slot),
    "confidence": ("scores", lambda scores: 1.01 * scores),
    "store-taps": ("start", torch.zeros_like),
    "sample": ("position", later),
    "accept-sampled": ("draft_scores", of_another_slot),
    "accept-candidates": ("candidates", lambda candidates: candidates.flip(-1)),
    "filter-top-k": ("top_k", later),
    "filter-top-p": ("top_p", lambda top_p: 0.9 * top_p),
    "penalise": ("verify_ids", of_another_slot),
    "count": ("num_emitted", later),
    "draft-decoder": ("position", later),
    "draft-start": ("position", later),
    "draft-step": ("collected", of_another_slot),
    "draft-step-sampled": ("slot", later),
    "refiner-k0-sampled": ("position", later),
    "refiner-k3-sampled": ("noise_key", lambda key: key.flip(1)),
    f"refiner-k3-c{SHORTLIST}": ("anchor", lambda anchor: (anchor + 1) % 50),
    f"refiner-k3-c{SHORTLIST}-sampled": ("inverse_temperature", lambda scale: 1.01 * scale),
    "draft-embed": ("ids", lambda ids: ids.flip(1)),
    "draft-head": ("rows", torch.zeros_like),
}


def test_a_fault_in_any_graph_is_found_there_and_nowhere_else(case: Case) -> None:
    faults = {name: fault for name, fault in FAULTS.items() if name in case.makers}
    makers = {**case.makers, **{name: partial(faulty, case.makers[name], *fault) for name, fault in faults.items()}}
    assert {name for name, comparison in case.check(makers).items() if not comparison.passed} == set(faults)


def test_each_of_these_faults_is_found_in_one_of_the_cases(trained: Case, markov: Case) -> None:
    assert set(FAULTS) <= set(trained.makers) | set(markov.makers)
    assert set(trained.makers) - set(FAULTS) == {"embed", "head", "target", "drafter", "accept", "refiner-k0", "refiner-k3"}


def test_scores_without_the_temperature_are_found(trained: Case) -> None:
    """The mistake that spoils the distribution: q is not what the drafts were drawn from."""

    class Unscaled(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
            verify_ids, scores, *rest = self.module(*inputs)
            return (verify_ids, scores / inputs[6][:, None, None], *rest)

    spec = trained.makers["refiner-k3-sampled"]()
    makers = {**trained.makers, "refiner-k3-sampled": lambda: replace(spec, module=Unscaled(spec.module))}
    assert {name for name, comparison in trained.check(makers).items() if not comparison.passed} == {"refiner-k3-sampled"}


# Near ties.


def sampling_inputs(logits: Tensor, **changes: Tensor) -> dict[str, Tensor]:
    batch = logits.shape[0]
    given = {
        "position": torch.arange(batch),
        "noise_key": torch.arange(4 * batch).reshape(batch, 4),
        "inverse_temperature": torch.ones(batch),
        "sampled": torch.ones(batch, dtype=torch.int64),
    }
    return {"logits": logits, **given, **changes}


def test_a_draw_between_two_that_are_nearly_as_good_is_not_sure(trained: Case) -> None:
    spec = trained.makers["sample"]()
    inputs = sampling_inputs(torch.randn(3, 1, 97, generator=torch.Generator().manual_seed(1)))
    noise = spec.module.noise.gumbel(spec.module.noise.coefficients(inputs["noise_key"], inputs["position"], torch.zeros(1).long()))
    best = (inputs["logits"] + noise)[1, 0].topk(2)
    # In row 1 the second best is now as good as the best.
    inputs["logits"][1, 0, best.indices[1]] += best.values[0] - best.values[1]
    sure = sure_choices(spec, inputs, to_arrays(run_module(spec, inputs)))
    assert sure["token"][:, 0].tolist() == [True, False, True]


def test_a_token_at_the_limit_of_a_filter_is_not_sure(trained: Case) -> None:
    spec = trained.makers["filter-top-k"]()
    logits = torch.linspace(3, -3, 97).reshape(1, 1, 97).clone()
    logits[0, 0, 5] = logits[0, 0, 4] - 1e-6
    inputs = {"logits": logits, "inverse_temperature": torch.ones(1), "top_k": torch.tensor([5])}
    sure = sure_choices(spec, inputs, to_arrays(run_module(spec, inputs)))["filtered"][0, 0]
    assert not sure[4] or not sure[5]
    assert sure[:4].all() and sure[6:].all()


def test_switches_are_not_moved(trained: Case) -> None:
    """A top-p of 1 is off: a bit less would remove tokens."""
    spec = trained.makers["filter-top-p"]()
    logits = torch.linspace(3, -20, 97).reshape(1, 1, 97)
    inputs = {"logits": logits, "inverse_temperature": torch.ones(1), "top_p": torch.ones(1), "min_p": torch.zeros(1)}
    assert sure_choices(spec, inputs, to_arrays(run_module(spec, inputs)))["filtered"].all()


def test_slots_behind_a_near_tie_of_drawn_tokens_are_not_comparable(trained: Case) -> None:
    spec = trained.makers["refiner-k3-sampled"]()
    generator = torch.Generator().manual_seed(5)
    inputs = {
        "hidden": torch.randn(2, 4, 64, generator=generator),
        "base_logits": 3 * torch.randn(2, 3, 97, generator=generator),
        "anchor": torch.tensor([4, 5]),
        "predecessor": torch.tensor([6, 7]),
        **{name: tensor for name, tensor in sampling_inputs(torch.zeros(2, 1, 97)).items() if name != "logits"},
    }
    drafted = Drafted(spec, inputs, to_arrays(run_module(spec, inputs)))
    assert drafted.noise.shape == (2, 3, 97) and drafted.comparable(1e-4).all()
    # With an error as large as the logits themselves only the first slot, which reads anchor and predecessor, is sure.
    assert drafted.comparable(10.0).tolist() == [[True, False, False]] * 2


def test_greedy_rows_carry_no_noise(trained: Case) -> None:
    spec = trained.makers["refiner-k0-sampled"]()
    inputs = {
        "hidden": torch.zeros(1, 4, 64),
        "base_logits": torch.randn(1, 3, 97, generator=torch.Generator().manual_seed(2)),
        "anchor": torch.tensor([4]),
        "predecessor": torch.tensor([6]),
        **sampling_inputs(torch.zeros(1, 1, 97), sampled=torch.zeros(1, dtype=torch.int64)),
    }
    drafted = Drafted(spec, inputs, to_arrays(run_module(spec, inputs)))
    assert not drafted.noise.any()


# What is fp32.


@pytest.mark.parametrize("shares_tables", [None, True, False])
def test_every_graph_says_what_is_fp32_in_it(shares_tables: bool | None) -> None:
    names = graph_names((3, 0), (0, 8), sampling=True, base_head=True, draft_model_shares_tables=shares_tables)
    for name in names:
        assert isinstance(fp32_parts(name), list)
        assert not is_fp32(name) or fp32_parts(name) == ["all of it"]
    assert shares_tables is not False or set(FP32_PARTS) == {name for name in names if not name.startswith("refiner-")}


def test_graphs_of_a_complete_bundle_that_are_fp32_hold_no_half(complete: Built) -> None:
    import onnx

    for name, record in complete.bundle.manifest.graph_set("fp16-mask").graphs.items():
        model = onnx.load(complete.bundle.folder / record.file, load_external_data=False)
        values = (*model.graph.input, *model.graph.output, *model.graph.value_info)
        half = {value.name for value in values if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT16}
        assert not (half and is_fp32(name)), name
