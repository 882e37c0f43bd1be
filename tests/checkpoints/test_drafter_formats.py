"""Drafters of every published format: each is read as the same drafter, and survives a conversion to the serving format bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests import layouts
from tests.checkpoints.same import assert_same
from tests.checkpoints.test_conformance import CASES, DATA
from tests.tiny import edit_json, write_drafter
from xpress_export.checkpoints import check_pairing, open_drafter, open_target
from xpress_export.convert import convert_drafter
from xpress_runtime.errors import CheckpointError

Write = Callable[[Path, Path], Path]


def _folder(write: Callable[..., None], **options: Any) -> Write:
    def wrote(source: Path, folder: Path) -> Path:
        write(source, folder, **options)
        return folder

    return wrote


def _file(**options: Any) -> Write:
    def wrote(source: Path, folder: Path) -> Path:
        layouts.training_checkpoint(source, folder / "step.pt", **options)
        # Else the usual number of passes is taken.
        edit_json(folder / "config.json", xpress_num_passes=layouts.read_config(source)["xpress_num_passes"])
        return folder / "step.pt"

    return wrote


def _training_folder(source: Path, folder: Path) -> Path:
    return _file()(source, folder).parent


LAYOUTS: dict[str, tuple[str, Write]] = {
    "serving": ("xPress serving format", lambda source, _folder: source),
    "flat": ("xPress serving format", _folder(layouts.flat_config)),
    "speculators": ("speculators xpress", _folder(layouts.speculators)),
    "speculators-sharded": ("speculators xpress", _folder(layouts.speculators, shards=3)),
    "training": ("training checkpoint", _file()),
    "training-folder": ("training checkpoint", _training_folder),
    "training-parallel": ("training checkpoint", _file(parallel=True)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_xpress(layout: str, case: str, tmp_path: Path) -> None:
    named, write = LAYOUTS[layout]
    source = DATA / case / "xpress"
    reference = open_drafter(str(source))
    drafter = open_drafter(str(write(source, tmp_path / "given")))
    assert drafter.format == named
    assert_same(drafter, reference)
    check_pairing(open_target(str(DATA / case / "target")), drafter)
    conversion = convert_drafter(drafter, tmp_path / "converted")
    converted = open_drafter(str(tmp_path / "converted"))
    assert converted.format == "xPress serving format"
    assert_same(converted, reference)
    assert converted.config == drafter.config
    assert converted.identity() == drafter.identity() == conversion.identity
    # Whatever says the number of target layers is the same checkpoint as the original.
    assert (converted.identity() == reference.identity()) == (drafter.config == reference.config)
    assert load_file(tmp_path / "converted/model.safetensors").keys() == load_file(source / "model.safetensors").keys()


@pytest.mark.parametrize("case", CASES)
def test_dflash_of_speculators(case: str, tmp_path: Path) -> None:
    source = DATA / case / "dflash"
    layouts.speculators(source, tmp_path / "given")
    drafter = open_drafter(str(tmp_path / "given"))
    assert drafter.format == "speculators dflash"
    assert_same(drafter, open_drafter(str(source)))
    convert_drafter(drafter, tmp_path / "converted")
    converted = open_drafter(str(tmp_path / "converted"))
    assert converted.format == "bare DFlash"
    assert_same(converted, drafter)
    assert converted.identity() == drafter.identity()


def test_dspark_of_speculators(drafters: Path, tmp_path: Path) -> None:
    layouts.speculators(drafters / "markov", tmp_path / "given")
    drafter = open_drafter(str(tmp_path / "given"))
    assert drafter.format == "speculators dspark"
    assert_same(drafter, open_drafter(str(drafters / "markov")))
    convert_drafter(drafter, tmp_path / "converted")
    converted = open_drafter(str(tmp_path / "converted"))
    assert (converted.format, converted.head_rank) == ("DFlash with a Markov head", 8)
    assert_same(converted, drafter)
    assert converted.identity() == drafter.identity()


def test_sizes_that_speculators_leaves_out_are_transformers_own() -> None:
    from transformers import Qwen3Config

    from xpress_export.checkpoints.formats.speculators import QWEN3_SIZES

    theirs = Qwen3Config().to_dict()
    assert {name: theirs[name] for name in QWEN3_SIZES} == QWEN3_SIZES


def test_left_out_sizes_and_fields(drafters: Path, tmp_path: Path) -> None:
    """What equals the library's defaults may be absent; here the vocabulary does not, and is asked for as Qwen3's."""
    layouts.speculators(
        drafters / "xpress", tmp_path, sizes={"model_type": ..., "layer_types": ..., "vocab_size": ...}, draft_vocab_size=...
    )
    with pytest.raises(CheckpointError, match=r"refiner_head.token_embed.weight' has shape \[61, 8\], config.json asks for \[151936, 8\]"):
        open_drafter(str(tmp_path))
    layouts.speculators(drafters / "xpress", tmp_path, sizes={"model_type": ..., "layer_types": ...}, draft_vocab_size=...)
    assert_same(open_drafter(str(tmp_path)), open_drafter(str(drafters / "xpress")))


def test_defaults_of_speculators(drafters: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_drafter(tmp_path / "xpress", drafters / "target", block_size=8, rank=256, xpress_num_passes=6)
    absent: dict[str, Any] = dict.fromkeys(
        ("block_size", "xpress_rank", "xpress_mlp_ratio", "num_jacobi_passes", "sample_from_anchor"), ...
    )
    layouts.speculators(tmp_path / "xpress", tmp_path / "given", **absent)
    assert_same(open_drafter(str(tmp_path / "given")), open_drafter(str(tmp_path / "xpress")))
    edit_json(tmp_path / "given/config.json", num_jacobi_passes=12)
    with caplog.at_level("INFO", "xpress_export"):
        drafter = open_drafter(str(tmp_path / "given"))
    assert drafter.refiner is not None
    assert drafter.refiner.num_passes == 7
    assert "num_jacobi_passes is 12" in caplog.text


# Windows, factors and who stands before the anchor.


@pytest.mark.parametrize("non_causal", [False, True])
def test_windows_of_speculators(non_causal: bool, drafters: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"is_causal": False} if non_causal else {}
    kinds = ["sliding_attention", "full_attention"]
    write_drafter(tmp_path / "own", drafters / "target", use_sliding_window=True, sliding_window=5, layer_types=kinds, **options)
    layouts.speculators(tmp_path / "own", tmp_path / "given")
    drafter = open_drafter(str(tmp_path / "given"))
    assert [(layer.window, layer.causal) for layer in drafter.config.backbone.layers] == [(5, not non_causal), (None, False)]
    assert_same(drafter, open_drafter(str(tmp_path / "own")))
    convert_drafter(drafter, tmp_path / "converted")
    assert_same(open_drafter(str(tmp_path / "converted")), drafter)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_rotary_embeddings_of_speculators(kind: str, drafters: Path, tmp_path: Path) -> None:
    """In the layout of today's transformers, where the base stands among the parameters."""
    rope: dict[str, Any] = {"rope_type": kind, "factor": 4.0, "rope_theta": 5e5}
    if kind != "linear":
        rope["original_max_position_embeddings"] = 32
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    write_drafter(tmp_path / "own", drafters / "target", rope_theta=5e5, rope_parameters=rope)
    layouts.speculators(tmp_path / "own", tmp_path / "given", sizes={"rope_theta": ..., "rope_parameters": rope})
    drafter = open_drafter(str(tmp_path / "given"))
    assert_same(drafter, open_drafter(str(tmp_path / "own")))
    convert_drafter(drafter, tmp_path / "converted")
    converted = open_drafter(str(tmp_path / "converted"))
    assert_same(converted, drafter)
    assert converted.config.backbone.layers[0].rope is not None
    assert converted.config.backbone.layers[0].rope.rope_type == kind


