"""What the routes take and give beside OpenAI's own: the settings of a generation, chat messages, ``/generate``, and the states.

Ranges stand here as well as in ``GenerationConfig``, because the description of the interface is made of them.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from xpress_runtime.generation import MAX_DRAFT_STEPS, MAX_SEED, MAX_TOP_K, GenerationConfig, Speculation
from xpress_runtime.server.problems import disagreement, expectation, path_of, shown, wrong

MAX_TOKENS = 2**31 - 1
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1000
MAX_STOP_TOKENS = 1024
MIN_SECONDS, MAX_SECONDS = 1e-3, 86400.0

Role = Literal["system", "developer", "user", "assistant"]

STRICT = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


def _stops(value: Any) -> list[str]:
    expected = f"a string or a list of at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARACTERS} characters"
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise wrong(expected, value)
    for index, stop in enumerate(stops):
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise wrong(expected, stop, f"[{index}]" if isinstance(value, list) else "")
    return stops


def _content(value: Any) -> str:
    """Parts become one text, each on a line of its own: many templates know text only."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise wrong("text or a list of parts of type text", value)
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            raise wrong("a part of type text", kind, f"[{index}].type" if isinstance(part, dict) else f"[{index}]")
        if not isinstance(part.get("text"), str):
            raise wrong("text", part.get("text"), f"[{index}].text")
    return "\n".join(part["text"] for part in value)


class TextPart(BaseModel):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Unserved:
    """A field that would change the output and is not served: only ``neutral`` values pass, those that ask for nothing."""

    def __init__(self, *neutral: Any, instead: str = "") -> None:
        self._neutral = (None, *neutral)
        self._instead = f"; {instead}" if instead else ""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"enum": list(self._neutral), "description": "Not served: any other value is refused."}

    def _check(self, value: Any) -> None:
        # By spelling: 1, 1.0 and true are equal in Python.
        spelled = [shown(neutral) for neutral in self._neutral]
        if shown(value) not in spelled:
            only = " or ".join(spelled[1:])
            raise wrong(f"{'it to be left out' if not only else f'{only} or nothing'}, because it is not served here{self._instead}", value)


Stops = Annotated[
    list[str],
    PlainValidator(_stops),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS},
                {
                    "type": "array",
                    "maxItems": MAX_STOPS,
                    "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS},
                },
                {"type": "null"},
            ],
            "description": "Strings that end the text; they are not part of it.",
        }
    ),
]
Content = Annotated[str, PlainValidator(_content, json_schema_input_type=str | Annotated[list[TextPart], Field(min_length=1)])]
NonEmptyText = Annotated[str, Field(min_length=1)]
StopToken = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
NonEmptyIds = Annotated[list[StopToken], Field(min_length=1)]
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]


class Message(BaseModel):
    """One message of a chat. Other fields than these are left out."""

    model_config = STRICT

    role: Role = Field(description="developer is another name of system.")
    content: Content = Field(description="Text, or parts of type text, which become lines of one text.")
    reasoning_content: str | None = Field(None, description="An assistant's thoughts, for chat templates that show them again.")
    tool_calls: Annotated[Any, Unserved([])] = None
    function_call: Annotated[Any, Unserved()] = None
    audio: Annotated[Any, Unserved()] = None

    def plain(self) -> dict[str, str]:
        """As the session takes it."""
        message = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        return message if self.reasoning_content is None else {**message, "reasoning_content": self.reasoning_content}


class Settings(BaseModel):
    """Settings of a generation that every route takes. null stands for the default."""

    model_config = STRICT

    temperature: Annotated[float, Field(ge=0, le=100, json_schema_extra={"anyOf": [{"const": 0}, {"minimum": 1e-6}]})] | None = Field(
        None, description="0, the default: the most likely token every time; over 0: sampling."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description="Sample from the fewest tokens with this much probability.")
    top_k: Annotated[int, Field(ge=1, le=MAX_TOP_K)] | None = Field(None, description="Sample from this many of the most likely tokens.")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(None, description="Leave out tokens less likely than this times the best.")
    repetition_penalty: Annotated[float, Field(ge=1e-3, le=1000)] | None = Field(
        None, description="Over 1: against tokens of prompt and output."
    )
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = Field(None, description="Against tokens that the output has.")
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = Field(None, description="The same, for each time it has them.")
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = Field(None, description="The same seed samples the same text.")
    stop: Stops = Field(default_factory=list)
    stop_token_ids: Annotated[list[StopToken], Field(max_length=MAX_STOP_TOKENS)] | None = Field(
        None, description="Token ids that end the text beside the model's own."
    )
    speculation: Speculation | None = Field(None, description="auto, the default: as far as it pays; on; off: plain decoding.")
    num_passes: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = Field(None, description="Refinement passes, among those built.")
    shortlist: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = Field(None, description="Candidates of a slot, among those built.")
    draft_steps: Annotated[int, Field(ge=1, le=MAX_DRAFT_STEPS)] | None = Field(None, description="Denoising steps of a block.")

    def config(self, max_tokens: int, *, ignore_stop: bool) -> GenerationConfig:
        """What was asked for. Raises OptionError."""
        sampling = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed")
        names = (*sampling, "stop_token_ids", "num_passes", "shortlist", "draft_steps")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return GenerationConfig(
            max_new_tokens=max_tokens, stop=self.stop, ignore_stop=ignore_stop, speculation=self.speculation or "auto", **given
        )


