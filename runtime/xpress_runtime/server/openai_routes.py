"""OpenAI's routes: completions, chat completions and the list of models, as its clients expect them.

Decoding is greedy unless a temperature is given, unlike OpenAI's. Knows the service; knows nothing of the session's rounds.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from sse_starlette import ServerSentEvent

from xpress_runtime.errors import XpressError
from xpress_runtime.generation import GenerationResult
from xpress_runtime.server.bodies import StrictRoute
from xpress_runtime.server.description import GENERATION_ERRORS, MODEL_ERRORS, answers
from xpress_runtime.server.openai_schemas import (
    ChatRequest,
    ChatResponse,
    CompletionRequest,
    CompletionResponse,
    ModelCard,
    ModelList,
    OpenAiRequest,
)
from xpress_runtime.server.problems import ApiError, refused, shown
from xpress_runtime.server.streaming import EventStream, done, event
from xpress_runtime.server.work import Service, Work

COMPLETION_TOKENS = 16
_FIELDS = {name: name for model in (ChatRequest, CompletionRequest) for name in model.model_fields} | {
    "max_new_tokens": "max_tokens",
    "ignore_stop": "ignore_eos",
}
# Part of an answer: its text, the reason why it ended, and whether it is the first.
Choice = Callable[[str, str | None, bool], dict[str, Any]]


def openai_router(service: Service) -> APIRouter:
    """The routes over ``service``."""
    router = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["openai"])

    @router.post(
        "/completions",
        operation_id="create_completion",
        summary="Continue a text",
        responses=answers(CompletionResponse, "The text, or its chunks.", stream=_COMPLETION_EXAMPLE, errors=GENERATION_ERRORS),
    )
    async def completions(body: CompletionRequest, http: Request) -> Response:
        _check_model(service, body.model)
        tokens = service.tokens(body.max_tokens, COMPLETION_TOKENS)
        work = await _submit(service, http, body, body.prompt, tokens)
        head = _head("cmpl", work, "text_completion", service.model)
        if body.stream:
            return EventStream(_chunks(work, head, _completion_choice, body.includes_usage), work)
        result = await work.result_for(http)
        return JSONResponse({**head, "choices": [_completion_choice(result.text, _reason(result), True)], "usage": _usage(work, result)})

    @router.post(
        "/chat/completions",
        operation_id="create_chat_completion",
        summary="Answer a chat",
        responses=answers(ChatResponse, "The answer, or its chunks.", stream=_CHAT_EXAMPLE, errors=GENERATION_ERRORS),
    )
    async def chat_completions(body: ChatRequest, http: Request) -> Response:
        _check_model(service, body.model)
        tokens = _chat_tokens(service, body)
        messages = [message.plain() for message in body.messages]
        work = await _submit(service, http, body, messages, tokens, variables=body.chat_template_kwargs, prompt_field="messages")
        if body.stream:
            head = _head("chatcmpl", work, "chat.completion.chunk", service.model)
            return EventStream(_chunks(work, head, _chat_delta, body.includes_usage, opens=True), work)
        result = await work.result_for(http)
        message = {"role": "assistant", "content": result.text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _reason(result)}
        head = _head("chatcmpl", work, "chat.completion", service.model)
        return JSONResponse({**head, "choices": [choice], "usage": _usage(work, result)})

    @router.get(
        "/models",
        operation_id="list_models",
        summary="List what is served",
        responses=answers(ModelList, "The one model that is served.", errors={}),
    )
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_card(service)]})

    @router.get(
        "/models/{model}",
        operation_id="retrieve_model",
        summary="Show a model",
        responses=answers(ModelCard, "The model.", errors=MODEL_ERRORS),
    )
    async def model_without_slash(model: str) -> Response:
        _check_model(service, model)
        return JSONResponse(_card(service))

    # Names may hold slashes; the description has no way to say so.
    @router.get("/models/{model:path}", include_in_schema=False)
    async def model_with_slashes(model: str) -> Response:
        _check_model(service, model)
        return JSONResponse(_card(service))

    return router


def _check_model(service: Service, model: str) -> None:
    if model != service.model:
        message = f"the model {shown(model)} is not served here; this server has {shown(service.model)}"
        raise ApiError(404, message, param="model", code="model_not_found")


def _chat_tokens(service: Service, body: ChatRequest) -> int:
    """Both names are limits, and both hold."""
    tokens = service.tokens(body.max_tokens, service.capacity)
    return min(tokens, service.tokens(body.max_completion_tokens, service.capacity, "max_completion_tokens"))


async def _submit(
    service: Service,
    http: Request,
    body: OpenAiRequest,
    prompt: Any,
    tokens: int,
    *,
    variables: dict[str, Any] | None = None,
    prompt_field: str = "prompt",
) -> Work:
    try:
        config = body.config(tokens, ignore_stop=bool(body.ignore_eos))
        return await service.submit(http, prompt, config, chat_variables=variables, prompt_field=prompt_field, fields=_FIELDS)
    except XpressError as problem:
        raise refused(problem, _FIELDS) from None


async def _chunks(work: Work, head: dict[str, Any], choice: Choice, usage: bool, *, opens: bool = False) -> AsyncIterator[ServerSentEvent]:
    """A stream as OpenAI's: with ``opens`` a chunk without text, then text, the reason of the end, and the usage where asked for."""
    # Chunks before the last one say that they bring none.
    extra = {"usage": None} if usage else {}
    if opens:
        yield event({**head, "choices": [choice("", None, True)], **extra})
    async for step in work.steps():
        if step.text:
            yield event({**head, "choices": [choice(step.text, None, False)], **extra})
    try:
        result = await work.result()
    except XpressError as problem:
        yield event(refused(problem, _FIELDS).body())
    else:
        yield event({**head, "choices": [choice("", _reason(result), False)], **extra})
        if usage:
            yield event({**head, "choices": [], "usage": _usage(work, result)})
    yield done()


