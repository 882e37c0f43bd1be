"""Bundles with half-precision graphs and engines for the simulated GPU, each built once per run. They must not be changed."""

from __future__ import annotations

import shutil

import pytest

from tests.complete import complete_bundle
from tests.conftest import Built, build
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
    """A conformance case with every kind of graph (see tests.complete): its attention reaches back to the first token, and its drafts are
    accepted by chance.
    """
    folder = tmp_path_factory.mktemp("bundles") / "trained-half"
    shutil.copytree(complete_bundle(tmp_path_factory).bundle.folder, folder)
    bundle = Bundle.open(folder, verify=False)
    write_engines(bundle, GRAPH_SET, "tensorrt-rtx", batch=2, layout="shared")
    write_engines(bundle, GRAPH_SET, "tensorrt", batch=2, layout="pinned")
    return bundle
