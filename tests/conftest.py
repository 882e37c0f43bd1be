"""Bundles that many tests share, each built once per run: tiny random ones, and the two conformance cases."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import write_drafter, write_markov_drafter, write_target
from xpress_export.build import build_bundle
from xpress_export.checkpoints import DrafterCheckpoint, DraftModelCheckpoint, TargetCheckpoint, open_draft_model, open_pair
from xpress_export.options import resolve_options
from xpress_runtime.bundle import Bundle
from xpress_runtime.sets import Precision

# Folders whose tests share something that takes long to make: one process runs all of a group.
SHARING = {
    "e2e": "real target",
    "sampling": "sampling",
    "engines": "complete bundle",
    "parity": "complete bundle",
    "runtime/backends": "trained bundle",
    "jobs": "tiny bundle",
    "scale_out": "tiny bundle",
    "server": "tiny bundle",
    "serving": "serving",
}


def pytest_configure(config: pytest.Config) -> None:
    """One of several processes keeps to its share of the cores: threads that wait for a core are many times slower than one that has it."""
    worker: dict[str, Any] | None = getattr(config, "workerinput", None)
    if worker is None or not hasattr(os, "sched_setaffinity"):
        return
    cores, count = sorted(os.sched_getaffinity(0)), worker["workercount"]
    own = cores[int(worker["workerid"].removeprefix("gw")) :: count]
    os.sched_setaffinity(0, own or cores)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Which tests stay together where several processes run them: those of a file, or of a folder that shares more.

    First, so that xdist, which reads the marks in a hook of the same name, finds them.
    """
    for item in items:
        place = item.path.relative_to(Path(__file__).parent)
        group = next((group for folder, group in SHARING.items() if place.is_relative_to(folder)), place.as_posix())
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """Models are tiny in most tests: a second thread only waits, and for long where the cores are busy."""
    torch.set_num_threads(1)


CONFORMANCE = Path(__file__).parent / "conformance_data"


@dataclass(frozen=True)
class Built:
    """A bundle and the checkpoints it was built from."""

    bundle: Bundle
    target: TargetCheckpoint
    drafter: DrafterCheckpoint
    draft_model: DraftModelCheckpoint | None = None


def build(
    target: Path,
    drafter: Path,
    output: Path,
    *,
    precisions: Sequence[Precision] = (Precision.FP32,),
    sampling: bool = False,
    draft_layers: Sequence[int] | None = None,
    draft_model: Path | None = None,
    **options: Any,
) -> Built:
    """Build a bundle as the command does, without parity. Graphs for sampling take seconds each, so only where they are needed."""
    target_checkpoint, drafter_checkpoint = open_pair(str(target), str(drafter))
    resolved = resolve_options(target_checkpoint, drafter_checkpoint, sampling=sampling, **options)
    model = None
    if draft_layers is not None or draft_model is not None:
        model = open_draft_model(None if draft_model is None else str(draft_model), None, draft_layers, target_checkpoint)
    bundle = build_bundle(target_checkpoint, drafter_checkpoint, output, resolved, precisions=precisions, draft_model=model)
    return Built(bundle, target_checkpoint, drafter_checkpoint, model)


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random Qwen3 target and a drafter with refiner for it (block size 4), as folders."""
    folder = tmp_path_factory.mktemp("tiny")
    write_target(folder / "target", "qwen3")
    write_drafter(folder / "drafter", folder / "target")
    return folder / "target", folder / "drafter"


@pytest.fixture(scope="session")
def tiny(tiny_folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A bundle of the tiny folders with every number of passes. It must not be changed."""
    output = tmp_path_factory.mktemp("bundles") / "tiny"
    return build(*tiny_folders, output, num_passes=(2, 1, 3), capacity=64, batch=2, prefill_chunk=8)


@pytest.fixture(scope="session", params=["qwen3-b4", "llama-b8"])
def conformance(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Built]:
    """A conformance case and its bundle, built for every number of passes that the case has results for."""
    case: str = request.param
    folder = CONFORMANCE / case
    passes = (3, 1, 2) if case == "qwen3-b4" else (4, 1, 2, 3, 7)
    output = tmp_path_factory.mktemp("bundles") / case
    return case, build(folder / "target", folder / "xpress", output, num_passes=passes, capacity=128, batch=2, prefill_chunk=16)


@pytest.fixture(scope="session")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and, for it, an xPress drafter, a bare one and one with a Markov head. They must not be changed."""
    root = tmp_path_factory.mktemp("formats")
    write_target(root / "target", "qwen3")
    write_drafter(root / "xpress", root / "target")
    write_drafter(root / "dflash", root / "target", refiner=False)
    write_markov_drafter(root / "markov", root / "target")
    return root
