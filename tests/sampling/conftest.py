"""Tiny worlds to sample in: a target of a few tokens with drafters for it, and what the target's own model says.

Random drafters are calmed until they agree with the random target about half the time, so that every branch of acceptance is taken often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.sampling.continuations import TEXT
from tests.sampling.modules import ModuleBackend
from tests.sampling.reference import Continuations
from tests.tiny import write_drafter, write_markov_drafter, write_target
from xpress_export.build import describe
from xpress_export.checkpoints import open_draft_model, open_pair
from xpress_export.graph_set import graph_makers
from xpress_export.options import resolve_options
from xpress_runtime.bundle import Bundle
from xpress_runtime.plan import Plan
from xpress_runtime.sets import AttentionForm, Precision

NUM_ROWS = 1000
LAYER = {"intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
TARGET = {"vocab_size": 8, "hidden_size": 8, "eos_token_id": None, **LAYER}
# What scales a drafter's logits, and by how much.
CALMING = {"norm.weight": 0.6, "xpress_head.w2.weight": 0.6, "markov_w2.weight": 0.6}


@dataclass(frozen=True)
class World:
    """A described bundle, a backend for it, and the exact probabilities of what follows :data:`TEXT`."""

    bundle: Bundle
    backend: ModuleBackend
    truth: Continuations

    def plan(self, backend: ModuleBackend | None = None, num_rows: int = NUM_ROWS) -> Plan:
        return Plan(self.bundle, backend or self.backend, num_rows)


@pytest.fixture(scope="session")
def make_world(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., World]:
    """A world with the drafter that a function of :mod:`tests.tiny` writes, and its built numbers of passes."""
    folder = tmp_path_factory.mktemp("sampling")
    truth = Continuations(write_target(folder / "target", **TARGET), TEXT[:-1], TEXT[-1:])
    write_target(folder / "draft-model", seed=1, **TARGET)

    def make(write: Callable[..., Any], num_passes: Sequence[int]) -> World:
        path = folder / write.__name__
        write(path, folder / "target", tap_layers=(0,), **LAYER)
        calm(path / "model.safetensors")
        target, drafter = open_pair(str(folder / "target"), str(path))
        draft_model = open_draft_model(str(folder / "draft-model"), None, None, target)
        options = resolve_options(target, drafter, num_passes=num_passes, shortlists=(0, 3), capacity=8, prefill_chunk=4)
        manifest = describe(target, drafter, options, graph_sets=(), files={}, draft_model=draft_model)
        specs = graph_makers(target, drafter, options, Precision.FP32, AttentionForm.LENGTH, draft_model)
        return World(Bundle(path, manifest), ModuleBackend(specs), truth)

    return make


def calm(tensors: Path) -> None:
    """Scale a drafter's logits down."""
    save_file({name: tensor * CALMING.get(name, 1.0) for name, tensor in load_file(tensors).items()}, tensors)


@pytest.fixture(scope="session")
def refined(make_world: Callable[..., World]) -> World:
    """A block drafter with a refiner, and an autoregressive one."""
    return make_world(write_drafter, (2, 1, 3))


@pytest.fixture(scope="session")
def markov(make_world: Callable[..., World]) -> World:
    """A block drafter with a Markov head."""
    return make_world(write_markov_drafter, (3,))


@pytest.fixture(scope="session")
def refined_plan(refined: World) -> Plan:
    return refined.plan()


@pytest.fixture(scope="session")
def markov_plan(markov: World) -> Plan:
    return markov.plan()
