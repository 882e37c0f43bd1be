"""Drafter folders with a Markov head: which are read, as what, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import edit_json, write_drafter, write_markov_drafter, write_target
from xpress_export.checkpoints import DrafterCheckpoint, open_drafter, open_pair
from xpress_export.checkpoints.config_only import open_pair_configs
from xpress_export.models.markov import MarkovConfig, MarkovHead
from xpress_export.models.refiner import Refiner
from xpress_runtime.errors import CheckpointError

W1, W2 = "markov_w1.weight", "markov_w2.weight"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("markov") / "target"
    write_target(folder, "qwen3")
    return folder


def assert_head(drafter: DrafterCheckpoint, tensors: dict[str, torch.Tensor], prefix: str = "") -> None:
    assert (drafter.head, drafter.head_rank, drafter.refiner) == ("markov", 8, None)
    assert drafter.markov == MarkovConfig(vocab_size=61, rank=8, block_size=4)
    module = drafter.refiner_module()
    assert isinstance(module, MarkovHead)
    assert torch.equal(module.w1, tensors[prefix + W1])
    assert torch.equal(module.w2, tensors[prefix + W2])
    assert not any(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize("states_rank", [True, False])
@pytest.mark.parametrize("prefix", ["", "markov_head."])
def test_dflash_with_a_head(prefix: str, states_rank: bool, target: Path, tmp_path: Path) -> None:
    tensors = write_markov_drafter(tmp_path, target, prefix=prefix, states_rank=states_rank)
    _, drafter = open_pair(str(target), str(tmp_path))
    assert_head(drafter, tensors, prefix)
    if states_rank:
        _, described = open_pair_configs(str(target), str(tmp_path))
        assert described.markov == drafter.markov


@pytest.mark.parametrize("architecture", ["Qwen3DSparkModel", "DSparkDraftModel"])
def test_dspark(architecture: str, target: Path, tmp_path: Path) -> None:
    tensors = write_markov_drafter(
        tmp_path, target, architectures=[architecture], sample_from_anchor=False, markov_head_type="vanilla", prefix="markov_head."
    )
    assert_head(open_drafter(str(tmp_path)), tensors, "markov_head.")


def test_heads_of_other_drafters(target: Path, tmp_path: Path) -> None:
    write_drafter(tmp_path / "xpress", target)
    write_drafter(tmp_path / "dflash", target, refiner=False)
    write_drafter(tmp_path / "rank-0", target, refiner=False, markov_rank=0)
    xpress, dflash, without = (open_drafter(str(tmp_path / name)) for name in ("xpress", "dflash", "rank-0"))
    assert (xpress.head, xpress.head_rank, xpress.markov) == ("xpress", 8, None)
    assert isinstance(xpress.refiner_module(), Refiner)
    for bare in (dflash, without):
        assert (bare.head, bare.head_rank, bare.markov, bare.refiner) == (None, None, None, None)


def test_identity_follows_the_head(target: Path, tmp_path: Path) -> None:
    write_drafter(tmp_path / "bare", target, refiner=False)
    for name, options in (("one", {}), ("same", {}), ("other", {"rank": 9})):
        write_markov_drafter(tmp_path / name, target, **options)
    edit_json(tmp_path / "same/config.json", transformers_version="4.0", markov_rank=...)
    identities = {name: open_drafter(str(tmp_path / name)).identity() for name in ("bare", "one", "same", "other")}
    assert identities["one"] == identities["same"]
    assert len(set(identities.values())) == 3


# What is refused.


def fields(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", **changes)


def tensors(**changes: Any) -> Callable[[Path], None]:
    """Replace tensors (dots written as __), or drop them (...)."""

    def change(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        for key, value in changes.items():
            name = key.replace("__", ".")
            held = {other: tensor for other, tensor in held.items() if other != name} | ({} if value is ... else {name: value})
        save_file(held, folder / "model.safetensors")

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (fields(markov_rank=9), (f"'{W1}'", "[61, 8]", "[61, 9]")),
        (fields(markov_rank=0), (f"'{W1}', '{W2}'", "not part")),
        *[(fields(markov_rank=value), ("markov_rank",)) for value in (-1, 2**17, 8.0, "8", True)],
        (fields(markov_head_type="gated"), ("markov_head_type", "gated", "vanilla")),
        (fields(markov_rnak=8, markov_rank=...), ("markov_rnak", "did you mean 'markov_rank'")),
        (fields(sample_from_anchor=True), ("sample_from_anchor", "true")),
        (fields(xpress_rank=8), ("DFlashDraftModel", "no refiner", "xpress_rank")),
        (fields(architectures=["Qwen3DSparkModel"]), ("Qwen3DSparkModel", "anchor's slot", "sample_from_anchor")),
        (
            fields(architectures=["DSparkDraftModel"], sample_from_anchor=False, markov_rank=...),
            ("markov_rank", "missing"),
        ),
        (tensors(markov_w1__weight=...), (f"'{W1}' is missing",)),
        (tensors(markov_w2__weight=...), (f"'{W2}' is missing",)),
        (tensors(markov_w2__weight=torch.ones(60, 8)), (f"'{W2}'", "[60, 8]", "[61, 8]")),
        (tensors(markov_w2__weight=torch.ones(61)), (f"'{W2}'", "[61]", "[61, 8]")),
        # Half under one prefix, half under the other.
        (tensors(markov_w2__weight=..., markov_head__markov_w2__weight=torch.ones(61, 8)), (f"'{W2}' is missing",)),
        (tensors(markov_head__gate_proj__weight=torch.ones(8, 48)), ("'markov_head.gate_proj.weight'", "not part")),
        (tensors(confidence_head__proj__weight=torch.ones(1, 40)), ("'confidence_head.proj.weight'", "not part")),
    ],
)
def test_spoilt_folder(change: Callable[[Path], None], named: tuple[str, ...], target: Path, tmp_path: Path) -> None:
    write_markov_drafter(tmp_path, target)
    open_drafter(str(tmp_path))
    change(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        open_drafter(str(tmp_path))
    assert "\n" not in str(caught.value)
    for name in named:
        assert name in str(caught.value)


def test_a_refiner_has_no_second_head(target: Path, tmp_path: Path) -> None:
    write_drafter(tmp_path, target)
    fields(markov_rank=8)(tmp_path)
    with pytest.raises(CheckpointError, match="Qwen3XPressModel has no Markov head, but field 'markov_rank' is given"):
        open_drafter(str(tmp_path))
    fields(markov_rank=...)(tmp_path)
    tensors(markov_w1__weight=torch.ones(61, 8), markov_w2__weight=torch.ones(61, 8))(tmp_path)
    with pytest.raises(CheckpointError, match="not part of the model"):
        open_drafter(str(tmp_path))


@pytest.mark.parametrize("table", [torch.ones(61), torch.ones(61, 8, 1), torch.ones(())])
def test_tables_that_are_no_tables_without_a_stated_rank(table: torch.Tensor, target: Path, tmp_path: Path) -> None:
    write_markov_drafter(tmp_path, target, states_rank=False)
    tensors(markov_w1__weight=table)(tmp_path)
    with pytest.raises(CheckpointError, match=f"'{W1}'"):
        open_drafter(str(tmp_path))


def test_not_finite(target: Path, tmp_path: Path) -> None:
    write_markov_drafter(tmp_path, target)
    tensors(markov_w2__weight=torch.full((61, 8), torch.nan))(tmp_path)
    drafter = open_drafter(str(tmp_path))
    with pytest.raises(CheckpointError, match=f"'{W2}' holds values that are not finite"):
        drafter.refiner_module()
