"""The whole parity check of a bundle: graphs, target, generation; its result as the manifest records it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

import numpy as np

from xpress_export.checkpoints import DrafterCheckpoint, TargetCheckpoint
from xpress_export.parity.compare import TOLERANCES
from xpress_export.parity.generation import compare_generation
from xpress_export.parity.graphs import check_graphs
from xpress_export.parity.reference import TransformersReference
from xpress_export.parity.runner import GraphRunner
from xpress_export.parity.target import compare_target, target_logits
from xpress_runtime.backends import open_backend
from xpress_runtime.bundle import Bundle
from xpress_runtime.errors import BundleError
from xpress_runtime.session import Session, WarningThresholds

PROMPTS = (
    "Explain rainbows in simple terms.",
    "List three fruits and their colours.",
    "def add(first, second):\n    return",
)
MAX_NEW_TOKENS = 24
_RANDOM_PROMPT_LENGTHS = (3, 11, 17)

Report = Callable[[str], None]


def check_same_checkpoints(bundle: Bundle, target: TargetCheckpoint, drafter: DrafterCheckpoint) -> None:
    """BundleError unless the bundle was built from exactly these checkpoints."""
    manifest = bundle.manifest
    for role, checkpoint, record in (("target", target, manifest.target.origin), ("drafter", drafter, manifest.drafter.origin)):
        if checkpoint.identity() != record.identity:
            raise BundleError(
                f"{bundle.folder} was built from another {role} than {checkpoint.location.source}: identity {record.identity[:12]}… and "
                f"{checkpoint.identity()[:12]}…; give the {role} it was built from, or build it again"
            )


def check_parity(
    bundle: Bundle, target: TargetCheckpoint, drafter: DrafterCheckpoint, *, threads: int | None = None, report: Report = lambda _: None
) -> dict[str, Any]:
    """Compare a bundle with the checkpoints it was built from; returns the manifest's ``parity`` object, ``passed`` first."""
    backend = open_backend("ort-cpu", threads=threads)
    graph_set = bundle.manifest.graph_set(backend.graph_set)
    tolerance = TOLERANCES[graph_set.precision]
    graphs = {name: graph.to_json(tolerance) for name, graph in check_graphs(bundle, target, drafter, backend, report=report).items()}

    report("transformers")
    reference = TransformersReference(target.location, bundle.manifest.target.stop_token_ids)
    # A drafter that fits badly is no parity failure, and short texts say little about it.
    session = Session(bundle, backend, WarningThresholds(0.0, float("inf")))
    max_new_tokens = min(MAX_NEW_TOKENS, bundle.manifest.capacity // 2)
    prompts = parity_prompts(session, bundle.manifest.capacity - max_new_tokens)
    runs = [reference.generate(prompt, max_new_tokens) for prompt in prompts]
    text = [*prompts[0], *runs[0].tokens]
    runner = GraphRunner(bundle, backend)
    logits = compare_target(target_logits(runner, bundle.manifest, text), reference.logits(text)).to_json(tolerance)
    del reference, runner
    generation = compare_generation(session, prompts, runs, max_new_tokens, tolerance, report=report).to_json()
    return {
        "passed": all(graph["passed"] for graph in graphs.values()) and logits["passed"] and generation["passed"],
        "graph_set": graph_set.name,
        "tolerance": tolerance,
        "graphs": graphs,
        "target": logits,
        "generation": generation,
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "onnxruntime")},
    }


def parity_prompts(session: Session, longest: int) -> list[list[int]]:
    """Prompts to compare on, as token ids of at most ``longest`` tokens: short texts, or without a tokenizer seeded random ids."""
    tokenizer = session.tokenizer
    if tokenizer is None:
        generator = np.random.default_rng(20260802)
        vocab_size = session.bundle.manifest.target.vocab_size
        prompts = [generator.integers(0, vocab_size, length).tolist() for length in _RANDOM_PROMPT_LENGTHS]
    elif tokenizer.has_chat_template:
        prompts = [session.encode([{"role": "user", "content": text}]) for text in PROMPTS]
    else:
        prompts = [session.encode(text) for text in PROMPTS]
    return [prompt[:longest] for prompt in prompts]
