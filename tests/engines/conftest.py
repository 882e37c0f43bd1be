"""Tiny bundles with half-precision graphs, and the same with engines, each made once per run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import quick_export  # noqa: F401 (a fixture of these tests too)
from tests.complete import complete_bundle
from tests.conftest import Built, build
from tests.tiny import write_drafter, write_target
from xpress_engines.kinds import KINDS, require_builder
from xpress_export.engines_build import add_engines, engine_options, request_engines
from xpress_runtime.bundle import Bundle
from xpress_runtime.sets import Precision

RTX = "tensorrt-rtx"
SIZES = {"num_passes": (2,), "capacity": 64, "batch": 2, "prefill_chunk": 8}


@pytest.fixture(scope="session")
def half(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Graphs in fp16 and bf16 of a Qwen3-shaped target with two layers and a drafter with one (block size 4). It must not be changed.

    The head dim is 12 in other tests; with that one, TensorRT-RTX 1.7.1 fails on the drafter with an internal error.
    """
    folder = tmp_path_factory.mktemp("half")
    write_target(folder / "target", "qwen3", head_dim=16, num_hidden_layers=2)
    write_drafter(folder / "drafter", folder / "target", head_dim=16, num_hidden_layers=1)
    return build(folder / "target", folder / "drafter", folder / "bundle", precisions=(Precision.FP16, Precision.BF16), **SIZES)


@pytest.fixture(scope="session")
def engined(half: Built, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A copy of the bundle with engines for TensorRT-RTX. It must not be changed."""
    require_builder(KINDS[RTX])
    folder = tmp_path_factory.mktemp("engined") / "bundle"
    shutil.copytree(half.bundle.folder, folder)
    bundle = Bundle.open(folder)
    (request,) = request_engines([RTX], compute_capabilities=["8.9"])
    add_engines(bundle, engine_options(request, bundle.manifest))
    return bundle


@pytest.fixture(scope="session")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A bundle with every kind of graph, see tests.complete."""
    return complete_bundle(tmp_path_factory)


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[Bundle], Bundle]:
    """Copies a bundle, to be spoilt."""

    def copy(bundle: Bundle) -> Bundle:
        shutil.copytree(bundle.folder, tmp_path / "copy")
        return Bundle.open(tmp_path / "copy")

    return copy
