"""Requests as they come in: a prompt to token ids, and whether prompt and settings fit the bundle.

Knows the bundle, its tokenizer and its limits; knows nothing about backends, caches or rounds.
"""

from __future__ import annotations

import operator
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, SupportsIndex

from xpress_runtime.bundle import Bundle
from xpress_runtime.errors import OptionError, PromptError
from xpress_runtime.fit import DrafterFit
from xpress_runtime.generation import MAX_SEED, GenerationConfig
from xpress_runtime.progress import RequestProgress
from xpress_runtime.tokenizer import TextTokenizer

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


class Prompts:
    """Of one bundle; ``tokenizer`` is None where it has none."""

    def __init__(self, bundle: Bundle) -> None:
        folder = bundle.tokenizer_folder
        self.tokenizer = TextTokenizer.open(folder) if folder is not None else None
        self._manifest = bundle.manifest
        self._fit = DrafterFit(bundle.manifest.drafter)

    def encode(self, prompt: Prompt, *, chat_variables: Mapping[str, Any] | None = None) -> list[int]:
        """A prompt as token ids, as the target's tokenizer and chat template make them. Raises PromptError.

        Token ids are those of the model, which may have more than its tokenizer: such a token stands for no text.
        """
        variables = dict(chat_variables or {})
        if isinstance(prompt, str):
            tokens = self._needed_tokenizer().encode(prompt)
        elif not isinstance(prompt, Iterable) or isinstance(prompt, bytes | Mapping):
            raise PromptError(f"the prompt is a {type(prompt).__name__}, expected text, chat messages or token ids")
        else:
            items = list(prompt)
            messages = [item for item in items if isinstance(item, Mapping)]
            if messages and len(messages) == len(items):
                tokens = self._needed_tokenizer().encode_chat(messages, **variables)
                self._fit.check_chat(self._needed_tokenizer(), variables)
                variables = {}
            else:
                tokens = _token_ids(items, self._manifest.target.vocab_size)
        if variables:
            raise PromptError(f"chat variables ({', '.join(variables)}) are for chat messages, and the prompt is not one")
        if not tokens:
            raise PromptError("the prompt is empty; give at least one token")
        return tokens

    def progress(self, tokens: Sequence[int], config: GenerationConfig) -> RequestProgress:
        """The progress of a request that is about to begin. Raises PromptError and OptionError where it cannot."""
        room = self._room(tokens)
        if config.speculation != "off" and config.drafter == "block":
            self._fit.check_length(len(tokens) + min(room, config.max_new_tokens))
        if config.stop and self.tokenizer is None:
            raise OptionError("stop strings need a tokenizer, and this bundle has none; use stop_token_ids")
        return RequestProgress(config, stop_token_ids=self._manifest.target.stop_token_ids, room=room, tokenizer=self.tokenizer)

    def _room(self, tokens: Sequence[int]) -> int:
        capacity = self._manifest.capacity
        if len(tokens) >= capacity:
            raise PromptError(
                f"the prompt has {len(tokens)} tokens and the bundle's capacity is {capacity} for prompt and output together; "
                "shorten the prompt or build the bundle with a larger --capacity"
            )
        return capacity - len(tokens)

    def _needed_tokenizer(self) -> TextTokenizer:
        if self.tokenizer is None:
            raise PromptError("this bundle has no tokenizer, so it takes token ids only")
        return self.tokenizer


def seeded(config: GenerationConfig) -> GenerationConfig:
    """With a seed, drawn where sampling needs one and none was given; the statistics tell which."""
    if config.seed is not None:
        return config
    return replace(config, seed=secrets.randbelow(MAX_SEED) if config.temperature > 0 else 0)


def _token_ids(prompt: Sequence[Any], vocab_size: int) -> list[int]:
    for index, token in enumerate(prompt):
        # Integers of numpy are integers too.
        if isinstance(token, bool) or not isinstance(token, SupportsIndex) or not 0 <= operator.index(token) < vocab_size:
            raise PromptError(f"prompt item {index} is {token!r}, expected a token id from 0 to {vocab_size - 1}")
    return [operator.index(token) for token in prompt]