def _prompt(value: Any) -> str | list[int] | list[Message]:
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, list) or not value:
        raise wrong("text, a list of token ids or a list of chat messages", value)
    if isinstance(value[0], dict):
        return _messages(value)
    return token_ids(value, "a token id; a prompt is text, token ids or chat messages")


def token_ids(value: list[Any], expected: str) -> list[int]:
    """``value`` itself where all of it are token ids of some model; a validator's error otherwise."""
    for index, token in enumerate(value):
        if type(token) is not int or not 0 <= token <= MAX_TOKENS:
            raise wrong(expected, token, f"[{index}]")
    return value


def _messages(value: Sequence[Any]) -> list[Message]:
    messages = []
    for index, item in enumerate(value):
        try:
            messages.append(Message.model_validate(item))
        except ValidationError as problem:
            raise _inside(problem, index) from None
    return messages


def _inside(problem: ValidationError, index: int) -> PydanticCustomError:
    """A message's own error as one of the field that holds it."""
    error = problem.errors(include_url=False)[0]
    context = error.get("ctx", {})
    place = path_of(["x", index, *error["loc"]])[1:]
    if error["type"] == "wrong":
        return PydanticCustomError("wrong", "expected {expected}", {**context, "where": place + context["where"]})
    if error["type"] == "missing":
        return wrong(f"a message with the field {error['loc'][-1]}", error["input"], f"[{index}]")
    return wrong(expectation(error), error["input"], place)


Prompt = Annotated[
    str | list[int] | list[Message],
    PlainValidator(_prompt, json_schema_input_type=NonEmptyText | NonEmptyIds | Annotated[list[Message], Field(min_length=1)]),
]


class GenerateRequest(Settings):
    """A generation. Fields that are not listed are refused."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        json_schema_extra={"examples": [{"prompt": "Explain rainbows.", "max_tokens": 64}]},
    )

    prompt: Prompt = Field(description="Text, token ids or chat messages. Text is sent as a chat message where the bundle has a template.")
    max_tokens: Tokens | None = Field(None, description="Tokens to generate at most; the default is 128.")
    stream: bool = Field(False, description="Answer with server-sent events: step, then done or error.")
    raw: bool = Field(False, description="Send text as it is, without the chat template.")
    ignore_stop: bool = Field(False, description="Go on past stop tokens to max_tokens.")
    thinking: bool | None = Field(None, description="Switch thinking in a chat, where the template can.")
    timeout: Annotated[float, Field(ge=MIN_SECONDS, le=MAX_SECONDS)] | None = Field(
        None, description="Seconds from arrival to the end; the server's own limit holds beside it."
    )

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        for name in value if isinstance(value, dict) else ():
            if name not in cls.model_fields:
                near = difflib.get_close_matches(name[:100], cls.model_fields, 1)
                hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(cls.model_fields)}"
                raise disagreement(name, f"{shown(name)} is no field of this request; {hint}", "unknown_field")
        return value

    @model_validator(mode="after")
    def _agreeing(self) -> Self:
        if self.raw and isinstance(self.prompt, list) and self.prompt and isinstance(self.prompt[0], Message):
            raise disagreement("raw", "raw is true, and the prompt is chat messages; leave out raw, or give text or token ids")
        return self


class GenerateStats(BaseModel):
    """Acceptance and times of one generation; times in milliseconds."""

    prompt_tokens: int
    output_tokens: int
    speculation: str
    drafter: str | None
    num_passes: int | None
    shortlist: int | None
    draft_steps: int | None
    seed: int | None
    rounds: int
    proposed: int
    accepted: int
    acceptance_rate: float | None
    mean_acceptance_length: float | None
    acceptance_by_position: list[float]
    width_counts: dict[str, int]
    prefill_ms: float
    time_to_first_token_ms: float
    draft_ms: float
    refine_ms: float
    verify_ms: float
    host_ms: float
    decode_ms: float
    ms_per_token: float | None
    tokens_per_second: float | None
    peak_memory_bytes: int | None


class GenerateResponse(BaseModel):
    """A finished generation. ``tokens`` include the stop token, or those of the stop string; ``output`` ends before it."""

    id: str
    output: str
    tokens: list[int]
    accepted_tokens: int = Field(description="Drafted tokens among the output's.")
    finish_reason: Literal["stop", "length", "capacity"]
    prompt_tokens: int
    output_tokens: int
    stats: GenerateStats
    queued_ms: float | None
    time_to_first_token_ms: float | None = Field(description="Since the request arrived.")
    total_ms: float | None


class State(BaseModel):
    """How the server is."""

    status: Literal["alive", "ready"]
    slots: int
    running: int
    reading: int
    queued: int
    uptime_seconds: float
