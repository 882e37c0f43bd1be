"""The tokenizer of a bundle: prompts and chat messages to token ids, token ids to text.

Reads the folder that ``xpress_export.checkpoints.tokenizer_files`` writes. Knows nothing of models; which tokens end a generation is
kept with the generation defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from xpress_runtime.chat_template import ChatTemplate
from xpress_runtime.detokenizer import IncrementalDetokenizer
from xpress_runtime.errors import BundleError, PromptError
from xpress_runtime.fields import Fields

TOKENIZER_FILE = "tokenizer.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
SETTINGS_FILE = "settings.json"


class TextTokenizer:
    """Encodes and decodes as the checkpoint's own tokenizer does."""

    def __init__(self, tokenizer: Tokenizer, special_tokens: Mapping[str, str], chat_template: ChatTemplate | None = None) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self.special_tokens = dict(special_tokens)
        # A prompt is never cut silently: its length is checked against the capacity, with an error.
        tokenizer.no_truncation()
        tokenizer.no_padding()

    @classmethod
    def open(cls, folder: Path) -> TextTokenizer:
        """Read a bundle's tokenizer folder."""
        settings = Fields.from_file(folder / SETTINGS_FILE, BundleError)
        nested = settings.nested("special_tokens")
        special_tokens = {name: nested.text(name) for name in nested}
        path = folder / TOKENIZER_FILE
        if not path.is_file():
            raise BundleError(f"{path} does not exist")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as problem:  # noqa: BLE001, tokenizers raises no narrower type
            raise BundleError(f"{path} is not a tokenizer: {_one_line(problem)}") from None
        tokenizer.encode_special_tokens = settings.boolean("split_special_tokens")
        return cls(tokenizer, special_tokens, _read_chat_template(folder / CHAT_TEMPLATE_FILE, special_tokens))

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest token id: how many logits a model needs so that every token can be said."""
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        return max(ids, default=-1) + 1

    def token_id(self, token: str) -> int | None:
        """The id of a token by its exact spelling."""
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer adds around it."""
        return self._encode(text, add_special_tokens=True)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], /, *, add_generation_prompt: bool = True, **template_variables: Any
    ) -> str:
        """The text that the chat template makes of messages."""
        if self._chat_template is None:
            raise PromptError("the bundle has no chat template, so it takes no chat messages; pass a prompt as text or token ids")
        return self._chat_template.render(messages, add_generation_prompt, template_variables)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], /, *, add_generation_prompt: bool = True, **template_variables: Any
    ) -> list[int]:
        """Token ids of chat messages. The template writes the special tokens itself, so none are added."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, **template_variables)
        return self._encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids. Ids that the tokenizer does not know (a padded vocabulary) have no text."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(self, skip_special_tokens: bool = True) -> IncrementalDetokenizer:
        """A decoder for one text that arrives token by token."""
        return IncrementalDetokenizer(self._tokenizer, skip_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if not isinstance(text, str):
            raise PromptError(f"the prompt is of type {type(text).__name__}, expected a string")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as problem:
            found = f"U+{ord(text[problem.start]):04X}"
            raise PromptError(f"the prompt is not valid Unicode: a lone surrogate {found} at character {problem.start}") from None
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except Exception as problem:  # noqa: BLE001, tokenizers raises no narrower type
            raise PromptError(f"the tokenizer cannot encode the prompt: {_one_line(problem)}") from None
        return ids


def _read_chat_template(path: Path, special_tokens: Mapping[str, str]) -> ChatTemplate | None:
    if not path.exists():
        return None
    try:
        # Bytes, because reading as text would translate line ends inside the template.
        source = path.read_bytes().decode("utf-8")
    except OSError as problem:
        raise BundleError(f"{path} cannot be read: {problem.strerror or problem}") from None
    except UnicodeDecodeError as problem:
        raise BundleError(f"{path} is not UTF-8 text: {problem.reason} at byte {problem.start}") from None
    return ChatTemplate(source, special_tokens, str(path))


def _one_line(problem: BaseException) -> str:
    text = " ".join(str(problem).split())
    return text if len(text) <= 300 else text[:297] + "..."
