"""Bundles of the families that differ most: every graph against PyTorch, and every way to decode against transformers, past the windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import build
from tests.tiny import write_drafter, write_target
from xpress_export.parity.check import check_parity
from xpress_export.parity.report import failures
from xpress_runtime.sets import Precision

FULL, SLIDING = "full_attention", "sliding_attention"
FACTORS = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.0625, "logits_scaling": 8.0}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.8}

# Windows are shorter than the prompts, which have up to 17 tokens. Granite's and Gemma 2's logits are scaled and bounded, and the drafter's
# are not: those blocks have a head of their own.
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "qwen3": ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}, False),
    "smollm3": ("smollm3", {"no_rope_layers": [0, 1, 1], "use_sliding_window": True, "sliding_window": 6}, False),
    "granite": ("granite", FACTORS, True),
    "phi3": ("phi3", {"sliding_window": 7, "rope_parameters": PARTIAL}, False),
    "gemma2": ("gemma2", {"sliding_window": 5, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}, True),
    "gemma3": ("gemma3_text", {"sliding_window": 4, "layer_types": [SLIDING, FULL, SLIDING]}, False),
}


# Between them these have windows, partial rotation, factors of the embedding and a head of their own.
QUICK = ("phi3", "gemma2", "gemma3")


@pytest.mark.parametrize("case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES])
def test_parity(case: str, tmp_path: Path) -> None:
    model_type, overrides, has_base_head = CASES[case]
    write_target(tmp_path / "target", model_type, **overrides)
    write_drafter(tmp_path / "drafter", tmp_path / "target")
    precisions = (Precision.FP32, Precision.FP16) if case == "phi3" else (Precision.FP32,)
    built = build(
        tmp_path / "target", tmp_path / "drafter", tmp_path / "bundle", capacity=64, prefill_chunk=8, precisions=precisions, num_passes=(2,)
    )
    assert built.bundle.manifest.base_head == has_base_head
    results = check_parity(built.bundle, built.target, built.drafter, threads=1)
    for result in results.values():
        assert result["passed"], failures(result)
        assert result["generation"]["tokens"] >= 200
        assert ("base-head" in result["graphs"]) == has_base_head
