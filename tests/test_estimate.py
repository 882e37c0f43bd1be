"""Estimates against what they estimate: transformers' own parameter counts, and bundles that were really built."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import onnx
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

from tests.complete import complete_bundle
from tests.conftest import Built, build
from tests.large import QWEN3
from tests.tiny import TARGET_SIZES, edit_json, write_drafter, write_target
from xpress_export.checkpoints import open_target
from xpress_export.checkpoints.config_only import open_pair_configs
from xpress_export.checkpoints.draft_model_config import open_draft_model_config
from xpress_export.estimate import GPU_RESERVE_BYTES, Estimate, SetEstimate, estimate_bundle
from xpress_export.graphs.weights import WEIGHTS_FILE
from xpress_export.options import resolve_options
from xpress_runtime.errors import CheckpointError, EnvironmentProblem, OptionError, PairingError
from xpress_runtime.memory import memory_need
from xpress_runtime.sets import Precision

QWEN3_8B = {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False}
QWEN3_4B = {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True}
DRAFTER: dict[str, Any] = {
    "architectures": ["Qwen3XPressModel"],
    "num_hidden_layers": 5,
    "num_target_layers": 36,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "xpress_rank": 256,
    "xpress_mlp_hidden": 512,
    "xpress_block_size": 16,
    "xpress_num_passes": 6,
    "sample_from_anchor": False,
}
# What an exporter leaves in a graph beside weights: constants, and in the masked form the numbers of all columns.
SMALL_CONSTANTS = 2000


def write_configs(folder: Path, sizes: dict[str, Any]) -> tuple[str, str]:
    """A target's folder with config.json alone, and a drafter's config as a file of another name."""
    (folder / "target").mkdir(parents=True)
    (folder / "target/config.json").write_text(json.dumps(QWEN3 | sizes))
    (folder / "drafter.json").write_text(json.dumps(QWEN3 | sizes | DRAFTER))
    return str(folder / "target"), str(folder / "drafter.json")


def estimate(
    target: object,
    drafter: object,
    precisions: tuple[Precision, ...] = (Precision.FP32, Precision.FP16),
    *,
    draft_model: object = None,
    draft_layers: tuple[int, ...] | None = None,
    **options: Any,
) -> Estimate:
    opened = open_pair_configs(str(target), str(drafter))
    model = None
    if draft_model is not None or draft_layers is not None:
        model = open_draft_model_config(None if draft_model is None else str(draft_model), None, draft_layers, opened[0])
    return estimate_bundle(*opened, resolve_options(*opened, **options), precisions, model)


def transformers_parameters(config: dict[str, Any]) -> int:
    """Parameters of the model that transformers makes of a config; tied ones count once."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {name: value for name, value in config.items() if name != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **fields))
    return sum(parameter.numel() for parameter in model.parameters())


# Parameters.


@pytest.mark.parametrize("sizes", [QWEN3_8B, QWEN3_4B], ids=["8b", "4b"])
def test_parameters_of_qwen3(sizes: dict[str, Any], tmp_path: Path) -> None:
    made = estimate(*write_configs(tmp_path, sizes), precisions=(Precision.FP16,))
    assert made.target_parameters == transformers_parameters(QWEN3 | sizes)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral"])
def test_parameters_of_every_family(model_type: str, tied: bool, tmp_path: Path) -> None:
    write_target(tmp_path / "target", model_type, tie_word_embeddings=tied, **({"attention_bias": True} if model_type == "llama" else {}))
    write_drafter(tmp_path / "drafter", tmp_path / "target")
    config = json.loads((tmp_path / "target/config.json").read_text())
    for path in (tmp_path / "target").iterdir():
        if path.name != "config.json":
            path.unlink()
    assert estimate(tmp_path / "target", tmp_path / "drafter").target_parameters == transformers_parameters(config)


@pytest.mark.parametrize("refiner", [True, False])
def test_parameters_of_a_drafter(refiner: bool, tiny_folders: tuple[Path, Path], tmp_path: Path) -> None:
    tensors = write_drafter(tmp_path / "drafter", tiny_folders[0], refiner=refiner)
    (tmp_path / "drafter/model.safetensors").unlink()
    made = estimate(tiny_folders[0], tmp_path / "drafter")
    assert made.drafter_parameters == sum(tensor.numel() for tensor in tensors.values())


