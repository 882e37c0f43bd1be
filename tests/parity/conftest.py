"""Bundles in half precision, each exported once."""

from __future__ import annotations

import pytest

from tests.complete import complete_bundle
from tests.conftest import CONFORMANCE, Built, build
from xpress_runtime.sets import Precision

BOTH = (Precision.FP32, Precision.FP16)


@pytest.fixture(scope="session")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A bundle with every kind of graph, see tests.complete."""
    return complete_bundle(tmp_path_factory)


@pytest.fixture(scope="session")
def half(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A trained target and drafter (block size 4) in both precisions. It must not be changed."""
    folder, output = CONFORMANCE / "qwen3-b4", tmp_path_factory.mktemp("bundles") / "half"
    return build(folder / "target", folder / "xpress", output, precisions=BOTH, num_passes=(2, 1), capacity=96, prefill_chunk=16)