@pytest.mark.parametrize("nested", [True, False])
def test_factors(nested: bool, drafters: Path, tmp_path: Path) -> None:
    shutil.copytree(drafters / "xpress", tmp_path / "given")
    own = {"input_embedding_scale": 6.5, "output_multiplier": 0.25, "final_logit_softcapping": 30.0, "anchor_predecessor": "anchor"}
    own["enable_thinking"] = True
    config = layouts.read_config(tmp_path / "given")
    layouts.write_config(tmp_path / "given", {**config, "dflash_config": config["dflash_config"] | own} if nested else config | own)
    drafter = open_drafter(str(tmp_path / "given"))
    backbone = drafter.config.backbone
    assert (backbone.embedding_scale, backbone.logit_scale, backbone.logit_cap) == (6.5, 0.25, 30.0)
    assert drafter.refiner is not None
    assert drafter.refiner.anchor_predecessor == "anchor"
    assert drafter.trained_with_thinking is True
    plain = open_drafter(str(drafters / "xpress"))
    assert plain.refiner is not None
    assert plain.refiner.anchor_predecessor == "previous"
    assert plain.config.backbone.logit_cap is None
    assert plain.identity() != drafter.identity()
    convert_drafter(drafter, tmp_path / "converted", anchor_predecessor="previous", num_passes=1)
    converted = open_drafter(str(tmp_path / "converted"))
    assert converted.config == drafter.config
    assert converted.refiner is not None
    assert (converted.refiner.anchor_predecessor, converted.refiner.num_passes) == ("previous", 1)
    edit_json(tmp_path / "given/config.json", final_logit_softcapping=0 if not nested else 30.0)
    assert open_drafter(str(tmp_path / "given")).config.backbone.logit_cap == (30.0 if nested else None)


@pytest.mark.parametrize("value", [True, False])
def test_is_causal_holds_for_all_layers(value: bool, drafters: Path, tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    write_drafter(tmp_path, drafters / "target", use_sliding_window=True, sliding_window=5, layer_types=kinds, is_causal=value)
    assert [layer.causal for layer in open_drafter(str(tmp_path)).config.backbone.layers] == [value, value]


def test_taps_without_the_number_of_target_layers(drafters: Path, tmp_path: Path) -> None:
    shutil.copytree(drafters / "dflash", tmp_path / "given")
    edit_json(tmp_path / "given/config.json", num_target_layers=..., xpress_fused_kernel=True)
    drafter = open_drafter(str(tmp_path / "given"))
    assert (drafter.config.num_target_layers, drafter.config.tap_layers) == (None, (0, 1))
    check_pairing(open_target(str(drafters / "target")), drafter)