def test_parameters_of_a_published_drafter(tmp_path: Path) -> None:
    made = estimate(*write_configs(tmp_path, QWEN3_4B), precisions=(Precision.FP16,))
    hidden, inner, vocab, query, key = 2560, 9728, 151936, 32 * 128, 8 * 128
    layer = 2 * hidden * query + 2 * hidden * key + 3 * hidden * inner + 2 * hidden + 2 * 128
    refiner = 2 * vocab * 256 + 2 * 256 * hidden + 3 * 256 * 256 + 256 * 16 * 16 + 3 * 512 * 256
    assert made.drafter_parameters == 5 * hidden * hidden + 2 * hidden + 5 * layer + refiner


# Sizes.


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A half-precision set whose one table, for embeddings and head, is large enough to lie outside the graphs."""
    folder = tmp_path_factory.mktemp("estimated")
    write_target(folder / "target", "qwen3", vocab_size=1021, num_hidden_layers=1, tie_word_embeddings=True)
    write_drafter(folder / "drafter", folder / "target", tap_layers=(0,), num_hidden_layers=1)
    return build(folder / "target", folder / "drafter", folder / "bundle", precisions=(Precision.FP16,), num_passes=(1,), capacity=64)


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return complete_bundle(tmp_path_factory)


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A draft model of its own, with one table for embeddings and head."""
    folder = tmp_path_factory.mktemp("drafting")
    write_target(folder / "target", "qwen3", vocab_size=1021, num_hidden_layers=1)
    write_target(folder / "draft", "llama", vocab_size=1021, num_hidden_layers=2, tie_word_embeddings=True, seed=1)
    write_drafter(folder / "drafter", folder / "target", tap_layers=(0,), num_hidden_layers=1)
    options = {"num_passes": (1,), "capacity": 64, "draft_model": folder / "draft", "draft_layers": (1,)}
    return build(folder / "target", folder / "drafter", folder / "bundle", precisions=(Precision.FP16,), **options)


@pytest.fixture(params=["tied", "tiny", "complete", "drafting"])
def built(request: pytest.FixtureRequest) -> Built:
    made = request.getfixturevalue(request.param)
    assert isinstance(made, Built)
    return made


def estimate_of(built: Built) -> Estimate:
    manifest = built.bundle.manifest
    return estimate(
        built.target.location.path,
        built.drafter.location.path,
        precisions=tuple(Precision(graph_set.precision) for graph_set in manifest.graph_sets),
        num_passes=manifest.num_passes,
        capacity=manifest.capacity,
        batch=manifest.batch,
        prefill_chunk=manifest.prefill_chunk,
        shortlists=manifest.shortlists,
        sampling=manifest.sampling,
        draft_model=None if built.draft_model is None else built.draft_model.location.path,
        draft_layers=None if built.draft_model is None else built.draft_model.layers,
    )


def test_weights_of_every_graph_are_the_built_ones(built: Built) -> None:
    sets = estimate_of(built).sets
    assert list(sets) == [graph_set.name for graph_set in built.bundle.manifest.graph_sets]
    for graph_set in built.bundle.manifest.graph_sets:
        made = sets[graph_set.name]
        assert set(made.graphs) == set(graph_set.graphs)
        outside: dict[str, int] = {}
        inside = 0
        for name, record in graph_set.graphs.items():
            tensors = onnx.load(built.bundle.folder / record.file, load_external_data=False).graph.initializer
            places = [{entry.key: entry.value for entry in tensor.external_data} for tensor in tensors]
            stored = {place["offset"]: int(place["length"]) for place in places if place}
            small = sum(len(tensor.raw_data) for tensor in tensors)
            # The exporter folds the cast of a very small table of the head, which is then stored in fp32.
            folded = made.graphs[name] if name == "head" and built.target.config.vocab_size < 100 else 0
            assert 0 <= sum(stored.values()) + small - made.graphs[name] <= SMALL_CONSTANTS + folded, (graph_set.name, name)
            outside |= stored
            inside += small
        # Small tensors that graphs share lie in each of them.
        assert sum(outside.values()) <= made.on_disk <= sum(outside.values()) + inside
        weights = built.bundle.manifest.files[f"graphs/{graph_set.name}/{WEIGHTS_FILE}"].bytes
        # Padded to whole pages.
        assert 0 <= weights - sum(outside.values()) <= 4096 * len(outside)


