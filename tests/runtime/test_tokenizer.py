from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.runtime.tiny_tokenizers import CHATML, byte_level, llama_like, word_piece
from xpress_runtime.chat_template import ChatTemplate
from xpress_runtime.errors import BundleError, PromptError
from xpress_runtime.tokenizer import TextTokenizer

USER = [{"role": "user", "content": "Hello"}]


def write(folder: Path, tokenizer: Tokenizer, chat_template: str | None = CHATML, **changes: Any) -> Path:
    settings = {"special_tokens": {"bos_token": "<|im_start|>"}, "split_special_tokens": False, **changes}
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    (folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    return folder


def test_encode_adds_special_tokens_and_chat_does_not(tmp_path: Path) -> None:
    tokenizer = TextTokenizer.open(write(tmp_path, byte_level(bos=True)))
    assert tokenizer.special_tokens == {"bos_token": "<|im_start|>"}
    ids = tokenizer.encode("Hello")
    assert ids[0] == tokenizer.token_id("<|im_start|>") == 1
    chat = tokenizer.encode_chat(USER)
    assert tokenizer.decode(chat, skip_special_tokens=False) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert chat.count(1) == 2
    assert tokenizer.encode_chat(USER, add_generation_prompt=False) == chat[: len(tokenizer.encode_chat(USER, add_generation_prompt=False))]
    assert tokenizer.decode(chat) == "user\nHello\nassistant\n"


def test_template_variables_reach_the_template(tmp_path: Path) -> None:
    tokenizer = TextTokenizer.open(write(tmp_path, byte_level(), "{{ bos_token }}{{ style }}"))
    assert tokenizer.render_chat(USER, style="dry") == "<|im_start|>dry"
    with pytest.raises(PromptError, match="'messages' cannot be passed"):
        tokenizer.encode_chat(USER, messages=[])


def test_line_ends_of_the_template_are_kept(tmp_path: Path) -> None:
    write(tmp_path, byte_level(), None)
    (tmp_path / "chat_template.jinja").write_bytes(b"{{ 'a\r\nb' }}")
    assert TextTokenizer.open(tmp_path).render_chat(USER) == ChatTemplate("{{ 'a\r\nb' }}", {}).render(USER, True, {})


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
@settings(deadline=None)
def test_byte_level_says_any_text(text: str) -> None:
    tokenizer = TextTokenizer(BYTE_LEVEL, {})
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


BYTE_LEVEL = byte_level()


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    source = byte_level()
    source.enable_truncation(2)
    source.enable_padding(length=50)
    assert len(TextTokenizer.open(write(tmp_path, source)).encode("a b c d e f g")) > 2


def test_special_tokens_as_text(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert TextTokenizer.open(write(tmp_path / "a", byte_level())).encode("<|im_end|>") == [2]
    assert len(TextTokenizer.open(write(tmp_path / "b", byte_level(), split_special_tokens=True)).encode("<|im_end|>")) > 1


def test_vocab_size_covers_the_highest_id() -> None:
    source = byte_level()
    assert TextTokenizer(source, {}).vocab_size == source.get_vocab_size() == max(source.get_vocab().values()) + 1
    assert TextTokenizer(Tokenizer.from_str(source.to_str()), {}).token_id("no such token") is None


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    tokenizer = TextTokenizer(byte_level(), {})
    assert tokenizer.decode([*tokenizer.encode("ab"), tokenizer.vocab_size + 5]) == "ab"


@pytest.mark.parametrize("text", ["a\0b", "", " ", "\ufffd\ufffe", "x" * 1_000_000])
def test_unusual_text_is_encoded(text: str) -> None:
    tokenizer = TextTokenizer(byte_level(), {})
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_lone_surrogate() -> None:
    tokenizer = TextTokenizer(byte_level(), {}, ChatTemplate(CHATML, {}))
    with pytest.raises(PromptError, match=r"lone surrogate U\+D83D at character 2"):
        tokenizer.encode("ab\ud83d")
    with pytest.raises(PromptError, match="lone surrogate"):
        tokenizer.encode_chat([{"role": "user", "content": "\udc00"}])


def test_text_that_the_tokenizer_cannot_encode() -> None:
    state = json.loads(word_piece().to_str())
    state["model"]["unk_token"] = "[MISSING]"
    tokenizer = TextTokenizer(Tokenizer.from_str(json.dumps(state)), {})
    with pytest.raises(PromptError, match="cannot encode the prompt"):
        tokenizer.encode("zzz")
    with pytest.raises(PromptError, match="of type int"):
        tokenizer.encode(5)  # type: ignore[arg-type]


def test_no_chat_template(tmp_path: Path) -> None:
    tokenizer = TextTokenizer.open(write(tmp_path, llama_like(), None))
    assert not tokenizer.has_chat_template
    with pytest.raises(PromptError, match="the bundle has no chat template"):
        tokenizer.encode_chat(USER)


def test_detokenizer_shows_special_tokens_on_request() -> None:
    tokenizer = TextTokenizer(byte_level(), {})
    hiding, showing = tokenizer.detokenizer(), tokenizer.detokenizer(skip_special_tokens=False)
    assert (hiding.push(2), showing.push(2)) == ("", "<|im_end|>")


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("tokenizer.json", b"{}", "is not a tokenizer"),
        ("tokenizer.json", b"\xff\x00", "is not a tokenizer"),
        ("tokenizer.json", None, "does not exist"),
        ("settings.json", b"[]", "expected an object"),
        ("settings.json", b"{", "not valid JSON"),
        ("settings.json", None, "does not exist"),
        ("settings.json", b'{"split_special_tokens": false}', "'special_tokens' is missing"),
        ("settings.json", b'{"split_special_tokens": false, "special_tokens": {"bos_token": 5}}', "expected a string"),
        ("chat_template.jinja", b"{% if %}", "is not a valid template"),
        ("chat_template.jinja", b"\xff", "is not UTF-8"),
    ],
)
def test_damaged_folder(tmp_path: Path, name: str, content: bytes | None, part: str) -> None:
    write(tmp_path, byte_level())
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(BundleError) as caught:
        TextTokenizer.open(tmp_path)
    assert name in str(caught.value)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)