def _head(prefix: str, work: Work, kind: str, model: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{work.request.id}", "object": kind, "created": int(time.time()), "model": model}


def _completion_choice(text: str, reason: str | None, first: bool) -> dict[str, Any]:  # noqa: ARG001
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}


def _chat_delta(text: str, reason: str | None, first: bool) -> dict[str, Any]:
    delta = {"role": "assistant", "content": ""} if first else {} if reason is not None else {"content": text}
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}


def _reason(result: GenerationResult) -> str:
    """OpenAI has one word for both limits."""
    return "length" if result.finish_reason == "capacity" else result.finish_reason


def _usage(work: Work, result: GenerationResult) -> dict[str, Any]:
    prompt, completion, stats = work.request.prompt_tokens, len(result.tokens), result.stats
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "completion_tokens_details": {
            "accepted_prediction_tokens": stats.accepted,
            "rejected_prediction_tokens": stats.proposed - stats.accepted,
        },
        "speculation": {
            "rounds": stats.rounds,
            "proposed": stats.proposed,
            "accepted": stats.accepted,
            "acceptance_rate": stats.acceptance_rate,
            "mean_acceptance_length": stats.mean_acceptance_length,
        },
    }


def _card(service: Service) -> dict[str, Any]:
    created = service.settings.model_created
    return {"id": service.model, "object": "model", "created": created, "owned_by": "xpress-export", "max_model_len": service.capacity}


_COMPLETION_EXAMPLE = (
    'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"served-model",'
    '"choices":[{"index":0,"text":" there","logprobs":null,"finish_reason":null}]}\n\ndata: [DONE]\n\n'
)
_CHAT_EXAMPLE = (
    'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"served-model",'
    '"choices":[{"index":0,"delta":{"content":"Light"},"logprobs":null,"finish_reason":null}]}\n\ndata: [DONE]\n\n'
)
