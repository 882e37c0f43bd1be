"""Writes a bundle's tokenizer folder from a Hugging Face folder or a GGUF file.

transformers loads the source, so that what tokenizer_config.json overrides is honoured; what it builds is saved and then read back through
the runtime, which must give the same ids. Knows nothing of models; which tokens end a generation is read elsewhere.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xpress_runtime.errors import BundleError, CheckpointError, OutputError
from xpress_runtime.tokenizer import CHAT_TEMPLATE_FILE, SETTINGS_FILE, TOKENIZER_FILE, TextTokenizer

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers import Tokenizer

# Any of these makes a folder one that has a tokenizer; without all of them a bundle takes token ids only.
_TOKENIZER_SOURCES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)

# How a GGUF file names the way to split text (tokenizer.ggml.pre), where transformers takes the name for plain GPT-2 splitting or leaves
# out a part. Ids would differ silently from those that the model was trained on.
_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})
_COMPOSED_CHARACTERS = frozenset({"qwen2", "qwen35"})
# Words that are tokens are taken whole, though no merges lead to them; and texts begin with BOS unless the file says otherwise.
_WHOLE_WORDS = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"})
_PLAIN = frozenset(
    {"default", "gpt-2", "phi-2", "olmo", "mpt", "jais", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "gigachat", "mellum"}
)

# Spaces, digits, letters that compose, bytes without tokens: where tokenizers that are rebuilt from parts tend to differ.
_PROBES = ("Hello, world!", "  two  spaces\n\n\tand 1234.5 ½ ²", "cafe\u0301 Ünï 你好 🎉", "don't I'LL\u00a0x")


@dataclass(frozen=True)
class TokenizerSummary:
    """What a builder needs to know about the tokenizer that was written."""

    vocab_size: int
    """One more than the highest token id."""
    has_chat_template: bool
    special_token_ids: dict[str, int]
    """By name: bos_token, eos_token and so on, as far as they are set."""


def write_tokenizer(source: Path, folder: Path) -> TokenizerSummary | None:
    """Write the tokenizer of a checkpoint into ``folder``. None when the checkpoint has none; then nothing is written."""
    is_gguf = source.is_file() and source.suffix.lower() == ".gguf"
    if is_gguf:
        tokenizer = _load_gguf(source)
    elif source.is_dir():
        tokenizer = _load_folder(source)
    else:
        raise CheckpointError(f"{source} is neither a folder nor a .gguf file, so no tokenizer can be read from it")
    if tokenizer is None:
        return None

    special_tokens = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if not isinstance(token, list | tuple)}
    settings = {"special_tokens": special_tokens, "split_special_tokens": bool(tokenizer.split_special_tokens)}
    backend: Tokenizer = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    contents = {TOKENIZER_FILE: backend.to_str(), SETTINGS_FILE: json.dumps(settings, ensure_ascii=False, indent=2) + "\n"}
    chat_template = _chat_template(tokenizer, source)
    if chat_template is not None:
        contents[CHAT_TEMPLATE_FILE] = chat_template
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            # Bytes, because writing as text would translate line ends inside a template.
            (folder / name).write_bytes(text.encode("utf-8"))
    except UnicodeEncodeError:
        raise CheckpointError(f"the tokenizer of {source} holds text that is not valid Unicode") from None
    except OSError as problem:
        raise OutputError(f"{folder} cannot be written: {problem.strerror or problem}") from None

    written = _read_back(source, folder, tokenizer)
    ids = {name: written.token_id(token) for name, token in special_tokens.items()}
    return TokenizerSummary(
        vocab_size=written.vocab_size,
        has_chat_template=written.has_chat_template,
        special_token_ids={name: token_id for name, token_id in ids.items() if token_id is not None},
    )


def _load_folder(source: Path) -> Any:
    """The transformers tokenizer of a folder, or None if the folder holds no file of one."""
    if not any((source / name).is_file() for name in _TOKENIZER_SOURCES) and not any(source.glob("*.tiktoken")):
        return None
    return _load(source, source)


def _load_gguf(source: Path) -> Any:
    """The transformers tokenizer of a GGUF file with what transformers leaves out, or None if the file holds none."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(source)
        model = _metadata(reader, "tokenizer.ggml.model")
        split = _metadata(reader, "tokenizer.ggml.pre")
        states_bos = _metadata(reader, "tokenizer.ggml.add_bos_token") is not None
    except Exception as problem:  # noqa: BLE001, a damaged file fails anywhere in the reader
        raise CheckpointError(f"{source} is not a readable GGUF file: {_one_line(problem)}") from None
    if model in (None, "none", "no_vocab"):
        return None
    # transformers would also read the files beside a GGUF file, which may belong to another checkpoint: give it a folder of its own.
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model.gguf").symlink_to(source.resolve())
        tokenizer = _load(source, Path(folder), gguf_file="model.gguf")
    if model == "gpt2" and split is not None:
        _restore_split(source, tokenizer, split, states_bos)
    return tokenizer


def _restore_split(source: Path, tokenizer: Any, split: str, states_bos: bool) -> None:
    """Split text as the original tokenizer did before merging."""
    from tokenizers import normalizers, pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    backend: Tokenizer = tokenizer.backend_tokenizer
    if split in _SINGLE_DIGITS:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    elif split in _COMPOSED_CHARACTERS:
        backend.normalizer = normalizers.NFC()
    elif split in _WHOLE_WORDS:
        backend.model.ignore_merges = True
        if not states_bos and tokenizer.bos_token is not None:
            tokenizer.add_bos_token = True
    elif split not in GGUF_PRE_TOKENIZER_SPLITS and split not in _PLAIN:
        raise CheckpointError(
            f"{source}: text is split in the way '{split}' (tokenizer.ggml.pre), which is not known here, so token ids would be wrong; "
            "use the checkpoint's Hugging Face folder instead"
        )


def _metadata(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _load(source: Path, folder: Path, **options: Any) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True, **options)
    except Exception as problem:  # noqa: BLE001, damaged files surface as errors of many libraries
        raise CheckpointError(f"the tokenizer of {source} cannot be loaded: {_one_line(problem)}") from None
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        name = type(tokenizer).__name__
        raise CheckpointError(f"the tokenizer of {source} ({name}) has no form that can be saved as tokenizer.json; convert it first")
    return tokenizer


def _chat_template(tokenizer: Any, source: Path) -> str | None:
    """The template for plain chats, where a checkpoint brings several."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        if template and "default" not in template:
            raise CheckpointError(f"{source} has the chat templates {', '.join(sorted(template))}, expected one named 'default'")
        template = template.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"the chat template of {source} is of type {type(template).__name__}, expected a string")
    return template or None


def _read_back(source: Path, folder: Path, tokenizer: Any) -> TextTokenizer:
    """Open what was written as the runtime will, and compare."""
    try:
        written = TextTokenizer.open(folder)
    except BundleError as problem:
        raise CheckpointError(f"the tokenizer of {source} cannot be used: {problem}") from None
    for probe in _PROBES:
        try:
            expected: list[int] = tokenizer(probe).input_ids
        except Exception:  # noqa: BLE001, tokenizers raises no narrower type
            continue  # a vocabulary without an unknown token: nothing to compare with, and the runtime refuses such a prompt
        found = written.encode(probe)
        if found != expected:
            raise CheckpointError(f"the tokenizer of {source} does not survive saving: {probe!r} becomes {found}, expected {expected}")
    return written


def _one_line(problem: BaseException) -> str:
    text = " ".join(str(problem).split()) or type(problem).__name__
    return text if len(text) <= 300 else text[:297] + "..."
