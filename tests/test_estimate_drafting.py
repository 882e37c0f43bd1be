"""Estimates of sampling and of draft models: what they add, and what they share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_estimate import QWEN3, QWEN3_4B, QWEN3_8B, estimate, transformers_parameters, write_configs
from xpress_runtime.errors import OptionError
from xpress_runtime.sets import Precision


def test_noise_lies_on_disk_once_and_in_every_engine_that_draws(tmp_path: Path) -> None:
    configs = write_configs(tmp_path, QWEN3_4B)
    with_sampling, without = (
        estimate(*configs, num_passes=(4,), shortlists=(0, 256), sampling=sampling).sets["fp16-mask"] for sampling in (True, False)
    )
    noise = 3 * 8 * 151936
    assert with_sampling.on_disk - without.on_disk == noise
    assert with_sampling.graphs["sample"] == with_sampling.graphs["accept-candidates"] == noise
    assert with_sampling.graphs["refiner-k4-c256-sampled"] == without.graphs["refiner-k4-c256"] + noise
    assert not any(with_sampling.graphs[graph] for graph in ("filter-top-p", "penalise", "count", "denoise", "lookup", "confidence"))
    small = ("sample", "accept-sampled", "accept-candidates", "filter-top-k", "filter-top-p", "penalise", "count")
    assert set(with_sampling.engines) - set(without.engines) == {
        *small,
        *(f"refiner-{variant}-sampled" for variant in ("k4", "k4-c256", "k0")),
    }


def test_layers_of_the_target_that_draft_cost_nothing_on_disk(tmp_path: Path) -> None:
    configs = write_configs(tmp_path, QWEN3_4B)
    alone, drafting = (estimate(*configs, draft_layers=layers).sets["fp16-mask"] for layers in (None, (0, 1, 35)))
    made = estimate(*configs, draft_layers=(0, 1, 35), precisions=(Precision.FP16,))
    hidden, inner, query, key = 2560, 9728, 32 * 128, 8 * 128
    layer = 2 * hidden * query + 2 * hidden * key + 3 * hidden * inner + 2 * hidden + 2 * 128
    assert made.draft_model_parameters == 3 * layer + hidden
    assert drafting.on_disk == alone.on_disk
    assert set(drafting.graphs) - set(alone.graphs) == {"draft-start", "draft-step", "draft-step-sampled", "draft-decoder"}
    assert drafting.graphs["draft-decoder"] > 2 * 3 * layer
    # It takes room where it runs: its engine, and caches when it is first asked for.
    assert drafting.memory.weights - alone.memory.weights > drafting.graphs["draft-decoder"]
    caches = 2 * 3 * 2 * 8 * 128 * (2048 + 128 + 16)
    assert 0 < drafting.memory.on_demand.draft_model - caches < 2**25
    assert estimate(*configs).draft_model_parameters is None


def test_a_draft_model_of_its_own_is_counted_with_its_tables(tmp_path: Path) -> None:
    configs = write_configs(tmp_path / "8b", QWEN3_8B)
    own, _ = write_configs(tmp_path / "4b", QWEN3_4B)
    made = estimate(*configs, draft_model=own, precisions=(Precision.FP16,))
    assert made.draft_model_parameters == transformers_parameters(QWEN3 | QWEN3_4B)
    table = 2 * 151936 * 2560
    graphs = made.sets["fp16-mask"].graphs
    assert graphs["draft-embed"] == graphs["draft-head"] == table
    alone = estimate(*configs, precisions=(Precision.FP16,)).sets["fp16-mask"]
    rotary = 2 * 2 * 64 * (2048 + 128 + 16)
    assert made.sets["fp16-mask"].on_disk - alone.on_disk == table + graphs["draft-decoder"] - rotary


@pytest.mark.parametrize("layers", [(36,), (), (1, 1)])
def test_layers_that_do_not_exist_are_refused(layers: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="layer"):
        estimate(*write_configs(tmp_path, QWEN3_8B), draft_layers=layers)
