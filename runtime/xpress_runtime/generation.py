"""What a caller may ask of a generation, and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from xpress_runtime.errors import OptionError
from xpress_runtime.stats import GenerationStats

Speculation = Literal["on", "off", "auto"]
Drafter = Literal["block", "autoregressive", "lookup"]
FinishReason = Literal["stop", "length", "capacity"]

SPECULATION = ("on", "off", "auto")
DRAFTERS = ("block", "autoregressive", "lookup")
MAX_SEED = 2**63 - 1
MAX_DRAFT_STEPS = 1024
MAX_TOP_K = 2**31 - 1


@dataclass(frozen=True)
class GenerationConfig:
    """Settings of one generation; names are those of transformers and vLLM.

    ``stop``: strings that end the text (not part of it). ``stop_token_ids``: ids that end it beside the target's own. ``ignore_stop``:
    go on past stop tokens to ``max_new_tokens``.

    Sampling, in the order in which it is applied to the target's logits: ``repetition_penalty`` (of every token of prompt and output,
    1: off), ``frequency_penalty`` and ``presence_penalty`` (of tokens of the output, -2 to 2), ``temperature`` (0: greedy), ``top_k``
    (None: off), ``top_p`` (over 0, at most 1), ``min_p`` (0 to 1). ``seed``: the same seed gives the same output; None draws one.

    ``speculation``: "on"; "off" is plain decoding; "auto" speculates as far as it pays. ``drafter``: "block" (the bundle's DFlash drafter),
    "autoregressive" (its second, causal model, where it has one) or "lookup" (what followed the last words earlier in the text). Of a block
    drafter: ``num_passes`` (refinement passes) and ``shortlist`` (candidates per slot) among those built, None for the bundle's default;
    ``draft_steps`` denoising steps; more than there are slots to fill change nothing. Raises OptionError.
    """

    max_new_tokens: int = 128
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_stop: bool = False
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    speculation: Speculation = "on"
    drafter: Drafter = "block"
    num_passes: int | None = None
    shortlist: int | None = None
    draft_steps: int = 1

    def __post_init__(self) -> None:
        _check_integer("max_new_tokens", self.max_new_tokens, 1)
        _check_integer("top_k", self.top_k, 1, MAX_TOP_K, optional=True)
        _check_integer("seed", self.seed, 0, MAX_SEED, optional=True)
        _check_integer("num_passes", self.num_passes, 0, optional=True)
        _check_integer("shortlist", self.shortlist, 0, optional=True)
        _check_integer("draft_steps", self.draft_steps, 1, MAX_DRAFT_STEPS)
        _check_number("temperature", self.temperature, "of 0 or from 1e-6 to 100", lambda value: value == 0 or 1e-6 <= value <= 100)
        _check_number("top_p", self.top_p, "over 0 and at most 1", lambda value: 0 < value <= 1)
        _check_number("min_p", self.min_p, "from 0 to 1", lambda value: 0 <= value <= 1)
        _check_number("repetition_penalty", self.repetition_penalty, "from 0.001 to 1000", lambda value: 1e-3 <= value <= 1000)
        for name in ("presence_penalty", "frequency_penalty"):
            _check_number(name, getattr(self, name), "from -2 to 2", lambda value: -2 <= value <= 2)
        for name, choices in (("speculation", SPECULATION), ("drafter", DRAFTERS)):
            if getattr(self, name) not in choices:
                raise OptionError(f"{name} is {getattr(self, name)!r}, expected {', '.join(map(repr, choices))}")
        self._check_agreement()
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

    def _check_agreement(self) -> None:
        """No option is accepted and ignored."""
        given = {
            "num_passes": self.num_passes is not None,
            "shortlist": self.shortlist is not None,
            "draft_steps": self.draft_steps != 1,
            "drafter": self.drafter != "block",
        }
        for name, is_given in given.items():
            if is_given and self.speculation == "off":
                raise OptionError(f"{name} is {getattr(self, name)}, and speculation is off; leave one of them out")
            if is_given and name != "drafter" and self.drafter != "block":
                raise OptionError(f"{name} is {getattr(self, name)}, and drafter {self.drafter} has none; leave one of them out")


def _check_integer(name: str, value: object, least: int, most: int | None = None, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        expected = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise OptionError(f"{name} is {value!r}, expected an integer {expected}")


def _check_number(name: str, value: object, expected: str, allowed: Callable[[float], bool]) -> None:
    # An integer may be too large for a float, and none of these numbers is.
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e9 < value < 1e9 or not allowed(value):
        raise OptionError(f"{name} is {value!r}, expected a number {expected}")


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
