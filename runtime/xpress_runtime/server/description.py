"""The description of the interface (OpenAPI): what FastAPI finds by itself, put right where this server does more or less.

Bodies are refused with 400 in the one error shape, every route may ask for a key, and ranges that depend on the bundle are filled in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from xpress_runtime.generation import MAX_SEED
from xpress_runtime.server.limits import OPEN_PATHS
from xpress_runtime.server.problems import ErrorBody
from xpress_runtime.server.work import Service
from xpress_runtime.version import VERSION

UNREADY = "It drains or has failed, and takes no requests."
GENERATION_ERRORS = {
    400: "The body is no JSON, or a field is wrong: error.param names it.",
    404: "Another model was asked for.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    429: "The queue is full.",
    503: UNREADY,
    504: "The request took longer than it may.",
}
MODEL_ERRORS = {404: "Another model was asked for."}
# The native route has no field for the model, and serves the one there is.
_WITHOUT_MODEL = ("/generate",)
_RETRY_HEADER = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}}
# Of each event.
_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string", "description": "JSON, or [DONE]."}},
    "required": ["data"],
}
_MAX_TOKENS = ("max_tokens", "max_completion_tokens")


def answers(
    model: type[BaseModel | str],
    text: str,
    *,
    errors: Mapping[int, str],
    stream: str | None = None,
    media_type: str = "application/json",
) -> dict[int | str, dict[str, Any]]:
    """A route's answers: success, as an event stream too where an example of one is given, and errors."""
    success: dict[str, Any] = {"description": text}
    if isinstance(model, type) and issubclass(model, BaseModel):
        success["model"] = model
    else:
        success["content"] = {media_type: {"schema": {"type": "string"}}}
    if stream is not None:
        success["content"] = {"text/event-stream": {"schema": _EVENT, "example": stream}}
    described: dict[int | str, dict[str, Any]] = {200: success}
    for status, meaning in errors.items():
        described[status] = {"model": ErrorBody, "description": meaning}
        if status in (429, 503):
            described[status]["headers"] = _RETRY_HEADER
    return described


def describe(app: FastAPI, service: Service) -> Callable[[], dict[str, Any]]:
    """What replaces ``app.openapi``."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=VERSION, description=_text(service), routes=app.routes)
            _correct(made, service)
            app.openapi_schema = made
        return app.openapi_schema

    return openapi


def _text(service: Service) -> str:
    session, settings = service.session, service.settings
    limits = session.limits
    timeout = "as long as it takes" if limits.timeout is None else f"at most {limits.timeout:g} seconds"
    prompt = "" if limits.max_prompt_tokens is None else f"A prompt has at most {limits.max_prompt_tokens} tokens. "
    return (
        f"Serves {service.model} with speculative decoding. Prompt and output together have at most {service.capacity} tokens; a request "
        f"may ask for {service.most_tokens} and runs {timeout}. {prompt}{session.slots} requests run at a time and {limits.max_queue} "
        f"wait; one more is answered with 429. A body has at most {settings.max_body_bytes} bytes. Decoding is greedy unless a "
        "temperature is given."
    )


def _correct(made: dict[str, Any], service: Service) -> None:
    made["components"] = components = _whole(made["components"])
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
    secured = bool(service.settings.api_keys)
    for path, operations in made["paths"].items():
        for operation in operations.values():
            responses = operation["responses"]
            responses.pop("422", None)
            for parameter in operation.get("parameters", ()):
                if parameter["name"] == "model":
                    parameter["schema"]["enum"] = [service.model]
            if path in _WITHOUT_MODEL:
                responses.pop("404", None)
            if secured and path not in OPEN_PATHS:
                responses["401"] = {"description": "No valid key came with the request.", "content": error}
                operation["security"] = [{"bearer": []}, {"key": []}]
    for name in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(name, None)
    if secured:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
        }
    _fill_in(components["schemas"], service)


def _whole(value: Any) -> Any:
    """FastAPI makes every bound a float, and 64 bits do not fit into one."""
    if isinstance(value, dict):
        return {name: _whole(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return min(int(value), MAX_SEED) if isinstance(value, float) and value.is_integer() else value


def _fill_in(schemas: dict[str, Any], service: Service) -> None:
    """Ranges that this server's bundle and limits set."""
    manifest = service.session.bundle.manifest
    vocabulary = manifest.target.vocab_size
    built = {"num_passes": sorted(manifest.num_passes), "shortlist": sorted(manifest.shortlists)}
    for name in ("GenerateRequest", "CompletionRequest", "ChatRequest"):
        fields = schemas[name]["properties"]
        for field in _MAX_TOKENS:
            for choice in fields.get(field, {}).get("anyOf", ()):
                if choice.get("type") == "integer" and service.session.limits.max_new_tokens is not None:
                    choice["maximum"] = service.most_tokens
        for field, numbers in built.items():
            fields[field]["anyOf"][0] = {"type": "integer", "enum": numbers}
        for choice in fields.get("prompt", {}).get("anyOf", ()):
            items = choice.get("items", {})
            if items.get("type") == "integer":
                items["maximum"] = vocabulary - 1
                choice["maxItems"] = service.capacity - 1
        if "model" in fields:
            fields["model"]["enum"] = [service.model]
