"""One trained bundle with everything that can be built, for tests that look at all graphs: built once per run, since that takes a while."""

from __future__ import annotations

import pytest

from tests.conftest import CONFORMANCE, Built, build
from xpress_runtime.sets import Precision

CASE = CONFORMANCE / "qwen3-b4"
GRAPH_SET = "fp16-mask"
SHORTLIST = 8
OPTIONS = {"num_passes": (3,), "shortlists": (0, SHORTLIST), "capacity": 112, "batch": 2, "prefill_chunk": 12}

_BUILT: list[Built] = []


def complete_bundle(factory: pytest.TempPathFactory) -> Built:
    """Sampling, a shortlist beside the whole vocabulary, and a draft model of the target's first layers; fp16. It must not be changed."""
    if not _BUILT:
        output = factory.mktemp("bundles") / "complete"
        built = build(CASE / "target", CASE / "xpress", output, precisions=(Precision.FP16,), sampling=True, draft_layers=(0, 1), **OPTIONS)
        _BUILT.append(built)
    return _BUILT[0]
