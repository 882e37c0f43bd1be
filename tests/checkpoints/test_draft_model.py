"""Autoregressive drafters: layers of the target or another model, against transformers; and whether the tokenizer is the target's."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer
from torch import Tensor, nn

from tests.checkpoints.replay import NUM_POSITIONS, empty_caches
from tests.models.close import assert_close
from tests.runtime.tiny_tokenizers import byte_level, llama_like
from tests.tiny import write_target
from xpress_export.checkpoints import DraftModelCheckpoint, TargetCheckpoint, open_draft_model, open_target
from xpress_runtime.errors import CheckpointError, OptionError, PairingError, XpressError
from xpress_runtime.sets import AttentionForm

# Four layers in fp32, two implementations.
TOLERANCE = 1e-5

NUM_LAYERS = 4


def draft_logits(model: DraftModelCheckpoint, ids: list[int], sizes: Sequence[int], form: AttentionForm) -> Tensor:
    """Logits [S, V] of ids that go through the drafter's three modules in chunks."""
    embedding, decoder, head = model.embedding(), model.decoder(NUM_POSITIONS, form), model.head()
    keys, values = empty_caches(model.config), empty_caches(model.config)
    logits, position = [], 0
    for size in sizes:
        embeddings = embedding(torch.tensor([ids[position : position + size]]))
        hidden, keys, values = decoder(embeddings, torch.tensor([position]), keys, values)
        logits.append(head(hidden, torch.arange(size)[None])[0][0])
        position += size
    return torch.cat(logits)


@pytest.mark.parametrize("form", AttentionForm)
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("layers", [None, (0,), (0, 3), (0, 1, 3), (2, 0)])
def test_layers_of_the_target_equal_a_model_of_these_layers(
    layers: tuple[int, ...] | None, model_type: str, form: AttentionForm, tmp_path: Path
) -> None:
    whole = write_target(tmp_path, model_type, num_hidden_layers=NUM_LAYERS)
    model = open_draft_model(None, None, layers, open_target(str(tmp_path)))
    chosen = tuple(range(NUM_LAYERS)) if layers is None else layers
    assert model.layers == chosen
    assert model.config.num_layers == len(chosen)
    assert len(model.decoder(8, form).decoder.layers) == len(chosen)
    whole.model.layers = nn.ModuleList(whole.model.layers[layer] for layer in chosen)
    ids = [5, 9, 2, 2, 40, 17, 60, 3]
    with torch.no_grad():
        expected = whole(torch.tensor([ids]), use_cache=False).logits[0]
    assert_close(draft_logits(model, ids, (5, 1, 2), form), expected, TOLERANCE)


@pytest.mark.parametrize("tied", [True, False])
def test_another_model(tied: bool, tmp_path: Path) -> None:
    """Of another family, width and head; only the vocabulary is the target's."""
    write_target(tmp_path / "target", "qwen3")
    other = write_target(tmp_path / "draft", "llama", hidden_size=24, num_hidden_layers=2, tie_word_embeddings=tied, seed=5)
    model = open_draft_model(str(tmp_path / "draft"), None, (1,), open_target(str(tmp_path / "target")))
    other.model.layers = nn.ModuleList([other.model.layers[1]])
    with torch.no_grad():
        expected = other(torch.tensor([[1, 2, 3]]), use_cache=False).logits[0]
    assert_close(draft_logits(model, [1, 2, 3], (3,), AttentionForm.LENGTH), expected, TOLERANCE)
    assert not model.shares_tables
    assert model.location.source == str(tmp_path / "draft")
    assert (model.head().table is model.embedding().table) == tied


def test_the_target_itself_shares_its_tables(tmp_path: Path) -> None:
    write_target(tmp_path)
    target = open_target(str(tmp_path))
    for reference in (None, str(tmp_path), f"{tmp_path}/../{tmp_path.name}"):
        model = open_draft_model(reference, None, (0, 1), target)
        assert model.shares_tables
        assert model.model is target
        assert torch.equal(model.embedding().table, target.embedding().table)


def test_identity_follows_model_and_layers(tmp_path: Path) -> None:
    write_target(tmp_path / "one")
    write_target(tmp_path / "other", seed=1)
    target = open_target(str(tmp_path / "one"))

    def identity(reference: str | None, layers: Sequence[int] | None) -> str:
        return open_draft_model(reference, None, layers, target).identity()

    different = [identity(None, None), identity(None, (0, 2)), identity(None, (0, 1)), identity(str(tmp_path / "other"), (0, 1))]
    assert len(set(different)) == 4
    assert identity(None, (0, 1, 2)) == identity(None, None)
    assert target.identity() not in different


def test_licence_is_the_models_own(tmp_path: Path) -> None:
    for name, licence in (("target", "mit"), ("draft", "apache-2.0")):
        write_target(tmp_path / name)
        (tmp_path / name / "README.md").write_text(f"---\nlicense: {licence}\n---\n")
    target = open_target(str(tmp_path / "target"))
    assert open_draft_model(None, None, (0,), target).licence == "mit"
    assert open_draft_model(str(tmp_path / "draft"), None, None, target).licence == "apache-2.0"


# What is refused.


