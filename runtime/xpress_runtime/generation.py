"""What a caller may ask of a generation, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from xpress_runtime.errors import OptionError
from xpress_runtime.stats import GenerationStats

Speculation = Literal["on", "off"]
FinishReason = Literal["stop", "length", "capacity"]


@dataclass(frozen=True)
class GenerationConfig:
    """Settings of one generation; names are those of transformers and vLLM.

    ``stop``: strings that end the text (not part of it). ``stop_token_ids``: ids that end it beside the target's own. ``ignore_stop``:
    go on past stop tokens to ``max_new_tokens``. ``speculation`` "off" is plain decoding. ``num_passes``: Jacobi passes among those
    built into the bundle, 0 for the bare drafter, None for the bundle's default. Raises OptionError.
    """

    max_new_tokens: int = 128
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_stop: bool = False
    speculation: Speculation = "on"
    num_passes: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.max_new_tokens, bool) or not isinstance(self.max_new_tokens, int) or self.max_new_tokens < 1:
            raise OptionError(f"max_new_tokens is {self.max_new_tokens!r}, expected an integer of at least 1")
        if self.speculation not in ("on", "off"):
            raise OptionError(f"speculation is {self.speculation!r}, expected 'on' or 'off'")
        if self.speculation == "off" and self.num_passes is not None:
            raise OptionError(f"num_passes is {self.num_passes}, and speculation is off; leave one of them out")
        if self.num_passes is not None and (isinstance(self.num_passes, bool) or not isinstance(self.num_passes, int)):
            raise OptionError(f"num_passes is {self.num_passes!r}, expected an integer")
        if (
            isinstance(self.stop, str)
            or not isinstance(self.stop, Sequence)
            or not all(isinstance(stop, str) and stop for stop in self.stop)
        ):
            raise OptionError(f"stop is {self.stop!r}, expected a list of non-empty strings")
        if not isinstance(self.stop_token_ids, Sequence) or not all(
            isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in self.stop_token_ids
        ):
            raise OptionError(f"stop_token_ids is {self.stop_token_ids!r}, expected a list of token ids")


@dataclass(frozen=True)
class Piece:
    """A part of a stream: text that is final, and the tokens that came with it. Either may be empty: text can lag behind its tokens."""

    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class GenerationResult:
    """A finished generation. ``tokens`` ends with the stop token or with the token that completed a stop string; ``text`` leaves it out.

    ``finish_reason``: "stop" (stop token or string), "length" (max_new_tokens) or "capacity" (the caches are full).
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stats: GenerationStats = field(repr=False)
