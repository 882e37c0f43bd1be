"""The whole parity check of a bundle, set by set: graphs, target, generation, acceptance; each result as the manifest records it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from xpress_export.checkpoints import DrafterCheckpoint, DraftModelCheckpoint, TargetCheckpoint
from xpress_export.graph_set import graph_makers
from xpress_export.parity.acceptance import TOLERANCE, compare_acceptance
from xpress_export.parity.compare import tolerance
from xpress_export.parity.generation import GenerationComparison, compare_generation, generate_all
from xpress_export.parity.graphs import built_options, check_graphs
from xpress_export.parity.modes import greedy_modes
from xpress_export.parity.modules import ModuleRunner
from xpress_export.parity.reference import ReferenceRun, TransformersReference
from xpress_export.parity.runner import GraphRunner
from xpress_export.parity.target import compare_target, target_logits
from xpress_runtime.backends import open_backend
from xpress_runtime.backends.base import Backend
from xpress_runtime.backends.registry import CPU_GRAPH_SET
from xpress_runtime.bundle import Bundle
from xpress_runtime.errors import BundleError
from xpress_runtime.generation import GenerationResult
from xpress_runtime.manifest import GraphSet, Origin
from xpress_runtime.session import Session, WarningThresholds
from xpress_runtime.sets import AttentionForm, Precision
from xpress_runtime.tokenizer import TextTokenizer

PROMPTS = (
    "Explain rainbows in simple terms.",
    "List three fruits and their colours.",
    "def add(first, second):\n    return",
)
MAX_NEW_TOKENS = 24
_RANDOM_PROMPT_LENGTHS = (3, 11, 17)
# Texts that single graphs are fed with; more of them take long and show nothing new.
_MAX_TEXTS = 12

_RUN_HERE = "ONNX Runtime on the CPU"
_NOT_RUN_HERE = "PyTorch only: ONNX Runtime's CPU has no bf16 kernels for MatMul, Add, Mul and norms, so no graph of this set was run"

Report = Callable[[str], None]


@dataclass(frozen=True)
class _Checkpoints:
    """What a bundle is compared with."""

    target: TargetCheckpoint
    drafter: DrafterCheckpoint
    draft_model: DraftModelCheckpoint | None


def check_same_checkpoints(
    bundle: Bundle, target: TargetCheckpoint, drafter: DrafterCheckpoint, draft_model: DraftModelCheckpoint | None = None
) -> None:
    """BundleError unless the bundle was built from exactly these checkpoints."""
    manifest = bundle.manifest
    pairs: list[tuple[str, TargetCheckpoint | DrafterCheckpoint | DraftModelCheckpoint, Origin]] = [
        ("target", target, manifest.target.origin),
        ("drafter", drafter, manifest.drafter.origin),
    ]
    if (draft_model is None) != (manifest.draft_model is None):
        built, given = ("without", "one is given; leave it out") if draft_model else ("with", "none is given; give what it was built from")
        raise BundleError(f"{bundle.folder} was built {built} a draft model, and {given}")
    if draft_model is not None and manifest.draft_model is not None:
        pairs.append(("draft model", draft_model, manifest.draft_model.origin))
    for role, checkpoint, record in pairs:
        if checkpoint.identity() != record.identity:
            raise BundleError(
                f"{bundle.folder} was built from another {role} than {checkpoint.location.source}: identity {record.identity[:12]}… and "
                f"{checkpoint.identity()[:12]}…; give the {role} it was built from, or build it again"
            )


@dataclass(frozen=True)
class _Expected:
    """Prompts, what transformers makes of each, and its logits of the first prompt and its continuation."""

    prompts: list[list[int]]
    max_new_tokens: int
    runs: list[ReferenceRun]
    logits: Any

    @property
    def texts(self) -> list[list[int]]:
        return [[*prompt, *run.tokens] for prompt, run in zip(self.prompts, self.runs, strict=True)]


def check_parity(
    bundle: Bundle,
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    draft_model: DraftModelCheckpoint | None = None,
    *,
    graph_sets: Sequence[GraphSet] | None = None,
    prompts: Sequence[str] = PROMPTS,
    max_new_tokens: int = MAX_NEW_TOKENS,
    threads: int | None = None,
    report: Report = lambda _: None,
) -> dict[str, dict[str, Any]]:
    """Compare sets of a bundle (default: all) with the checkpoints it was built from; ``draft_model`` where it has one.

    Returns the manifest's ``parity`` object of each by its name, ``passed`` first. ``report`` hears each step's name as it begins.
    """
    assert (draft_model is None) == (bundle.manifest.draft_model is None), "every graph of the bundle is compared"
    checkpoints = _Checkpoints(target, drafter, draft_model)
    report("transformers")
    expected = _expected(bundle, target, prompts, max_new_tokens)
    results = {}
    fp32: Mapping[str, Sequence[GenerationResult]] | None = None
    for graph_set in bundle.manifest.graph_sets if graph_sets is None else graph_sets:
        check = _SetCheck(bundle, checkpoints, graph_set, expected, threads, partial(_report_of, report, graph_set.name))
        results[graph_set.name], fp32 = check.run(fp32)
    return results


def parity_steps(bundle: Bundle, graph_sets: Sequence[GraphSet]) -> int:
    """At most as many steps as ``report`` of :func:`check_parity` hears of."""
    num_modes = len(greedy_modes(bundle.manifest, MAX_NEW_TOKENS))
    return 1 + sum(len(graph_set.graphs) + 1 + num_modes for graph_set in graph_sets)


def _report_of(report: Report, graph_set: str, step: str) -> None:
    report(f"{graph_set} {step}")


class _SetCheck:
    """The comparison of one set."""

    def __init__(
        self,
        bundle: Bundle,
        checkpoints: _Checkpoints,
        graph_set: GraphSet,
        expected: _Expected,
        threads: int | None,
        report: Report,
    ) -> None:
        self._bundle = bundle
        self._checkpoints = checkpoints
        self._options = built_options(bundle.manifest)
        self._set = graph_set
        self._precision = Precision(graph_set.precision)
        self._form = AttentionForm(graph_set.attention_form)
        self._expected = expected
        self._threads = threads
        self._report = report
        # numpy and ONNX Runtime's CPU know nothing of bf16.
        self._backend = self._open_backend(graph_set.name) if self._precision is not Precision.BF16 else None

    def run(
        self, fp32: Mapping[str, Sequence[GenerationResult]] | None
    ) -> tuple[dict[str, Any], Mapping[str, Sequence[GenerationResult]] | None]:
        """The set's result. ``fp32``: generations of the fp32 set, if they were made; they are given back for the next set."""
        allowed = tolerance(self._precision)
        result: dict[str, Any] = {"graphs": self._graphs()}
        self._report("target")
        found = self._target_logits()
        result["target"] = compare_target(found, self._expected.logits).to_json(allowed)
        if self._backend is None:
            nothing = GenerationComparison(0, [], 0, []).to_json()
            result["generation"] = {**nothing, "passed": True, "not_compared": _NOT_RUN_HERE}
            result["acceptance"] = {"passed": True, "not_compared": _NOT_RUN_HERE}
        else:
            session = self._session(self._backend)
            expected = self._expected
            generation = compare_generation(session, expected.prompts, expected.runs, expected.max_new_tokens, allowed, report=self._report)
            del session
            result["generation"] = generation.to_json()
            if self._set.name == CPU_GRAPH_SET:
                fp32 = generation.results
            else:
                fp32 = fp32 or self._fp32_results()
                result["acceptance"] = self._acceptance(generation.results, fp32)
        parts = [*result["graphs"].values(), *(result[name] for name in ("target", "generation", "acceptance") if name in result)]
        return {
            "passed": all(part["passed"] for part in parts),
            "graph_set": self._set.name,
            "tolerance": allowed,
            "compared_in": _NOT_RUN_HERE if self._backend is None else _RUN_HERE,
            **result,
            "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "onnxruntime")},
        }, fp32

    def _graphs(self) -> dict[str, Any]:
        texts = self._expected.texts
        comparisons = check_graphs(
            self._options,
            self._checkpoints.target,
            self._checkpoints.drafter,
            GraphRunner(self._bundle, self._backend) if self._backend else None,
            precision=self._precision,
            form=self._form,
            draft_model=self._checkpoints.draft_model,
            texts=texts[:: -(-len(texts) // _MAX_TEXTS)],
            report=self._report,
        )
        return {name: comparison.to_json(name) for name, comparison in comparisons.items()}

    def _target_logits(self) -> Any:
        manifest = self._bundle.manifest
        if self._backend is not None:
            return target_logits(GraphRunner(self._bundle, self._backend), manifest, self._expected.texts[0])
        makers = graph_makers(self._checkpoints.target, self._checkpoints.drafter, self._options, self._precision, self._form)
        return target_logits(ModuleRunner(makers, manifest.cache_rows), manifest, self._expected.texts[0])

    def _acceptance(
        self, found: Mapping[str, Sequence[GenerationResult]], fp32: Mapping[str, Sequence[GenerationResult]] | None
    ) -> dict[str, Any]:
        if fp32 is None:
            return {"passed": True, "not_compared": f"the bundle holds no {CPU_GRAPH_SET} set"}
        compared = compare_acceptance(found, fp32)
        passed = all(mode.passed for mode in compared.values())
        return {"passed": passed, "tolerance": TOLERANCE, "modes": {name: mode.to_json() for name, mode in compared.items()}}

    def _fp32_results(self) -> Mapping[str, Sequence[GenerationResult]] | None:
        if not any(graph_set.name == CPU_GRAPH_SET for graph_set in self._bundle.manifest.graph_sets):
            return None
        session = self._session(self._open_backend(CPU_GRAPH_SET))
        return generate_all(
            session, self._expected.prompts, self._expected.max_new_tokens, report=lambda mode: self._report(f"fp32 {mode}")
        )

    def _session(self, backend: Backend) -> Session:
        # A drafter that fits badly is no parity failure, and short texts say little about it.
        return Session(self._bundle, backend, WarningThresholds(0.0, float("inf")))

    def _open_backend(self, graph_set: str) -> Backend:
        # The first one says what is missing, if something is.
        open_backend("ort-cpu", threads=self._threads)
        from xpress_runtime.backends.ort_cpu import OrtCpuBackend

        return OrtCpuBackend(self._threads, graph_set)


def _expected(bundle: Bundle, target: TargetCheckpoint, prompts: Sequence[str], max_new_tokens: int) -> _Expected:
    manifest = bundle.manifest
    reference = TransformersReference(target.location, manifest.target.stop_token_ids)
    max_new_tokens = min(max_new_tokens, manifest.capacity // 2)
    tokens = parity_prompts(bundle, prompts, manifest.capacity - max_new_tokens)
    runs = [reference.generate(prompt, max_new_tokens) for prompt in tokens]
    return _Expected(tokens, max_new_tokens, runs, reference.logits([*tokens[0], *runs[0].tokens]))


def parity_prompts(bundle: Bundle, texts: Sequence[str], longest: int) -> list[list[int]]:
    """Prompts to compare on, as token ids of at most ``longest`` tokens: the texts, or without a tokenizer seeded random ids."""
    if bundle.tokenizer_folder is None:
        generator = np.random.default_rng(20260802)
        vocab_size = bundle.manifest.target.vocab_size
        prompts = [generator.integers(0, vocab_size, length).tolist() for length in _RANDOM_PROMPT_LENGTHS]
    else:
        tokenizer = TextTokenizer.open(bundle.tokenizer_folder)
        if tokenizer.has_chat_template:
            prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]
        else:
            prompts = [tokenizer.encode(text) for text in texts]
    return [prompt[:longest] for prompt in prompts]
