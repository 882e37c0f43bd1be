"""``POST /generate``: this server's own route, with all settings, token ids and where each token came from."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from sse_starlette import ServerSentEvent

from xpress_runtime.errors import XpressError
from xpress_runtime.generation import GenerationResult
from xpress_runtime.server.bodies import StrictRoute
from xpress_runtime.server.description import GENERATION_ERRORS, answers
from xpress_runtime.server.problems import refused
from xpress_runtime.server.schemas import GenerateRequest, GenerateResponse, Message
from xpress_runtime.server.streaming import EventStream, event
from xpress_runtime.server.work import Service, Work
from xpress_runtime.serving import Step
from xpress_runtime.stats import Stage

DEFAULT_TOKENS = 128
# Milliseconds and shares are told with this many.
_DIGITS = 4
# GenerationConfig's names that are others here.
_FIELDS = {name: name for name in GenerateRequest.model_fields} | {"max_new_tokens": "max_tokens"}


def generate_router(service: Service) -> APIRouter:
    """The route over ``service``."""
    router = APIRouter(route_class=StrictRoute, tags=["native"])

    @router.post(
        "/generate",
        operation_id="generate",
        summary="Generate, with all settings",
        responses=answers(GenerateResponse, "The finished generation, or its events.", stream=_STREAM_EXAMPLE, errors=GENERATION_ERRORS),
    )
    async def generate(body: GenerateRequest, http: Request) -> Response:
        prompt, is_chat = _prompt(service, body)
        try:
            config = body.config(service.tokens(body.max_tokens, DEFAULT_TOKENS), ignore_stop=body.ignore_stop)
            variables = service.thinking(body.thinking, is_chat=is_chat)
            work = await service.submit(http, prompt, config, chat_variables=variables, timeout=body.timeout, fields=_FIELDS)
        except XpressError as problem:
            raise refused(problem, _FIELDS) from None
        if body.stream:
            return EventStream(_events(work), work)
        return JSONResponse(_response(work, await work.result_for(http)))

    return router


def _prompt(service: Service, body: GenerateRequest) -> tuple[Any, bool]:
    """The prompt as the session takes it, and whether it is a chat."""
    prompt = body.prompt
    if isinstance(prompt, str):
        if body.raw or not service.has_template:
            return prompt, False
        return [{"role": "user", "content": prompt}], True
    messages = [message.plain() for message in prompt if isinstance(message, Message)]
    return (messages, True) if messages else (prompt, False)


async def _events(work: Work) -> AsyncIterator[ServerSentEvent]:
    async for step in work.steps():
        yield event(_step(step), "step")
    try:
        result = await work.result()
    except XpressError as problem:
        yield event(refused(problem, _FIELDS).body(), "error")
    else:
        yield event(_response(work, result), "done")


def _step(step: Step) -> dict[str, Any]:
    milliseconds = {f"{stage.value}_ms": _milliseconds(seconds) for stage, seconds in step.seconds.items()}
    if Stage.PREFILL in step.seconds:
        milliseconds = {"prefill_ms": milliseconds["prefill_ms"]}
    else:
        milliseconds = {name: milliseconds.get(name, 0.0) for name in ("draft_ms", "refine_ms", "verify_ms")}
    return {
        "text": step.text,
        "tokens": [{"id": token.id, "text": token.text, "origin": token.origin} for token in step.tokens],
        "proposed": step.proposed,
        "accepted": step.accepted,
        **milliseconds,
    }


def _response(work: Work, result: GenerationResult) -> dict[str, Any]:
    request, stats = work.request, result.stats
    return {
        "id": request.id,
        "output": result.text,
        "tokens": list(result.tokens),
        "accepted_tokens": stats.accepted,
        "finish_reason": result.finish_reason,
        "prompt_tokens": request.prompt_tokens,
        "output_tokens": len(result.tokens),
        "stats": _rounded(stats.to_json()),
        "queued_ms": _milliseconds(request.queued_seconds),
        "time_to_first_token_ms": _milliseconds(request.first_token_seconds),
        "total_ms": _milliseconds(request.total_seconds),
    }


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, _DIGITS)


def _rounded(stats: dict[str, Any]) -> dict[str, Any]:
    """Without digits that no clock and no count of rounds has."""
    found = {name: round(value, _DIGITS) if isinstance(value, float) else value for name, value in stats.items()}
    found["acceptance_by_position"] = [round(share, _DIGITS) for share in stats["acceptance_by_position"]]
    return found


_STREAM_EXAMPLE = (
    'event: step\ndata: {"text":" A","tokens":[{"id":330,"text":" A","origin":"drafter"}],"proposed":7,"accepted":1,'
    '"draft_ms":2.1,"refine_ms":0.8,"verify_ms":9.4}\n\nevent: done\ndata: {"id":"…","output":" A","tokens":[330],…}\n\n'
)