def assert_refused(error: type[XpressError], named: Sequence[str], *arguments: Any) -> None:
    with pytest.raises(error) as caught:
        open_draft_model(*arguments)
    assert str(caught.value).isprintable()
    for name in named:
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("layers", "named"),
    [((), ("no layer",)), ((0, 3), ("layer 3",)), ((-1,), ("layer -1",)), ((1, 0, 1), ("layer 1", "twice"))],
)
def test_layers_that_the_model_does_not_have(layers: tuple[int, ...], named: tuple[str, ...], tmp_path: Path) -> None:
    write_target(tmp_path)
    target = open_target(str(tmp_path))
    assert_refused(OptionError, (*named, "0 to 2", str(tmp_path)), None, None, layers, target)


def test_a_revision_needs_a_model(tmp_path: Path) -> None:
    write_target(tmp_path)
    assert_refused(OptionError, ("revision 'main'",), None, "main", None, open_target(str(tmp_path)))


def test_a_model_that_is_not_read(tmp_path: Path) -> None:
    write_target(tmp_path / "target")
    target = open_target(str(tmp_path / "target"))
    assert_refused(CheckpointError, ("nowhere", "does not exist"), str(tmp_path / "nowhere"), None, None, target)


# Tokenizers.


def with_tokenizer(folder: Path, tokenizer: Tokenizer | None, *, rows: int | None = None, **overrides: Any) -> TargetCheckpoint:
    """A checkpoint with a tokenizer, and ``rows`` of its table."""
    size = tokenizer.get_vocab_size() if tokenizer is not None else 61
    write_target(folder, vocab_size=rows or size, num_hidden_layers=1, **overrides)
    if tokenizer is not None:
        (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}), encoding="utf-8")
    return open_target(str(folder))


def renamed(tokenizer: Tokenizer, token: str, name: str) -> Tokenizer:
    """The same ids, one of them with another token."""
    return Tokenizer.from_str(tokenizer.to_str().replace(json.dumps(token, ensure_ascii=False), json.dumps(name)))


@pytest.mark.parametrize("rows", [-7, 0, 13])
@pytest.mark.parametrize("bos", [False, True])
def test_the_same_tokenizer_with_a_table_of_another_size(rows: int, bos: bool, tmp_path: Path) -> None:
    """Tables are padded differently, and which tokens stand around a prompt is the target's business."""
    target = with_tokenizer(tmp_path / "target", byte_level(), rows=500)
    with_tokenizer(tmp_path / "draft", byte_level(bos=bos), rows=500 + rows)
    model = open_draft_model(str(tmp_path / "draft"), None, None, target)
    assert model.embedding().table.shape[0] == model.head().table.shape[0] == model.config.vocab_size == 500 + rows
    assert model.embedding()(torch.tensor([[499]])).shape == (1, 1, 40)


def test_another_tokenizer(tmp_path: Path) -> None:
    target = with_tokenizer(tmp_path / "target", byte_level())
    with_tokenizer(tmp_path / "draft", llama_like())
    assert_refused(PairingError, ("different tokenizers", "draft", "target", "tokens differ"), str(tmp_path / "draft"), None, None, target)


def test_one_token_with_another_id(tmp_path: Path) -> None:
    target = with_tokenizer(tmp_path / "target", byte_level())
    with_tokenizer(tmp_path / "draft", renamed(byte_level(), "<think>", "<thought>"))
    think = byte_level().token_to_id("<think>")
    assert_refused(PairingError, (f"'<think>' has no id and id {think}", "2 tokens"), str(tmp_path / "draft"), None, None, target)


def test_one_token_more(tmp_path: Path) -> None:
    target = with_tokenizer(tmp_path / "target", byte_level())
    larger = byte_level()
    larger.add_tokens([AddedToken("<more\n>")])
    with_tokenizer(tmp_path / "draft", larger)
    identifier = larger.token_to_id("<more\n>")
    assert_refused(PairingError, (f"'<more\\n>' has id {identifier} and no id",), str(tmp_path / "draft"), None, None, target)


def test_the_same_tokens_put_together_differently(tmp_path: Path) -> None:
    target = with_tokenizer(tmp_path / "target", byte_level())
    with_tokenizer(tmp_path / "draft", byte_level_without_merges())
    assert_refused(PairingError, ("different tokenizers", "becomes"), str(tmp_path / "draft"), None, None, target)


def byte_level_without_merges() -> Tokenizer:
    values = json.loads(byte_level().to_str())
    values["model"]["merges"] = values["model"]["merges"][:5]
    return Tokenizer.from_str(json.dumps(values))


def test_only_one_has_a_tokenizer(tmp_path: Path) -> None:
    has, lacks = (
        with_tokenizer(tmp_path / "has", byte_level()),
        with_tokenizer(tmp_path / "lacks", None, rows=byte_level().get_vocab_size()),
    )
    assert_refused(PairingError, ("only the target has tokenizer files",), str(tmp_path / "lacks"), None, None, has)
    assert_refused(PairingError, ("only the draft model has tokenizer files",), str(tmp_path / "has"), None, None, lacks)


def test_neither_has_a_tokenizer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All that can be compared is the size of the vocabulary, and this is said."""
    target = with_tokenizer(tmp_path / "target", None)
    for name, rows in (("same", 61), ("other", 64)):
        with_tokenizer(tmp_path / name, None, rows=rows, seed=3)
    with caplog.at_level(logging.WARNING):
        open_draft_model(str(tmp_path / "same"), None, None, target)
    assert "taken for granted" in caplog.text
    assert_refused(PairingError, ("64 and 61",), str(tmp_path / "other"), None, None, target)
