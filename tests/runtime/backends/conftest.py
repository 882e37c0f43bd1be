"""Bundles with half-precision graphs and engines for the simulated GPU, each built once per run. They must not be changed."""

from __future__ import annotations

import pytest

from tests.conftest import CONFORMANCE, Built, build
from tests.runtime.backends.simulated_engines import write_engines
from tests.scripted import write_scripted
from xpress_runtime.bundle import Bundle
from xpress_runtime.sets import Precision

GRAPH_SET = "fp16-mask"


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The scripted target and drafter (see tests.scripted), block size 4, chunks of 5, 3 rows."""
    folder = tmp_path_factory.mktemp("scripted-half")
    options = {"num_passes": (3, 2, 1), "capacity": 64, "prefill_chunk": 4, "batch": 3}
    built: Built = build(*write_scripted(folder), folder / "bundle", precisions=[Precision.FP16], **options)
    write_engines(built.bundle, GRAPH_SET, "tensorrt-rtx", batch=1, layout="shared")
    write_engines(built.bundle, GRAPH_SET, "tensorrt", batch=3, layout="pinned")
    return built.bundle


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A conformance case: its attention reaches back to the first token, and its drafts are accepted by chance."""
    folder = CONFORMANCE / "qwen3-b4"
    output = tmp_path_factory.mktemp("bundles") / "trained-half"
    options = {"num_passes": (3, 1), "capacity": 112, "batch": 2, "prefill_chunk": 12}
    built = build(folder / "target", folder / "xpress", output, precisions=[Precision.FP16], **options)
    write_engines(built.bundle, GRAPH_SET, "tensorrt-rtx", batch=2, layout="shared")
    write_engines(built.bundle, GRAPH_SET, "tensorrt", batch=1, layout="pinned")
    return built.bundle
