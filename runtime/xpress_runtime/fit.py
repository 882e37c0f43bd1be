"""Whether a request is what the drafter was trained for. It may be another: output stays exact, drafts are accepted less often.

Warns once of each kind in a session. Knows the drafter's record and the chat template; knows nothing about what was accepted.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from xpress_runtime.errors import PromptError
from xpress_runtime.manifest import DrafterRecord
from xpress_runtime.tokenizer import TextTokenizer

logger = logging.getLogger("xpress_runtime.fit")

# The variable by which chat templates switch thinking.
THINKING = "enable_thinking"
_PROBE = [{"role": "user", "content": "x"}]


class DrafterFit:
    """What is known of the drafter's training, held against requests."""

    def __init__(self, drafter: DrafterRecord) -> None:
        self._drafter = drafter
        self._warned: set[str] = set()

    def check_chat(self, tokenizer: TextTokenizer, variables: Mapping[str, Any]) -> None:
        """Warn where a chat thinks and the drafter was trained without, or the other way round."""
        trained = self._drafter.trained_with_thinking
        if trained is None or "thinking" in self._warned:
            return
        thinks = thinks_with(tokenizer, variables)
        if thinks is not None and thinks != trained:
            states = {True: "on", False: "off"}
            self._warn(
                "thinking",
                f"thinking is {states[thinks]} in this chat, and the drafter was trained with it {states[trained]}: fewer drafts will be "
                f"accepted; pass {THINKING}={str(trained).lower()} to the chat template, or try speculation auto",
            )

    def check_length(self, num_tokens: int) -> None:
        """Warn where a text may grow beyond what the drafter was trained on."""
        trained = self._drafter.max_positions
        if num_tokens > trained:
            self._warn(
                "length",
                f"this text may grow to {num_tokens} tokens, and the drafter was trained for {trained}: "
                "fewer drafts will be accepted beyond that",
            )

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s", message)


def thinks_with(tokenizer: TextTokenizer, variables: Mapping[str, Any]) -> bool | None:
    """Whether the chat template asks the target to think, with these variables; None where it has no such switch."""
    try:
        on, off = (tokenizer.render_chat(_PROBE, **{**variables, THINKING: state}) for state in (True, False))
        return None if on == off else tokenizer.render_chat(_PROBE, **variables) == on
    except PromptError:
        # A template that refuses so short a chat. The request itself may do better, and fails with its own message if not.
        return None


def switches_thinking(tokenizer: TextTokenizer | None) -> bool:
    """Whether there is a chat template, and one that has the switch."""
    return tokenizer is not None and tokenizer.has_chat_template and thinks_with(tokenizer, {}) is not None