def test_memory_is_what_the_runtime_plans(built: Built) -> None:
    made = estimate_of(built)
    manifest = built.bundle.manifest
    for graph_set in manifest.graph_sets:
        need, planned = made.sets[graph_set.name].memory, memory_need(manifest, graph_set, batch=manifest.batch)
        assert replace(need, weights=0) == replace(planned, weights=0)


def test_what_half_precision_keeps_in_fp32(tmp_path: Path) -> None:
    hidden = QWEN3_8B["hidden_size"]
    made = estimate(*write_configs(tmp_path, QWEN3_8B))
    wide, half = made.sets["fp32-length"], made.sets["fp16-mask"]
    assert half.graphs["target"] * 2 == wide.graphs["target"]
    # fc and hidden_norm of the drafter.
    assert half.graphs["drafter"] == wide.graphs["drafter"] // 2 + 2 * (5 * hidden * hidden + hidden)
    # The table of the head, in the engine only.
    assert half.graphs["head"] * 2 == wide.graphs["head"]
    assert half.engines["head"] - half.engines["embed"] == half.graphs["head"]
    assert not wide.engines
    assert not wide.gpus


def test_tied_table_lies_on_disk_once_and_in_two_engines(tmp_path: Path) -> None:
    made = estimate(*write_configs(tmp_path, QWEN3_4B), num_passes=(4, 2), sampling=False).sets["fp16-mask"]
    table = 2 * 151936 * 2560
    assert made.graphs["embed"] == made.graphs["head"] == table
    rotary = 2 * 2 * 64 * (2048 + 128 + 16)
    shared = table + made.graphs["refiner-k2"] + rotary
    assert made.on_disk == sum(made.graphs.values()) - shared
    assert sum(made.engines.values()) > made.on_disk + shared


# GPUs.


def test_largest_capacity_fits_and_one_more_does_not(tmp_path: Path) -> None:
    configs = write_configs(tmp_path, QWEN3_8B)
    assert [gpu.largest_capacity for gpu in half(configs).gpus[:3]] == [None] * 3
    gpu = half(configs).gpus[3]
    assert (gpu.gib, gpu.fits) == (24, True)
    assert gpu.largest_capacity is not None
    room = 24 * 2**30 - GPU_RESERVE_BYTES
    fitting, larger = (half(configs, capacity=gpu.largest_capacity + more).memory for more in (0, 1))
    # With all that requests may ask for.
    assert fitting.total + fitting.on_demand.total <= room < larger.total + larger.on_demand.total
    assert not half(configs, capacity=gpu.largest_capacity + 1).gpus[3].fits
    assert half(configs, capacity=gpu.largest_capacity + 1).gpus[3].largest_capacity == gpu.largest_capacity


def test_largest_capacity_ends_with_the_positions(tmp_path: Path) -> None:
    configs = write_configs(tmp_path, QWEN3_4B)
    assert half(configs).gpus[3].largest_capacity == 40960
    fewer = half(configs, batch=8).gpus[3].largest_capacity
    assert fewer is not None
    assert fewer < 40960


def half(configs: tuple[str, str], **options: Any) -> SetEstimate:
    return estimate(*configs, precisions=(Precision.FP16,), **options).sets["fp16-mask"]


# The build.


def test_build_grows_with_the_model_and_with_what_is_built(tmp_path: Path) -> None:
    small, large = (estimate(*write_configs(tmp_path / name, sizes)) for name, sizes in (("4b", QWEN3_4B), ("8b", QWEN3_8B)))
    assert small.engine_build is not None
    assert large.engine_build is not None
    for one, other in ((small.export, large.export), (small.engine_build, large.engine_build)):
        for figure in ("peak_bytes", "seconds"):
            assert 0 < getattr(one, figure).low <= getattr(one, figure).high < getattr(other, figure).high
    alone = estimate(*write_configs(tmp_path / "alone", QWEN3_8B), precisions=(Precision.FP32,))
    assert alone.engine_build is None
    assert alone.export.peak_bytes == large.export.peak_bytes
    assert alone.export.seconds.high < large.export.seconds.high


