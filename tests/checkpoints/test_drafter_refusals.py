"""Drafter configs that are refused, each by name and in one line."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests import layouts
from tests.checkpoints.spoil import assert_refused
from tests.tiny import edit_json
from xpress_export.checkpoints import open_drafter


@pytest.mark.parametrize(
    ("source", "options", "named"),
    [
        ("xpress", {"speculators_model_type": "eagle3"}, ("eagle3", "xpress, dflash, dspark")),
        ("xpress", {"speculators_model_type": 3}, ("speculators_model_type '3'",)),
        ("xpress", {"sample_from_anchor": True}, ("sample_from_anchor is true", "every slot")),
        # They would change drafts in the serving format, and are read nowhere here.
        *[
            ("xpress", {name: value}, (f"'{name}'", "convert"))
            for name, value in (
                ("anchor_predecessor", "anchor"),
                ("output_multiplier", 0.5),
                ("xpress_num_passes", 1),
                ("dflash_config", {}),
            )
        ],
        ("dflash", {"norm_before_fc": True}, ("norm_before_fc", "true")),
        ("markov", {"sample_from_anchor": ...}, ("sample_from_anchor is absent", "every slot")),
        ("markov", {"sample_from_anchor": True}, ("sample_from_anchor is true",)),
        ("markov", {"markov_head_type": "gated"}, ("markov_head_type", "gated")),
        ("markov", {"markov_head_type": "rnn"}, ("markov_head_type", "rnn")),
        ("dflash", {"projector_type": "domino"}, ("domino", "dflash")),
        ("dflash", {"projector_type": "other"}, ("projector_type", "other")),
        ("dflash", {"shift_label": True}, ("shift_label", "true")),
        ("dflash", {"target_hidden_size": 64}, ("target_hidden_size", "64", "40")),
        ("xpress", {"mask_token_id": None}, ("mask_token_id", "null")),
        ("xpress", {"mask_token_id": 61}, ("mask_token_id is 61", "61")),
        ("xpress", {"aux_hidden_state_layer_ids": [0, 2]}, ("[0, 2]", "embedding")),
        ("xpress", {"aux_hidden_state_layer_ids": [2, 2]}, ("aux_hidden_state_layer_ids", "twice")),
        ("xpress", {"aux_hidden_state_layer_ids": []}, ("aux_hidden_state_layer_ids", "empty")),
        ("xpress", {"aux_hidden_state_layer_ids": None}, ("aux_hidden_state_layer_ids", "missing")),
        ("xpress", {"aux_hidden_state_layer_ids": [1, 2, 3]}, ("'fc.weight'", "[40, 80]", "[40, 120]")),
        ("xpress", {"transformer_layer_config": ...}, ("transformer_layer_config", "missing")),
        ("xpress", {"block_size": 1}, ("block_size", "1")),
        ("xpress", {"block_size": 5}, ("'refiner_head.mix_l'", "[8, 4, 4]", "[8, 5, 5]")),
        ("xpress", {"xpress_rank": 9}, ("'refiner_head.", "[61, 8]", "[61, 9]")),
        ("xpress", {"xpress_mlp_ratio": 3}, ("'refiner_head.mlp_gate.weight'", "[16, 8]", "[24, 8]")),
        ("xpress", {"num_jacobi_passes": 0}, ("num_jacobi_passes", "0")),
        ("xpress", {"num_jacobi_pass": 2, "num_jacobi_passes": ...}, ("num_jacobi_pass", "did you mean 'num_jacobi_passes'")),
        ("xpress", {"sizes": {"model_type": "llama"}}, ("transformer_layer_config", "llama", "qwen3")),
        ("xpress", {"sizes": {"hidden_size": 0}}, ("transformer_layer_config", "hidden_size", "0")),
        ("xpress", {"sizes": {"final_logit_softcapping": 30.0}}, ("transformer_layer_config", "final_logit_softcapping")),
    ],
)
def test_refused_of_speculators(source: str, options: dict[str, Any], named: tuple[str, ...], drafters: Path, tmp_path: Path) -> None:
    layouts.speculators(drafters / source, tmp_path)
    open_drafter(str(tmp_path))
    layouts.speculators(drafters / source, tmp_path, **options)
    assert_refused(lambda: open_drafter(str(tmp_path)), *named)


@pytest.mark.parametrize(
    ("source", "changes", "named"),
    [
        ("xpress", {"architectures": ["DFlash2DraftModel"]}, ("DFlash2DraftModel", "dynamic convolutions", "selector")),
        ("xpress", {"mask_token_id": 3}, ("mask_token_id' is 3", "dflash_config it is 60")),
        ("xpress", {"target_layer_ids": [0]}, ("target_layer_ids' is [0]", "dflash_config it is [0, 1]")),
        ("xpress", {"anchor_predecessor": "next"}, ("anchor_predecessor", "next", "previous, anchor")),
        ("xpress", {"input_embedding_scale": 0}, ("input_embedding_scale", "0")),
        ("xpress", {"output_multiplier": "2"}, ("output_multiplier", '"2"')),
        ("xpress", {"final_logit_softcapping": -1}, ("final_logit_softcapping", "-1")),
        ("xpress", {"is_causal": "no"}, ("is_causal", "no")),
        ("xpress", {"dflash_config": ...}, ("dflash_config", "missing")),
        ("xpress", {"draft_vocab_size": 9}, ("draft_vocab_size is 9 of 61", "'d2t'")),
        ("dflash", {"dflash_config": {"mask_token_id": 60}, "num_target_layers": ...}, ("target_layer_ids", "num_target_layers", "add")),
        ("dflash", {"dflash_config": {"mask_token_id": 60, "is_causal": True}}, ("dflash_config", "'is_causal'", "beside")),
        ("dflash", {"sliding_window_non_causal": True}, ("sliding_window_non_causal", "is_causal")),
        ("xpress", {"xpress_topc": 30, "draft_vocab_size": 20}, ("shortlist", "30", "20 tokens")),
        ("dflash", {"markov_rank": 8, "markov_head_type": "gated"}, ("markov_head_type", "gated")),
        ("dflash", {"sliding_window": 4, "use_sliding_window": True, "layer_types": ["linear_attention"] * 2}, ("linear_attention",)),
    ],
)
def test_refused_of_the_serving_format(
    source: str, changes: dict[str, Any], named: tuple[str, ...], drafters: Path, tmp_path: Path
) -> None:
    shutil.copytree(drafters / source, tmp_path / "given")
    edit_json(tmp_path / "given/config.json", **changes)
    assert_refused(lambda: open_drafter(str(tmp_path / "given")), *named)
