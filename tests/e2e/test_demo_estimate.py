"""The estimate of the demo, from sizes alone, against the bundle that was built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import Demo
from xpress_export.checkpoints.config_only import open_pair_configs
from xpress_export.demo.bundle import DEMO_CAPACITY, DEMO_NUM_PASSES
from xpress_export.demo.target import demo_drafter
from xpress_export.estimate import estimate_bundle
from xpress_export.options import resolve_options
from xpress_runtime.sets import Precision

SMOLLM2_135M = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 100_000,
    "tie_word_embeddings": True,
}


def test_weights_on_disk(demo: Demo, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2_135M))
    opened = open_pair_configs(str(tmp_path), str(demo_drafter()))
    made = estimate_bundle(*opened, resolve_options(*opened, num_passes=DEMO_NUM_PASSES, capacity=DEMO_CAPACITY), (Precision.FP32,))
    built = sum(record.bytes for name, record in demo.bundle.manifest.files.items() if name.startswith("graphs/fp32-length/"))
    # Beside weights there are the graphs' own nodes, and padding to whole pages.
    assert built == pytest.approx(made.sets["fp32-length"].on_disk, rel=0.002)
