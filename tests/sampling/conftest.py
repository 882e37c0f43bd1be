"""Tiny worlds to sample in: a target of a few tokens with drafters for it, and what the target's own model says.

Random drafters are calmed until they agree with the random target about half the time, so that every branch of acceptance is taken often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.conftest import build
from tests.sampling.continuations import TEXT
from tests.sampling.modules import ModuleBackend
from tests.sampling.reference import Continuations
from tests.tiny import write_drafter, write_markov_drafter, write_target
from xpress_export.build import describe
from xpress_export.checkpoints import open_draft_model, open_pair
from xpress_export.graph_set import graph_makers
from xpress_export.options import resolve_options
from xpress_runtime.backends.ort_cpu import OrtCpuBackend
from xpress_runtime.bundle import Bundle
from xpress_runtime.plan import Plan
from xpress_runtime.sets import AttentionForm, Precision

NUM_ROWS = 1000
LAYER = {"intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
TARGET = {"vocab_size": 8, "hidden_size": 8, "eos_token_id": None, **LAYER}
# With this seed every variant, also with a shortlist, drafts tokens that the target's filters leave.
DRAFTER: dict[str, Any] = {"tap_layers": (0,), "seed": 3, **LAYER}
# What scales a drafter's logits, and by how much.
CALMING = {"norm.weight": 0.6, "xpress_head.w2.weight": 0.6, "markov_w2.weight": 0.6}


@dataclass(frozen=True)
class Models:
    """A folder with a target, ``draft-model`` (an autoregressive drafter) and block drafters ``refined`` and ``markov``; ``target`` is
    transformers' model of the first.
    """

    folder: Path
    target: Any


@dataclass(frozen=True)
class World:
    """A bundle that is described and was not exported, and a backend for it."""

    bundle: Bundle
    backend: ModuleBackend

    def plan(self, backend: ModuleBackend | None = None) -> Plan:
        return Plan(self.bundle, backend or self.backend, NUM_ROWS)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("sampling")
    target = write_target(folder / "target", **TARGET)
    write_target(folder / "draft-model", seed=1, **TARGET)
    write_drafter(folder / "refined", folder / "target", **DRAFTER)
    write_markov_drafter(folder / "markov", folder / "target", **DRAFTER)
    for drafter in ("refined", "markov"):
        tensors = folder / drafter / "model.safetensors"
        save_file({name: tensor * CALMING.get(name, 1.0) for name, tensor in load_file(tensors).items()}, tensors)
    return Models(folder, target)


def world(models: Models, name: str, num_passes: Sequence[int], draft_model_name: str = "draft-model") -> World:
    """The block drafter of a name and the autoregressive one of another."""
    target, drafter = open_pair(str(models.folder / "target"), str(models.folder / name))
    draft_model = open_draft_model(str(models.folder / draft_model_name), None, None, target)
    options = resolve_options(target, drafter, num_passes=num_passes, shortlists=(0, 3), capacity=8, prefill_chunk=4)
    manifest = describe(target, drafter, options, graph_sets=(), files={}, draft_model=draft_model)
    specs = graph_makers(target, drafter, options, Precision.FP32, AttentionForm.LENGTH, draft_model)
    return World(Bundle(models.folder / name, manifest), ModuleBackend(specs))


@pytest.fixture(scope="session")
def truth(models: Models) -> Continuations:
    """Of :data:`TEXT`, whose last token counts as output."""
    return Continuations(models.target, TEXT[:-1], TEXT[-1:])


@pytest.fixture(scope="session")
def refined(models: Models) -> World:
    return world(models, "refined", (2, 1, 3))


@pytest.fixture(scope="session")
def refined_plan(refined: World) -> Plan:
    return refined.plan()


@pytest.fixture(scope="session")
def markov_plan(models: Models) -> Plan:
    return world(models, "markov", (3,)).plan()


@pytest.fixture(scope="session")
def exported(models: Models) -> Bundle:
    """Real graphs of the same models: no pass, one pass with a shortlist, and the autoregressive drafter."""
    options: dict[str, Any] = {"num_passes": (1,), "shortlists": (3,), "capacity": 40, "prefill_chunk": 4}
    paths = [models.folder / name for name in ("target", "refined", "bundle")]
    return build(*paths, sampling=True, draft_model=models.folder / "draft-model", **options).bundle


@pytest.fixture(scope="session")
def exported_plan(exported: Bundle) -> Plan:
    return Plan(exported, OrtCpuBackend(threads=1), NUM_ROWS)
