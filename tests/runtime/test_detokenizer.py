from __future__ import annotations

from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.runtime.tiny_tokenizers import KINDS
from xpress_runtime.detokenizer import _WINDOW_TOKENS, IncrementalDetokenizer

MANY = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return KINDS[kind]()


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    return [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in data]


def check_pieces(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> list[str]:
    expected = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
    pieces = []
    for token_id in ids:
        pieces.append(detokenizer.push(token_id))
        # Every prefix must hold, not only the whole: nothing shown is ever taken back.
        assert expected.startswith("".join(pieces))
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == expected
    return pieces


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@MANY
def test_random_ids(kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    size = tokenizer.get_vocab_size()
    # Two ids are beyond the vocabulary, as in a padded one; the low ones are special tokens and bytes.
    token = st.one_of(st.integers(0, size + 1), st.integers(0, min(size, 262)))
    check_pieces(tokenizer, data.draw(st.lists(token, max_size=100)), data.draw(st.booleans()))


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(alphabet=st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(" \n▁😀👩‍👧é\u0301好日a.")), max_size=60))
@MANY
def test_random_text(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    pieces = check_pieces(tokenizer, tokenizer.encode(text).ids)
    if kind == "byte-level":
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


@pytest.mark.parametrize("kind", ["llama-like", "metaspace"])
@given(data=st.data())
@MANY
def test_byte_runs(kind: str, data: st.DataObject) -> None:
    """Valid and invalid UTF-8 between other tokens, longer than the window too."""
    tokenizer = tokenizer_of(kind)
    size = tokenizer.get_vocab_size()
    run = st.one_of(st.text(max_size=20).map(lambda text: text.encode("utf-8", "replace")), st.binary(max_size=80))
    ids: list[int] = []
    for part in data.draw(st.lists(st.tuples(run, st.integers(0, size - 1)), max_size=4)):
        ids += [*byte_ids(tokenizer, part[0]), part[1]]
    check_pieces(tokenizer, ids)


def test_character_appears_once_complete() -> None:
    tokenizer = tokenizer_of("byte-level")
    ids = [tokenizer.encode("a").ids[0], *tokenizer.encode("\U0001f9ff").ids]
    assert len(ids) > 2
    assert check_pieces(tokenizer, ids) == ["a", *[""] * (len(ids) - 2), "\U0001f9ff", ""]


def test_incomplete_end_is_shown_by_flush() -> None:
    tokenizer = tokenizer_of("byte-level")
    ids = tokenizer.encode("\U0001f9ff").ids[:-1]
    assert check_pieces(tokenizer, ids)[-1] == "\ufffd"


def test_leading_space_is_dropped_at_the_start_only() -> None:
    tokenizer = tokenizer_of("llama-like")
    space_a = tokenizer.token_to_id("▁a")
    assert check_pieces(tokenizer, [space_a] * 100)[:2] == ["a", " a"]
    assert tokenizer.decode([space_a] * 3) == "a a a"


def test_special_token_does_not_separate_bytes() -> None:
    tokenizer = tokenizer_of("llama-like")
    first, *rest = byte_ids(tokenizer, "é".encode())
    assert "".join(check_pieces(tokenizer, [first, tokenizer.token_to_id("</s>"), *rest])) == "é"


@pytest.mark.parametrize("kind", KINDS)
def test_window_stays_short(kind: str) -> None:
    """Also when nothing but invalid bytes comes, except in a run of byte tokens, which is not decoded before it ends."""
    tokenizer = tokenizer_of(kind)
    detokenizer = IncrementalDetokenizer(tokenizer)
    endless = tokenizer.encode("\U0001f9ff").ids[0] if kind == "byte-level" else tokenizer.get_vocab_size() - 3
    for _ in range(1000):
        detokenizer.push(endless)
        assert len(detokenizer._window) <= _WINDOW_TOKENS


def test_flush_starts_a_new_text() -> None:
    tokenizer = tokenizer_of("llama-like")
    detokenizer = IncrementalDetokenizer(tokenizer)
    space_a = tokenizer.token_to_id("▁a")
    assert [detokenizer.push(space_a), detokenizer.push(space_a), detokenizer.flush()] == ["a", " a", ""]
    assert detokenizer.push(space_a) == "a"
    assert IncrementalDetokenizer(tokenizer).flush() == ""
