"""Errors as HTTP answers: one shape, OpenAI's, for whatever goes wrong.

A message is one line of printable text that names the field, what arrived and what was expected. Knows what the session raises; knows
nothing of what routes do.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException

from xpress_runtime.errors import BundleError, EnvironmentProblem, PromptError, UserError, XpressError
from xpress_runtime.serving import Draining, QueueFull, RequestCancelled, RequestTimedOut

logger = logging.getLogger("xpress_runtime.server")

MAX_SHOWN = 80
MAX_MESSAGE = 1000
# Seconds after which a draining or failed server may have been replaced.
RETRY_SECONDS = 10
CLIENT_GONE = 499

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_CODES = {404: "not_found", 405: "method_not_allowed"}
_EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "a JSON object",
    "float_type": "a number",
    "greater_than": "a number over {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "int_type": "an integer",
    "less_than_equal": "a number of at most {le}",
    "list_type": "a list",
    "model_attributes_type": "a JSON object",
    "model_type": "a JSON object",
    "string_type": "text",
    "too_long": "a list of at most {max_length}",
    "too_short": "a list of at least {min_length}",
}


class ErrorDetail(BaseModel):
    """What went wrong."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": False})

    message: str = Field(description="One line: the field, what arrived, what was expected.")
    type: str = Field(description="invalid_request_error, authentication_error, rate_limit_error or server_error.")
    param: str | None = Field(description="The field that is wrong, where it is one.")
    code: str | None = Field(description="A word for programs, such as model_not_found or queue_full.")


class ErrorBody(BaseModel):
    """The body of every answer that is no success."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": False})

    error: ErrorDetail


class ApiError(HTTPException):
    """An answer other than success. ``retry_after`` is in seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        fields = dict(headers or {})
        if retry_after is not None:
            fields["Retry-After"] = str(max(1, math.ceil(retry_after)))
        super().__init__(status, message, fields or None)
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The JSON that tells it."""
        kind = _TYPES.get(self.status_code) or ("server_error" if self.status_code >= 500 else "invalid_request_error")
        param = None if self.param is None else one_line(self.param, MAX_SHOWN)
        return {"error": {"message": one_line(self.detail), "type": kind, "param": param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status_code, self.headers)


def one_line(text: str, limit: int = MAX_MESSAGE) -> str:
    """Text as one printable line of at most ``limit`` characters, that UTF-8 can hold."""
    line = "".join(character if character.isprintable() else _escaped(character) for character in " ".join(text.split()))
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def shown(value: Any) -> str:
    """What arrived, as JSON in ASCII, shortened."""
    text = json.dumps(value, default=lambda other: type(other).__name__)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


def wrong(expected: str, value: Any, where: str = "") -> PydanticCustomError:
    """What a validator raises. ``where``: the part of the field that is wrong, such as ``[2]``."""
    return PydanticCustomError("wrong", "expected {expected}", {"expected": expected, "arrived": shown(value), "where": where})


def path_of(parts: Sequence[int | str]) -> str:
    """A place in a body, such as ``messages[0].content``."""
    name = ""
    for part in parts:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    return name


def disagreement(field: str, message: str, code: str = "invalid_value") -> PydanticCustomError:
    """What a validator raises that says it all itself."""
    return PydanticCustomError("said", "{message}", {"message": message, "field": field, "code": code})


def invalid(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first of pydantic's findings in a body, as an answer."""
    error = errors[0]
    kind, context = error["type"], error.get("ctx") or {}
    if kind == "said":
        return ApiError(400, context["message"], param=context["field"], code=context["code"])
    place = list(error["loc"][1:] if error["loc"][:1] == ("body",) else error["loc"])
    field = path_of(place)
    param, name = field or None, one_line(field, MAX_SHOWN) or "the body"
    if kind == "wrong":
        name = f"{name}{context['where']}" if field or not context["where"] else context["where"]
        return ApiError(400, f"{name} is {context['arrived']}, expected {context['expected']}", param=param, code="invalid_value")
    if kind == "missing" and field:
        return ApiError(400, f"{name} is missing, and it is required", param=param, code="missing_field")
    if kind == "missing":
        return ApiError(400, "the body is empty, expected a JSON object", code="invalid_value")
    return ApiError(400, f"{name} is {shown(error.get('input'))}, expected {expectation(error)}", param=param, code="invalid_value")


def expectation(error: Mapping[str, Any]) -> str:
    """What pydantic would have taken instead, after "expected"."""
    kind, context = error["type"], error.get("ctx") or {}
    if kind in _EXPECTED:
        # Bounds are floats where one of them may be.
        plain = {name: int(value) if isinstance(value, float) and value.is_integer() else value for name, value in context.items()}
        return _EXPECTED[kind].format(**plain)
    return str(error["msg"]).removeprefix("Input should be ")


def refused(problem: XpressError, fields: Mapping[str, str] | None = None, *, prompt: str = "prompt") -> ApiError:
    """What the session raised, as an answer. ``fields``: names of a generation's settings → those of the request."""
    message = str(problem)
    if isinstance(problem, QueueFull):
        return ApiError(429, message, code="queue_full", retry_after=problem.retry_after)
    if isinstance(problem, Draining):
        return ApiError(503, message, code="draining", retry_after=RETRY_SECONDS)
    if isinstance(problem, RequestTimedOut):
        return ApiError(504, message, code="timeout")
    if isinstance(problem, RequestCancelled):
        return ApiError(503, message, code="cancelled", retry_after=RETRY_SECONDS)
    if isinstance(problem, PromptError):
        return ApiError(400, message, param=prompt, code="invalid_value")
    if isinstance(problem, BundleError):
        # Of whoever runs the server, and its paths are not for clients.
        logger.error("%s", problem)
        return ApiError(500, "a part of the model that this request needs cannot be loaded; the server's log names it", code="bundle")
    if isinstance(problem, UserError):
        name, space, rest = message.partition(" ")
        known = (fields or {}).get(name)
        return ApiError(400, f"{known}{space}{rest}" if known else message, param=known, code="invalid_value")
    if isinstance(problem, EnvironmentProblem):
        # The session's thread ended. Another server may do better.
        return ApiError(503, message, code="failed", retry_after=RETRY_SECONDS)
    return ApiError(500, message, code="internal_error")


def install_handlers(app: FastAPI) -> None:
    """Every error of ``app`` in the one shape."""

    async def on_api_error(request: Request, problem: Exception) -> Response:
        assert isinstance(problem, HTTPException)
        if isinstance(problem, ApiError):
            return problem.response()
        status = problem.status_code
        message = {
            404: f"{shown(request.url.path)} does not exist here; /openapi.json lists what does",
            405: f"{request.method} is not served at {shown(request.url.path)}; the Allow header lists what is",
        }.get(status, str(problem.detail))
        return ApiError(status, message, code=_CODES.get(status), headers=problem.headers).response()

    async def on_invalid(request: Request, problem: Exception) -> Response:  # noqa: ARG001, the signature is starlette's
        assert isinstance(problem, RequestValidationError)
        return invalid(problem.errors()).response()

    async def on_refused(request: Request, problem: Exception) -> Response:  # noqa: ARG001
        assert isinstance(problem, XpressError)
        return refused(problem).response()

    async def on_defect(request: Request, problem: Exception) -> Response:  # noqa: ARG001
        # What it was stays in the log: a traceback may hold paths and prompts.
        return ApiError(500, f"{HTTPStatus(500).phrase}: a defect of the server; its log has the details", code="internal_error").response()

    app.add_exception_handler(HTTPException, on_api_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(XpressError, on_refused)
    app.add_exception_handler(Exception, on_defect)