# Layers, hidden size, heads, head dim and taps of the random models that the constants come from; then MB on an idle machine: peaks of the
# export in fp16 and fp32, and of the engine builder.
MEASURED = [
    ((12, 1024, 16, 64, True, [1, 2, 3, 4, 5]), (1256, 1296, 1510)),
    ((8, 2048, 16, 128, False, [1, 2, 3, 4, 5]), (2504, 2719, 3080)),
    ((4, 4096, 32, 128, False, [0, 1, 2, 3]), (4910, 5734, 4926)),
]


@pytest.mark.parametrize(("model", "peaks"), MEASURED, ids=["12x1024", "8x2048", "4x4096"])
def test_measured_peaks_are_within_their_spread(model: tuple[Any, ...], peaks: tuple[int, ...], tmp_path: Path) -> None:
    num_layers, hidden, heads, head_dim, tied, taps = model
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "vocab_size": 32000,
    }
    target, drafter = write_configs(tmp_path, sizes | {"tie_word_embeddings": tied})
    edit_json(Path(target) / "config.json", num_hidden_layers=num_layers)
    of_drafter = {"mask_token_id": 31999, "target_layer_ids": taps}
    edit_json(Path(drafter), num_hidden_layers=2, num_target_layers=num_layers, dflash_config=of_drafter)
    made = estimate(target, drafter, num_passes=(2,), capacity=1024)
    assert made.engine_build is not None
    for spread, measured in ((made.export, peaks[0]), (made.export, peaks[1]), (made.engine_build, peaks[2])):
        assert spread.peak_bytes.low <= 1e6 * measured <= spread.peak_bytes.high


# What is refused.


def test_refused_with_the_line_of_a_whole_checkpoint(tiny_folders: tuple[Path, Path], tmp_path: Path) -> None:
    write_target(tmp_path / "target", "qwen3")
    edit_json(tmp_path / "target/config.json", model_type="mixtral")
    with pytest.raises(CheckpointError) as whole:
        open_target(str(tmp_path / "target"))
    with pytest.raises(CheckpointError) as alone:
        estimate(tmp_path / "target", tiny_folders[1])
    assert str(alone.value) == str(whole.value)
    with pytest.raises(CheckpointError, match="is a drafter"):
        estimate(tiny_folders[1], tiny_folders[1])
    with pytest.raises(CheckpointError, match="is not a drafter"):
        estimate(tiny_folders[0], tiny_folders[0])


def test_foreign_pairs_and_options_are_refused(tiny_folders: tuple[Path, Path], tmp_path: Path) -> None:
    write_target(tmp_path / "other", "qwen3", hidden_size=TARGET_SIZES["hidden_size"] + 4)
    with pytest.raises(PairingError, match="hidden size"):
        estimate(tmp_path / "other", tiny_folders[1])
    with pytest.raises(OptionError, match="--capacity"):
        estimate(*tiny_folders, capacity=1000)


@pytest.mark.parametrize("name", ["weights.gguf", "model.safetensors", "missing.json", "empty"])
def test_only_configs_are_read(name: str, tiny_folders: tuple[Path, Path], tmp_path: Path) -> None:
    if "." in name and "missing" not in name:
        (tmp_path / name).touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="config") as caught:
        estimate(tmp_path / name, tiny_folders[1])
    assert "\n" not in str(caught.value)


# The hub.


def test_of_a_hub_checkpoint_the_config_alone_is_fetched(tiny_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    patterns = []

    def download(hub_id: str, **options: Any) -> str:
        patterns.append(options["allow_patterns"])
        return str(tiny_folders[hub_id == "org/drafter"])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    estimate("org/target", "org/drafter")
    assert patterns == [["config.json"]] * 2


def test_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(hub_id: str, **options: Any) -> str:  # noqa: ARG001
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(EnvironmentProblem, match="org/target") as caught:
        estimate("org/target", "org/drafter")
    assert "\n" not in str(caught.value)
