"""Damaged weights, and shards that contradict their index: refused in one line that names the file or the tensor."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints.spoil import assert_refused, edit_index, tensors
from tests.tiny import edit_json
from xpress_export.checkpoints import open_drafter, open_target
from xpress_runtime.errors import CheckpointError
from xpress_runtime.sets import AttentionForm


@pytest.mark.parametrize("size", [0, 4, 8, 100, -1000, -1])
def test_truncated(size: int, copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:size])
    assert_refused(lambda: open_target(str(folder)), "model.safetensors", "fetch it again")


def test_longer_than_its_header_says(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"x")
    assert_refused(lambda: open_target(str(folder)), "model.safetensors", "fetch it again")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with a name")
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors", "README.md"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(name: str, copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    if name == "README.md":
        assert open_target(str(folder)).licence is None
    else:
        assert_refused(lambda: open_target(str(folder)), name)


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**63, 2**64 - 1])
def test_absurd_header_length(length: int, copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    assert_refused(lambda: open_target(str(folder)), "model.safetensors", "fetch it again")


def test_any_flipped_header_bit_is_noticed(copy: Callable[[str], Path]) -> None:
    """Damage in the header changes a name, a shape, a dtype or the syntax; offsets that still fit together are all that may pass."""
    folder = copy("llama")
    path = folder / "model.safetensors"
    content = path.read_bytes()
    header_end = 8 + struct.unpack("<Q", content[:8])[0]
    metadata_end = content.index(b"}", content.index(b"__metadata__"))
    generator = random.Random(0)
    noticed = 0
    for _ in range(150):
        spoilt = bytearray(content)
        spoilt[generator.randrange(metadata_end, header_end - 8)] ^= 1 << generator.randrange(8)
        path.write_bytes(spoilt)
        try:
            open_target(str(folder))
        except CheckpointError as problem:
            assert "\n" not in str(problem)
            noticed += 1
    assert noticed >= 148


def test_flipped_exponent(copy: Callable[[str], Path]) -> None:
    """A value from 1 to 2 whose highest exponent bit flips becomes an infinity or a NaN."""
    name = "model.layers.1.mlp.down_proj.weight"
    folder = copy("llama")
    path = folder / "model.safetensors"
    for value, spoilt in ((1.0, float("inf")), (1.5, float("nan")), (-1.0, float("-inf"))):
        held = load_file(path)
        held[name][3, 5] = value
        bits = held[name].view(torch.int32)
        bits[3, 5] ^= 1 << 30
        assert held[name][3, 5].item() == spoilt or value == 1.5
        save_file(held, path)
        target = open_target(str(folder))
        target.embedding()
        assert_refused(partial(target.decoder, (0,), 8, AttentionForm.MASK), str(path), f"'{name}'", "not finite")


@pytest.mark.parametrize("name", ["fc.weight", "xpress_head.mix.L", "xpress_head.in_proj.weight"])
def test_not_finite_in_a_drafter(name: str, copy: Callable[[str], Path]) -> None:
    folder = copy("xpress")
    tensors(**{name.replace(".", "__"): lambda t: torch.full_like(t, float("nan"))})(folder)
    drafter = open_drafter(str(folder))

    def read() -> None:
        drafter.drafter(8, AttentionForm.MASK)
        drafter.refiner_module()

    assert_refused(read, name, "not finite")


# Shards.


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def test_shard_missing(copy: Callable[[str], Path]) -> None:
    folder = copy("sharded")
    shards(folder)[1].unlink()
    assert_refused(lambda: open_target(str(folder)), shards(folder)[0].name.replace("00001-of", "00002-of"), "missing")


def test_tensor_not_in_its_shard(copy: Callable[[str], Path]) -> None:
    folder = copy("sharded")
    held = {name for path in shards(folder)[:1] for name in load_file(path)}
    name = next(iter(held))
    edit_index(folder, **{name.replace(".", "__"): shards(folder)[1].name})
    assert_refused(lambda: open_target(str(folder)), f"'{name}'", shards(folder)[0].name, shards(folder)[1].name)


def test_tensor_in_no_shard_and_not_in_the_index(copy: Callable[[str], Path]) -> None:
    folder = copy("sharded")
    edit_index(folder, ghost__weight=shards(folder)[0].name)
    assert_refused(lambda: open_target(str(folder)), "'ghost.weight'", "no shard has it")
    edit_index(folder, ghost__weight=..., model__norm__weight=...)
    assert_refused(lambda: open_target(str(folder)), "'model.norm.weight'", "not in the index")


def test_tensor_in_two_shards(copy: Callable[[str], Path]) -> None:
    folder = copy("sharded")
    first, second = shards(folder)[:2]
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: tensor}, second)
    assert_refused(lambda: open_target(str(folder)), f"'{name}'", first.name, second.name)


@pytest.mark.parametrize(
    "shard", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "", "..", ".", "a\\b", "a\0b", "config.json", 3, None]
)
def test_shard_outside_the_folder(shard: object, copy: Callable[[str], Path]) -> None:
    folder = copy("sharded")
    edit_index(folder, model__norm__weight=shard)
    assert_refused(lambda: open_target(str(folder)), "model.norm.weight", "index.json")


def test_index_without_a_map(copy: Callable[[str], Path]) -> None:
    folder = copy("sharded")
    edit_json(folder / "model.safetensors.index.json", weight_map=...)
    assert_refused(lambda: open_target(str(folder)), "weight_map", "missing")
    edit_json(folder / "model.safetensors.index.json", weight_map={})
    assert_refused(lambda: open_target(str(folder)), "weight_map", "empty")


def test_two_sets_of_weights(copy: Callable[[str], Path], originals: Path) -> None:
    folder = copy("sharded")
    (folder / "model.safetensors").write_bytes((originals / "llama/model.safetensors").read_bytes())
    assert_refused(lambda: open_target(str(folder)), "model.safetensors.index.json", "stale")
