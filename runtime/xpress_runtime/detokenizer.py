"""Turns token ids into text one token at a time.

The pieces joined are exactly what decoding all ids at once gives, for every kind of tokenizer. Knows nothing of models, stop strings or
requests.
"""

from __future__ import annotations

import json
import re

from tokenizers import Tokenizer

# `tokenizers.decoders.DecodeStream` was tried first. It fails the equality contract for tokenizers with byte fallback: it shows a byte
# before the run that it belongs to has ended (a run with one wrong byte decodes to replacement characters throughout) and then raises
# "Invalid prefix encountered", and it has no way to get at what it still holds when the text ends.

# A character is at most four bytes, so at most three tokens before a new one can still belong to the same character; the rest is margin.
_CONTEXT_TOKENS = 8
_WINDOW_TOKENS = 32
_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class IncrementalDetokenizer:
    """One text being decoded. ``push`` returns what became certain, ``flush`` the rest when the text ends.

    Each call decodes a window of recent tokens, never the whole text. The window starts with tokens whose text is already shown, because
    the text of a token depends on its neighbours: a leading space is dropped at the start of a text only, bytes join to characters.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._hidden: frozenset[int] = frozenset()
        if skip_special_tokens:
            self._hidden = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        self._skip_special_tokens = skip_special_tokens
        self._holds_byte_runs = _has_byte_fallback(tokenizer)
        self._window: list[int] = []
        self._num_shown = 0  # characters of the decoded window that were returned

    def push(self, token_id: int) -> str:
        """Append a token and return the text that no later token can change; empty while a character is incomplete."""
        token = self._tokenizer.id_to_token(token_id)
        # A full decode filters these out before it joins anything, so they must not separate their neighbours here either.
        if token is None or token_id in self._hidden:
            return ""
        self._window.append(token_id)
        # Byte fallback decodes a run of byte tokens as a whole: one invalid byte turns all of it into replacement characters. Nothing
        # of it is certain before the run ends, and skipping the decode keeps the cost of a long run constant per token.
        if self._holds_byte_runs and _BYTE_TOKEN.fullmatch(token):
            return ""
        text = self._decode(self._window)
        # Only the last replacement character can still become something else: an incomplete sequence of bytes decodes to exactly one.
        num_certain = len(text) - 1 if text.endswith(_REPLACEMENT) else len(text)
        piece = text[self._num_shown : num_certain]
        self._num_shown = max(self._num_shown, num_certain)
        if len(self._window) >= _WINDOW_TOKENS:
            self._shrink(text[self._num_shown :])
        return piece

    def flush(self) -> str:
        """The text that was held back, when no token follows. The next ``push`` starts a new text."""
        piece = self._decode(self._window)[self._num_shown :]
        self._window = []
        self._num_shown = 0
        return piece

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)
        return text

    def _shrink(self, held: str) -> None:
        """Drop the oldest tokens. What precedes ``held`` in the shorter window may read differently, but it was shown already."""
        window = self._window[-_CONTEXT_TOKENS:]
        text = self._decode(window)
        # Without any shown character before it, the held text would become the start of a text, where spaces are stripped.
        if text.endswith(held) and len(text) > len(held):
            self._window = window
            self._num_shown = len(text) - len(held)


def _has_byte_fallback(tokenizer: Tokenizer) -> bool:
    """Whether the decoder joins tokens such as ``<0xE2>`` to characters."""
    if tokenizer.decoder is None:
        return False
    state = json.loads(tokenizer.decoder.__getstate__())
    return any(part.get("type") == "ByteFallback" for part in (state, *state.get("decoders", ())))
