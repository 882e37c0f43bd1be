"""Ids beyond the tokenizer: tokens like any other for the model, without text; the same in every way to decode."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import build
from tests.runtime.tiny_tokenizers import byte_level
from tests.tiny import write_drafter, write_target
from xpress_runtime.backends import open_backend
from xpress_runtime.errors import PromptError
from xpress_runtime.generation import GenerationConfig
from xpress_runtime.session import Session

VOCABULARY, PADDING = 448, 447
PROMPT = [300, 5, 17]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """A target that soon writes nothing but an id that its tokenizer has no token for."""
    folder = tmp_path_factory.mktemp("padded")
    write_target(folder / "target", "llama", vocab_size=VOCABULARY, eos_token_id=None, num_hidden_layers=2)
    path = folder / "target" / "model.safetensors"
    tensors = load_file(path)
    # Its embedding leads to itself, and every other one to it after a while.
    tensors["model.embed_tokens.weight"][PADDING] = 4 * torch.ones(40)
    tensors["lm_head.weight"][PADDING] = torch.ones(40)
    save_file(tensors, path, metadata={"format": "pt"})
    tokenizer = byte_level()
    assert tokenizer.get_vocab_size() < PADDING
    tokenizer.save(str(folder / "target" / "tokenizer.json"))
    (folder / "target" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    write_drafter(folder / "drafter", folder / "target", mask_token_id=PADDING - 1)
    built = build(folder / "target", folder / "drafter", folder / "bundle", capacity=64, prefill_chunk=8, num_passes=(1,))
    return Session(built.bundle, open_backend("ort-cpu", threads=1))


def test_the_same_in_every_way_to_decode(session: Session) -> None:
    plain = session.generate([*PROMPT, PADDING], GenerationConfig(12, speculation="off"))
    assert PADDING in plain.tokens
    for config in (GenerationConfig(12), GenerationConfig(12, num_passes=0), GenerationConfig(12, drafter="lookup")):
        assert session.generate([*PROMPT, PADDING], config).tokens == plain.tokens
    # Lookup proposes it, so it was accepted as well as written.
    assert max(session.generate([*PROMPT, PADDING], GenerationConfig(12, drafter="lookup")).stats.acceptance_lengths) > 1


def test_it_has_no_text(session: Session) -> None:
    result = session.generate([*PROMPT, PADDING], GenerationConfig(12))
    assert session.tokenizer is not None
    assert result.text == session.tokenizer.decode([token for token in result.tokens if token != PADDING])


def test_prompts_may_hold_it_and_nothing_beyond(session: Session) -> None:
    assert session.encode([VOCABULARY - 1]) == [VOCABULARY - 1]
    with pytest.raises(PromptError, match=f"expected a token id from 0 to {VOCABULARY - 1}"):
        session.encode([VOCABULARY])
