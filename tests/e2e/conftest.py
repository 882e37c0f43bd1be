"""The real target and its drafter: downloaded and built once, where the demo keeps them, and found again while the code is the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.e2e.served import SLOTS, serving
from xpress_export.checkpoints import TargetCheckpoint
from xpress_export.demo.bundle import build_demo_bundle, demo_bundle_folder, find_demo_bundle, open_demo_checkpoints
from xpress_export.demo.target import default_cache, fetch_demo_target
from xpress_export.parity.reference import TransformersReference
from xpress_runtime.bundle import Bundle
from xpress_runtime.session import Session


@pytest.fixture(scope="package", autouse=True)
def all_torch_threads() -> Iterator[None]:
    """The real target is worth every core that this process has."""
    torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    yield
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Demo:
    """The demo's bundle and the target it was built from."""

    bundle: Bundle
    target: TargetCheckpoint


@pytest.fixture(scope="session")
def demo_target() -> Path:
    return fetch_demo_target(default_cache())


@pytest.fixture(scope="session")
def demo(demo_target: Path) -> Demo:
    folder = demo_bundle_folder(default_cache())
    target, drafter, draft_model = open_demo_checkpoints(demo_target)
    bundle = find_demo_bundle(folder) or build_demo_bundle(target, drafter, draft_model, folder, lambda _: None)
    return Demo(bundle, target)


@pytest.fixture(scope="session")
def demo_session(demo: Demo) -> Iterator[Session]:
    with Session.open(demo.bundle.folder, "ort-cpu") as session:
        yield session


@pytest.fixture(scope="session")
def served(demo: Demo) -> Iterator[str]:
    """The URL of a server with the demo's bundle, in a process of its own."""
    with serving(demo.bundle.folder, "--slots", str(SLOTS), "--max-queue", "128") as (url, _process):
        yield url


@pytest.fixture(scope="session")
def transformers_reference(demo: Demo) -> TransformersReference:
    return TransformersReference(demo.target.location, demo.target.eos_token_ids)
