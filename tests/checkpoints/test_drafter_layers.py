"""Drafters with windows, causal layers, scaled rotary embeddings and factors: on static caches, against plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints.replay import NUM_POSITIONS, empty_caches
from tests.reference import ReferenceDrafter
from tests.tiny import write_drafter, write_target
from xpress_export.checkpoints import open_drafter, open_target
from xpress_export.checkpoints.base_head import base_head, needs_base_head
from xpress_runtime.sets import AttentionForm

TOLERANCE = 1e-4
BLOCK_SIZE = 5
FULL, SLIDING = "full_attention", "sliding_attention"
# Rows of context that each call adds; the last ones before a block are fewer than its slots.
ROUNDS = (7, 4, 0, 1, 3)

WINDOW = {"use_sliding_window": True, "sliding_window": 6, "layer_types": [SLIDING, FULL]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": WINDOW,
    "window-both-ways": WINDOW | {"is_causal": False},
    "window-narrower-than-the-block": WINDOW | {"sliding_window": 3, "is_causal": False},
    "window-of-one": WINDOW | {"sliding_window": 1},
    "windows-everywhere": WINDOW | {"layer_types": [SLIDING, SLIDING], "sliding_window": 4},
    "window-causal-everywhere": WINDOW | {"is_causal": True},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.5}},
    "llama3": {"rope_scaling": LLAMA3},
    "yarn": {"rope_scaling": YARN, "rope_theta": 1e6},
    "yarn-window": WINDOW | {"rope_scaling": YARN | {"beta_fast": 4.0, "beta_slow": 0.5}},
    "factors": {"input_embedding_scale": 5.0, "output_multiplier": 0.5, "final_logit_softcapping": 0.7},
}


@pytest.mark.parametrize("form", AttentionForm)
@pytest.mark.parametrize("case", CASES)
def test_equals_plain_pytorch(case: str, form: AttentionForm, tmp_path: Path) -> None:
    write_target(tmp_path / "target", "qwen3")
    write_drafter(tmp_path / "drafter", tmp_path / "target", block_size=BLOCK_SIZE, **CASES[case])
    target, checkpoint = open_target(str(tmp_path / "target")), open_drafter(str(tmp_path / "drafter"))
    assert needs_base_head(target, checkpoint) == (case == "factors")
    head = base_head(target, checkpoint)
    embedding = target.embedding()
    reference = ReferenceDrafter(tmp_path / "drafter", embedding.table, target.head().table)
    drafter, config = checkpoint.drafter(NUM_POSITIONS, form), checkpoint.config
    keys, values = empty_caches(config.backbone), empty_caches(config.backbone)
    generator = torch.Generator().manual_seed(0)
    taps = torch.zeros(0, 2 * config.backbone.hidden_size)
    for anchor, num_rows in enumerate(ROUNDS):
        # One row more than there is to store, as after a round that was not accepted to the end.
        rows = torch.randn(num_rows + 1, taps.shape[1], generator=generator)
        ids = torch.tensor([[anchor] + [config.mask_token_id] * (BLOCK_SIZE - 1)])
        start, end = torch.tensor([len(taps)]), torch.tensor([len(taps) + num_rows])
        hidden, keys, values = drafter(embedding(ids), rows[None], start, end, keys, values)
        taps = torch.cat([taps, rows[:num_rows]])
        expected = reference.hidden(taps, anchor)
        assert (hidden[0] - expected).abs().max() < TOLERANCE
        logits = head(hidden, torch.arange(1, BLOCK_SIZE)[None])[0]
        assert (logits[0] - reference.base_logits(expected)).abs().max() < TOLERANCE


def test_the_cases_differ(tmp_path: Path) -> None:
    """A switch that changed nothing would pass above whatever the module does with it."""
    write_target(tmp_path / "target", "qwen3")
    target = open_target(str(tmp_path / "target"))
    taps = torch.randn(11, 80, generator=torch.Generator().manual_seed(1))
    drafted = []
    for case, overrides in CASES.items():
        write_drafter(tmp_path / case, tmp_path / "target", block_size=BLOCK_SIZE, **overrides)
        drafted.append(ReferenceDrafter(tmp_path / case, target.embedding().table, target.head().table).hidden(taps, 3))
    for index, one in enumerate(drafted):
        for other in drafted[:index]:
            assert (one - other).abs().max() > 10 * TOLERANCE
