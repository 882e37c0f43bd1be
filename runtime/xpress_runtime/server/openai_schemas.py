"""OpenAI's requests and answers, as far as they are served.

Fields that would change the output and are not served are refused by name; those without effect, and unknown ones, are ignored, as
clients send many of them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator

from xpress_runtime.server.problems import wrong
from xpress_runtime.server.schemas import STRICT, Message, NonEmptyIds, NonEmptyText, Settings, Tokens, Unserved, token_ids


class StreamOptions(BaseModel):
    """What a stream brings beside its text."""

    model_config = STRICT

    include_usage: bool | None = Field(None, description="One more chunk at the end, with the usage.")


class OpenAiRequest(Settings):
    """What both of OpenAI's routes take, with this server's extensions."""

    model: str = Field(description="The name that /v1/models lists.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = Field(None, description="Go on past stop tokens to max_tokens.")
    n: Annotated[Any, Unserved(1, instead="send the request several times")] = None
    logit_bias: Annotated[Any, Unserved({})] = None
    top_logprobs: Annotated[Any, Unserved(0)] = None
    prompt_logprobs: Annotated[Any, Unserved()] = None
    # Of other servers with OpenAI's routes.
    min_tokens: Annotated[Any, Unserved(0)] = None
    length_penalty: Annotated[Any, Unserved(1, 1.0)] = None
    use_beam_search: Annotated[Any, Unserved(False)] = None
    bad_words: Annotated[Any, Unserved([])] = None
    allowed_token_ids: Annotated[Any, Unserved()] = None
    structured_outputs: Annotated[Any, Unserved()] = None
    guided_json: Annotated[Any, Unserved()] = None
    guided_regex: Annotated[Any, Unserved()] = None
    guided_choice: Annotated[Any, Unserved()] = None
    guided_grammar: Annotated[Any, Unserved()] = None
    truncate_prompt_tokens: Annotated[Any, Unserved()] = None

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def _completion_prompt(value: Any) -> str | list[int]:
    expected = "text or a list of token ids: one prompt per request"
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, list) or not value or isinstance(value[0], str | list):
        raise wrong(expected, value)
    return token_ids(value, "a token id")


class CompletionRequest(OpenAiRequest):
    """A text completion."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"model": "served-model", "prompt": "Once upon a time", "max_tokens": 64}]})

    prompt: Annotated[
        str | list[int],
        PlainValidator(
            _completion_prompt,
            json_schema_input_type=NonEmptyText | NonEmptyIds | Annotated[list[NonEmptyText], Field(min_length=1, max_length=1)],
        ),
    ] = Field(description="Text as it is, or token ids. One prompt per request.")
    max_tokens: Tokens | None = Field(None, description="Tokens to generate at most; the default is 16, as OpenAI's.")
    best_of: Annotated[Any, Unserved(1)] = None
    echo: Annotated[Any, Unserved(False)] = None
    suffix: Annotated[Any, Unserved()] = None
    logprobs: Annotated[Any, Unserved()] = None


class ChatRequest(OpenAiRequest):
    """A chat completion."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "served-model", "messages": [{"role": "user", "content": "Explain rainbows."}]}]}
    )

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Tokens | None = Field(None, description="Tokens to generate at most; the default is all that the capacity leaves.")
    max_completion_tokens: Tokens | None = Field(None, description="The same under its newer name; the lower of both holds.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None,
        description="Variables for the chat template, such as enable_thinking.",
        json_schema_extra={"examples": [{"enable_thinking": False}]},
    )
    logprobs: Annotated[Any, Unserved(False)] = None
    tools: Annotated[Any, Unserved([])] = None
    tool_choice: Annotated[Any, Unserved("none", "auto")] = None
    functions: Annotated[Any, Unserved([])] = None
    function_call: Annotated[Any, Unserved("none", "auto")] = None
    response_format: Annotated[Any, Unserved({"type": "text"})] = None
    modalities: Annotated[Any, Unserved(["text"])] = None
    audio: Annotated[Any, Unserved()] = None
    web_search_options: Annotated[Any, Unserved()] = None
    reasoning_effort: Annotated[Any, Unserved(instead="chat_template_kwargs may switch thinking")] = None
    verbosity: Annotated[Any, Unserved()] = None
    chat_template: Annotated[Any, Unserved()] = None
    documents: Annotated[Any, Unserved([])] = None
    add_generation_prompt: Annotated[Any, Unserved(True)] = None
    continue_final_message: Annotated[Any, Unserved(False)] = None


class TokenDetails(BaseModel):
    """What became of drafted tokens."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class SpeculationUsage(BaseModel):
    """How a generation was speculated."""

    rounds: int
    proposed: int
    accepted: int
    acceptance_rate: float | None
    mean_acceptance_length: float | None


class Usage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: TokenDetails
    speculation: SpeculationUsage


FinishReason = Literal["stop", "length"]


class AnswerMessage(BaseModel):
    """What the assistant says."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    """The only choice of a chat completion."""

    index: Literal[0]
    message: AnswerMessage
    logprobs: None
    finish_reason: FinishReason


class ChatResponse(BaseModel):
    """A finished chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: Annotated[list[ChatChoice], Field(min_length=1, max_length=1)]
    usage: Usage


class CompletionChoice(BaseModel):
    """The only choice of a text completion."""

    index: Literal[0]
    text: str
    logprobs: None
    finish_reason: FinishReason


class CompletionResponse(BaseModel):
    """A finished text completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: Annotated[list[CompletionChoice], Field(min_length=1, max_length=1)]
    usage: Usage


class ModelCard(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int = Field(description="Tokens of prompt and output together.")


class ModelList(BaseModel):
    """All models that are served: one."""

    object: Literal["list"]
    data: list[ModelCard]
