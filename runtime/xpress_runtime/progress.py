"""One request on its way: which emitted tokens are kept, when it ends and why, and the text that is final so far.

Takes tokens one by one as they are emitted, so that a block is cut where plain decoding would have stopped. Knows nothing about graphs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from xpress_runtime.generation import FinishReason, GenerationConfig, Piece
from xpress_runtime.stopping import StopStrings
from xpress_runtime.tokenizer import TextTokenizer


class RequestProgress:
    """Kept tokens and final text of a request. ``room``: tokens that the caches can still take. Without a tokenizer there is no text."""

    def __init__(self, config: GenerationConfig, *, stop_token_ids: Sequence[int], room: int, tokenizer: TextTokenizer | None) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self._stop_token_ids = frozenset() if config.ignore_stop else frozenset((*stop_token_ids, *config.stop_token_ids))
        self._limit = min(config.max_new_tokens, room)
        self._limit_reason: FinishReason = "length" if config.max_new_tokens <= room else "capacity"
        self._detokenizer = tokenizer.detokenizer() if tokenizer is not None else None
        self._stop_strings = StopStrings(config.stop)

    def push(self, emitted: Iterable[int]) -> Piece:
        """Take the tokens of a round and keep them up to the one that ends the request; text that can no longer change comes back."""
        kept: list[int] = []
        text = ""
        for token in emitted:
            kept.append(token)
            if token in self._stop_token_ids:
                self.finish_reason = "stop"
            else:
                text += self._show(token)
                if self.finish_reason is None and len(self.tokens) + len(kept) == self._limit:
                    self.finish_reason = self._limit_reason
            if self.finish_reason is not None:
                text += self._flush()
                break
        self.tokens += kept
        self.text += text
        return Piece(text, tuple(kept))

    def _show(self, token: int) -> str:
        if self._detokenizer is None:
            return ""
        return self._match(self._detokenizer.push(token))

    def _flush(self) -> str:
        """What was held back for an unfinished character or a possible stop string."""
        if self._detokenizer is None or self._stop_strings.found:
            return ""
        held_back = self._match(self._detokenizer.flush())
        return held_back if self._stop_strings.found else held_back + self._stop_strings.flush()

    def _match(self, text: str) -> str:
        shown, found = self._stop_strings.push(text)
        if found:
            self.finish_reason = "stop"
        return shown
