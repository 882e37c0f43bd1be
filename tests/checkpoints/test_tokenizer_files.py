"""What transformers makes of a checkpoint's tokenizer, the runtime makes of the bundle's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from tests.runtime.tiny_tokenizers import CHATML, KINDS, SENTENCES, byte_level, llama_like
from xpress_export.checkpoints.tokenizer_files import TokenizerSummary, write_tokenizer
from xpress_runtime.errors import CheckpointError
from xpress_runtime.tokenizer import TextTokenizer

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello 123 日本 🎉"},
    {"role": "assistant", "content": "Yes.", "reasoning_content": None},
    {"role": "user", "content": "<|im_end|> why?"},
]
TEXTS = (*SENTENCES, "", " ", "  a  b ", "<|im_start|>x<|im_end|>", "<think> y</think>", "<s>a</s>", "a\0b", "½²", "cafe\u0301 ﬁ")


def write_folder(folder: Path, tokenizer: Tokenizer, config: dict[str, Any] | None = None, model_type: str | None = "llama") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")
    return folder


def load(folder: Path, **options: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, **options)


def check_parity(reference: Any, written: TextTokenizer) -> None:
    for text in TEXTS:
        ids = reference(text).input_ids
        assert written.encode(text) == ids
        for skip in (False, True):
            expected = reference.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert written.decode(ids, skip_special_tokens=skip) == expected
    if reference.chat_template is not None:
        for add in (False, True):
            expected = reference.apply_chat_template(MESSAGES, add_generation_prompt=add, tokenize=True, return_dict=False, extra="é")
            assert written.encode_chat(MESSAGES, add_generation_prompt=add, extra="é") == expected


GENERIC = "PreTrainedTokenizerFast"
CONFIGS: dict[str, tuple[Tokenizer, dict[str, Any] | None]] = {
    **{kind: (build(), {"tokenizer_class": GENERIC}) for kind, build in KINDS.items()},
    "digits": (byte_level(digits=True), {"tokenizer_class": GENERIC, "eos_token": "<|im_end|>", "chat_template": CHATML}),
    "bos in the file": (byte_level(bos=True), {"tokenizer_class": GENERIC, "bos_token": "<|im_start|>", "chat_template": CHATML}),
    "bos by the config": (byte_level(), {"tokenizer_class": GENERIC, "bos_token": "<|im_start|>", "add_bos_token": True}),
    "no bos by the config": (byte_level(bos=True), {"tokenizer_class": GENERIC, "bos_token": "<|im_start|>", "add_bos_token": False}),
    "new special token": (byte_level(), {"tokenizer_class": GENERIC, "pad_token": "<|pad|>", "extra_special_tokens": ["<|tool|>", "y"]}),
    "special tokens as text": (byte_level(), {"tokenizer_class": GENERIC, "eos_token": "<|im_end|>", "split_special_tokens": True}),
    "qwen class": (byte_level(), {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "chat_template": CHATML}),
    "llama class": (llama_like(), {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "chat_template": CHATML}),
    "no config": (byte_level(), None),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_same_as_transformers(name: str, tmp_path: Path) -> None:
    tokenizer, config = CONFIGS[name]
    source = write_folder(tmp_path / "source", tokenizer, config)
    summary = write_tokenizer(source, tmp_path / "out")
    written = TextTokenizer.open(tmp_path / "out")
    reference = load(source)
    assert summary is not None
    assert summary.vocab_size == written.vocab_size == max(reference.get_vocab().values()) + 1
    assert summary.has_chat_template == written.has_chat_template == (reference.chat_template is not None)
    check_parity(reference, written)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, TextTokenizer]:
    folder = tmp_path_factory.mktemp("pair")
    config = {"tokenizer_class": GENERIC, "bos_token": "<|im_start|>", "add_bos_token": True, "chat_template": CHATML}
    write_tokenizer(write_folder(folder / "source", byte_level(), config), folder / "out")
    return load(folder / "source"), TextTokenizer.open(folder / "out")


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_text_as_prompt_and_message(pair: tuple[Any, TextTokenizer], text: str) -> None:
    reference, written = pair
    assert written.encode(text) == reference(text).input_ids
    messages = [{"role": "user", "content": text}]
    assert written.encode_chat(messages) == reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_summary(tmp_path: Path) -> None:
    config = {"tokenizer_class": GENERIC, "eos_token": "<|im_end|>", "pad_token": {"content": "<|pad|>", "__type": "AddedToken"}}
    tokenizer = byte_level()
    size = tokenizer.get_vocab_size()
    summary = write_tokenizer(write_folder(tmp_path / "source", tokenizer, config), tmp_path / "out")
    assert summary == TokenizerSummary(size + 1, False, {"eos_token": 2, "pad_token": size})
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["settings.json", "tokenizer.json"]


@pytest.mark.parametrize("place", ["file", "config", "list"])
def test_chat_template_places(place: str, tmp_path: Path) -> None:
    config: dict[str, Any] = {"tokenizer_class": GENERIC}
    if place == "config":
        config["chat_template"] = CHATML
    elif place == "list":
        config["chat_template"] = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": CHATML}]
    source = write_folder(tmp_path / "source", byte_level(), config)
    if place == "file":
        (source / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    write_tokenizer(source, tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text(encoding="utf-8") == CHATML


def test_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    assert write_tokenizer(tmp_path / "source", tmp_path / "out") is None
    assert not (tmp_path / "out").exists()


def test_no_source(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither a folder nor a"):
        write_tokenizer(tmp_path / "nowhere", tmp_path / "out")


@pytest.mark.parametrize("model_type", [None, "some_unknown_model"])
def test_folder_whose_architecture_transformers_does_not_know(model_type: str | None, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source", byte_level(), {"tokenizer_class": GENERIC}, model_type)
    assert write_tokenizer(source, tmp_path / "out") is not None


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("tokenizer.json", b"{}", "cannot be loaded"),
        ("tokenizer.json", b"\xff", "cannot be loaded"),
        ("tokenizer_config.json", b"{", "cannot be loaded"),
        ("chat_template.jinja", b"{% if %}", "not a valid template"),
        ("chat_template.jinja", b"\xff", "cannot be loaded"),
    ],
)
def test_damaged_source(name: str, content: bytes, part: str, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source", byte_level(), {"tokenizer_class": GENERIC})
    (source / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=part) as caught:
        write_tokenizer(source, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert str(source) in str(caught.value)


def test_remote_code_is_never_run(tmp_path: Path) -> None:
    config = {"tokenizer_class": "EvilTokenizer", "auto_map": {"AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizer"]}}
    source = write_folder(tmp_path / "source", byte_level(), config, "evil")
    marker = tmp_path / "ran"
    (source / "evil.py").write_text(f"open({str(marker)!r}, 'w')", encoding="utf-8")
    try:
        write_tokenizer(source, tmp_path / "out")
    except CheckpointError as problem:
        assert "\n" not in str(problem)
    assert not marker.exists()


def write_gguf(path: Path, tokenizer: Tokenizer, pre: str | None, *, bos: int | None = None, chat_template: str | None = CHATML) -> Path:
    """The tokenizer in a GGUF file, as converters of llama.cpp write it."""
    from gguf import GGUFWriter, TokenType

    state = json.loads(tokenizer.to_str())["model"]
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    added = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    types = [TokenType.NORMAL if t not in added else TokenType.CONTROL if added[t].special else TokenType.USER_DEFINED for t, _ in vocab]
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in vocab])
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(merge) for merge in state["merges"]])
    writer.add_eos_token_id(2)
    if bos is not None:
        writer.add_bos_token_id(bos)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def plain_byte_level(**options: Any) -> Tokenizer:
    """Without added tokens that a GGUF vocabulary spells differently."""
    tokenizer = byte_level(**options)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["special"]]
    return Tokenizer.from_str(json.dumps(state))


@pytest.mark.parametrize("pre", ["smollm", "starcoder", "refact", "command-r"])
def test_gguf_single_digits(pre: str, tmp_path: Path) -> None:
    original = plain_byte_level(digits=True)
    summary = write_tokenizer(write_gguf(tmp_path / "model.gguf", original, pre), tmp_path / "out")
    written = TextTokenizer.open(tmp_path / "out")
    assert summary is not None
    assert summary.special_token_ids["eos_token"] == 2
    for sample in (*TEXTS, "In 2024, 12345 ½ and ２３"):
        assert written.encode(sample) == original.encode(sample).ids
    chat = f"<|im_start|>user\n{MESSAGES[1]['content']}<|im_end|>\n<|im_start|>assistant\n"
    assert written.encode_chat(MESSAGES[1:2]) == original.encode(chat, add_special_tokens=False).ids


def test_gguf_single_digits_change_ids(tmp_path: Path) -> None:
    """The rule matters: a vocabulary that has a token for a space and a digit must not use it."""
    original = plain_byte_level()
    space_one = original.token_to_id("Ġ1")
    write_tokenizer(write_gguf(tmp_path / "digits.gguf", original, "smollm"), tmp_path / "digits")
    write_tokenizer(write_gguf(tmp_path / "plain.gguf", original, "gpt-2"), tmp_path / "plain")
    assert TextTokenizer.open(tmp_path / "plain").encode(" 1") == [space_one]
    assert TextTokenizer.open(tmp_path / "digits").encode(" 1") == [original.token_to_id("Ġ"), original.token_to_id("1")]


def test_gguf_composed_characters(tmp_path: Path) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    original = plain_byte_level()
    write_tokenizer(write_gguf(tmp_path / "model.gguf", original, "qwen2"), tmp_path / "out")
    written = TextTokenizer.open(tmp_path / "out")
    original.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS["qwen2"]), "isolated")
    original.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    for text in (*TEXTS, "e\u0301"):
        assert written.encode(text) == original.encode(text).ids


def test_gguf_whole_words_and_bos(tmp_path: Path) -> None:
    """Llama 3: a word that is a token is one token though no merges lead to it, and a text begins with BOS."""
    state = json.loads(plain_byte_level().to_str())
    word = len(state["model"]["vocab"])
    state["model"]["vocab"]["zyxw"] = word
    write_tokenizer(write_gguf(tmp_path / "model.gguf", Tokenizer.from_str(json.dumps(state)), "llama-bpe", bos=1), tmp_path / "out")
    written = TextTokenizer.open(tmp_path / "out")
    assert written.encode("zyxw") == [1, word]
    assert written.encode_chat([{"role": "user", "content": "x"}]).count(1) == 2


def test_gguf_ignores_files_beside_it(tmp_path: Path) -> None:
    other = byte_level()
    other.add_special_tokens(["<|other|>"])
    write_folder(tmp_path, other, {"tokenizer_class": GENERIC, "eos_token": "<|other|>"})
    summary = write_tokenizer(write_gguf(tmp_path / "model.gguf", plain_byte_level(), "gpt-2"), tmp_path / "out")
    assert summary is not None
    assert summary.special_token_ids["eos_token"] == 2


def test_gguf_unknown_split(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "model.gguf", plain_byte_level(), "some-new-model")
    with pytest.raises(CheckpointError, match="'some-new-model'"):
        write_tokenizer(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_gguf_without_tokenizer(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert write_tokenizer(tmp_path / "model.gguf", tmp_path / "out") is None


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\0\0\0" + b"\xff" * 40, b"not a gguf file at all"])
def test_gguf_damaged(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match="not a readable GGUF file") as caught:
        write_tokenizer(tmp_path / "model.gguf", tmp_path / "out")
    assert "\n" not in str(caught.value)
