"""The real bundle in fp16: no value leaves the range, errors and acceptance are within tolerance, and every difference is a near tie."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import Demo
from xpress_export.build import build_bundle
from xpress_export.checkpoints import DrafterCheckpoint
from xpress_export.demo.bundle import DEMO_CAPACITY, DEMO_NUM_PASSES, open_demo_checkpoints
from xpress_export.demo.target import demo_prompts
from xpress_export.options import resolve_options
from xpress_export.parity.check import check_parity
from xpress_export.parity.report import failures
from xpress_runtime.bundle import Bundle
from xpress_runtime.sets import Precision


@pytest.fixture(scope="module")
def half(demo_target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, DrafterCheckpoint]:
    """The demo's bundle with an fp16 set beside the fp32 one."""
    target, drafter, _ = open_demo_checkpoints(demo_target)
    options = resolve_options(target, drafter, num_passes=DEMO_NUM_PASSES, capacity=DEMO_CAPACITY)
    output = tmp_path_factory.mktemp("bundles") / "demo"
    return build_bundle(target, drafter, output, options, precisions=(Precision.FP32, Precision.FP16)), drafter


@pytest.mark.slow
def test_fp16_over_all_prompts(demo: Demo, half: tuple[Bundle, DrafterCheckpoint]) -> None:
    bundle, drafter = half
    graph_set = bundle.manifest.graph_set("fp16-mask")
    result = check_parity(bundle, demo.target, drafter, graph_sets=[graph_set], prompts=demo_prompts(), max_new_tokens=64)["fp16-mask"]
    assert failures(result) == []
    assert result["passed"]
    # This model's residual stream reaches 2.6e4 at the first token: two and a half times that fits.
    found = result["graphs"]["target"]["range"]
    assert 2 < found["headroom"] < 3
    assert found["module"].startswith("layers.")
    assert result["generation"]["prompts"] == 50
    for divergence in result["generation"]["divergences"]:
        assert divergence["margin"] <= 2 * divergence["logit_error"]
    for mode in result["acceptance"]["modes"].values():
        assert mode["mean_acceptance_length"] == pytest.approx(mode["reference"], rel=0.02)
