"""What a target checkpoint offers beside its numbers: tied tables, stop tokens, licence, identity, tolerated extras."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import edit_json, write_target
from xpress_export.checkpoints import open_target
from xpress_export.checkpoints.decoder_config import FAMILIES, READ_FIELDS, refuse_misspelled
from xpress_runtime.errors import CheckpointError
from xpress_runtime.fields import Fields
from xpress_runtime.sets import AttentionForm


def add_tensors(folder: Path, **tensors: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | {name.replace("__", "."): tensor for name, tensor in tensors.items()}, path)


def test_tied_tables_are_one_tensor(tmp_path: Path) -> None:
    write_target(tmp_path, tie_word_embeddings=True)
    target = open_target(str(tmp_path))
    embedding, head = target.embedding(), target.head()
    assert head.table is embedding.table


def test_a_converted_table_is_not_handed_out_again(tmp_path: Path) -> None:
    write_target(tmp_path, tie_word_embeddings=True)
    target = open_target(str(tmp_path))
    embedding = target.embedding()
    embedding.half()
    assert target.head().table.dtype == torch.float32
    assert embedding.table.dtype == torch.float16


def test_separate_tables_differ(tmp_path: Path) -> None:
    write_target(tmp_path)
    target = open_target(str(tmp_path))
    assert not torch.equal(target.head().table, target.embedding().table)


def test_nothing_is_on_meta_and_nothing_trains(tmp_path: Path) -> None:
    write_target(tmp_path, attention_bias=True)
    target = open_target(str(tmp_path))
    for module in (target.embedding(), target.head(), target.decoder((0,), 16, AttentionForm.MASK)):
        assert all(tensor.device.type == "cpu" for tensor in module.state_dict().values())
        assert all(buffer.device.type == "cpu" for buffer in module.buffers())
        assert not any(parameter.requires_grad for parameter in module.parameters())


def test_copy_of_a_tied_head_is_allowed_and_another_refused(tmp_path: Path) -> None:
    model = write_target(tmp_path, tie_word_embeddings=True)
    table = model.model.embed_tokens.weight.detach().clone()
    add_tensors(tmp_path, lm_head__weight=table)
    assert torch.equal(open_target(str(tmp_path)).head().table, table)
    table[3, 5] += 1
    add_tensors(tmp_path, lm_head__weight=table)
    target = open_target(str(tmp_path))
    target.embedding()
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' differs from 'model\.embed_tokens\.weight'"):
        target.head()


def test_old_rotary_buffers_are_allowed(tmp_path: Path) -> None:
    write_target(tmp_path)
    add_tensors(tmp_path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(6), model__rotary_emb__inv_freq=torch.ones(6))
    open_target(str(tmp_path))


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [(None, 7, (7,)), ([7, 9], 1, (7, 9)), (4, 7, (4,)), (..., [1, 2], (1, 2)), (None, None, ()), (..., ..., ())],
)
def test_stop_tokens(generation: Any, config: Any, expected: tuple[int, ...], tmp_path: Path) -> None:
    write_target(tmp_path)
    edit_json(tmp_path / "config.json", eos_token_id=config)
    if generation is ...:
        (tmp_path / "generation_config.json").unlink()
    else:
        edit_json(tmp_path / "generation_config.json", eos_token_id=generation)
    assert open_target(str(tmp_path)).eos_token_ids == expected


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("README.md", "---\nlanguage: en\nlicense: apache-2.0  # yes\n---\n# Model\n", "apache-2.0"),
        ("README.md", "---\nlicense: other\nlicense_name: llama3\n---\n", "llama3"),
        ("README.md", "---\nlicense: other\n---\n", "other"),
        ("README.md", "# Model\nlicense: mit\n", None),
        ("LICENSE", "\n          Apache License\n    Version 2.0\n", "apache-2.0"),
        ("LICENSE.txt", "LLAMA 3.1 COMMUNITY LICENSE AGREEMENT\n", "LLAMA 3.1 COMMUNITY LICENSE AGREEMENT"),
        ("notes.txt", "MIT License", None),
    ],
)
def test_licence(name: str, text: str, expected: str | None, tmp_path: Path) -> None:
    write_target(tmp_path)
    (tmp_path / name).write_text(text)
    assert open_target(str(tmp_path)).licence == expected


def test_identity_follows_config_and_values_only(tmp_path: Path) -> None:
    for name in ("one", "same", "other-values", "other-config"):
        write_target(tmp_path / name, seed=name == "other-values")
    edit_json(tmp_path / "same/config.json", transformers_version="4.0", use_cache=False)
    edit_json(tmp_path / "other-config/config.json", rms_norm_eps=1e-5)
    identities = {name: open_target(str(tmp_path / name)).identity() for name in ("one", "same", "other-values", "other-config")}
    assert identities["one"] == identities["same"]
    assert len(set(identities.values())) == 3
    assert len(identities["one"]) == 64


def test_unknown_fields_are_ignored(tmp_path: Path) -> None:
    write_target(tmp_path)
    edit_json(tmp_path / "config.json", unsloth_version="2024.9", my_note={"a": 1}, auto_map={"AutoTokenizer": "x.Y"})
    open_target(str(tmp_path))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_no_field_of_transformers_looks_misspelled(model_type: str) -> None:
    """Every field of the config class, among them ones that we ignore, beside as little as possible of what we read."""
    from transformers import AutoConfig

    names = set(AutoConfig.for_model(model_type).to_dict()) | {
        "bos_token_id",
        "pad_token_id",
        "sep_token_id",
        "unk_token_id",
        "cls_token_id",
    }
    for name in names - READ_FIELDS:
        refuse_misspelled(Fields({name: 1}, "config.json", CheckpointError), READ_FIELDS)
