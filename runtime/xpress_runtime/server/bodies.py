"""Request bodies as strict JSON: what Python's reader lets through and JSON does not know is refused, with the place where it stands.

NaN and infinities, numbers without end, keys given twice, text that is not Unicode and nesting without end never reach a model.
"""

from __future__ import annotations

import email.message
import json
import math
import re
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute

from xpress_runtime.server.problems import MAX_SHOWN, ApiError, one_line, path_of, shown

MAX_DEPTH = 64
MAX_DIGITS = 300
MAX_EXACT = 2**53
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_HALF = "half a character (a lone surrogate)"


class StrictRoute(APIRoute):
    """A route whose body is JSON, strictly, and says so in its content type."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        takes_body = self.body_field is not None

        async def strictly(request: Request) -> Response:
            if not takes_body:
                return await handle(request)
            _check_content_type(request.headers.get("content-type"))
            return await handle(_StrictRequest(request.scope, request.receive))

        return strictly


class _StrictRequest(Request):
    async def json(self) -> Any:
        return read_json(await self.body())


def read_json(content: bytes) -> Any:
    """The value of a body. Raises ApiError 400."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise _bad(f"the body is not UTF-8: {problem.reason} at byte {problem.start}") from None
    try:
        value = json.loads(
            text, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_bounded, object_pairs_hook=_without_duplicates
        )
        _check_depth(value)
        # UTF-8 has no halves of characters; only escapes can spell one.
        if _SURROGATE.search(text):
            _check_text(value, [])
    except json.JSONDecodeError as problem:
        raise _bad(f"the body is not JSON: {problem.msg} at character {problem.pos}") from None
    except RecursionError:
        raise _bad(f"the body is nested too deeply, expected at most {MAX_DEPTH} levels") from None
    return value


def _check_content_type(given: str | None) -> None:
    # Also where none is given: a page of another origin may send a body without, and would not be asked about it first.
    header = email.message.Message()
    header["content-type"] = given or "none/none"
    if header.get_content_type() != "application/json":
        arrived = "missing" if given is None else shown(given)
        raise ApiError(415, f"content-type is {arrived}, expected application/json", param="content-type", code="unsupported_media_type")
    charset = header.get_content_charset()
    if charset is not None and charset not in ("utf-8", "utf8"):
        raise ApiError(415, f"the body's charset is {shown(charset)}, expected utf-8", param="content-type", code="unsupported_media_type")


def _bad(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_json")


def _refuse_constant(name: str) -> NoReturn:
    raise _bad(f"the body holds {name}, which is not a JSON number; expected finite numbers")


def _finite(digits: str) -> float | int:
    number = float(digits)
    if not math.isfinite(number):
        raise _bad(f"the body holds the number {one_line(digits, MAX_SHOWN)}, expected one that fits 64 bits")
    # JSON has one kind of number: 3.0 is an integer, and some languages write them so.
    return int(number) if number.is_integer() and abs(number) <= MAX_EXACT else number


def _bounded(digits: str) -> int:
    # By its length first: Python takes long over thousands of digits. What fits no float is no number to most readers of JSON.
    if len(digits) > MAX_DIGITS:
        raise _bad(f"the body holds the integer {one_line(digits, MAX_SHOWN)}, expected at most {MAX_DIGITS} digits")
    return int(digits)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        seen: set[str] = set()
        for name, _value in pairs:
            if name in seen:
                raise _bad(f"the body holds the field {shown(name)} more than once, expected it once")
            seen.add(name)
    return fields


def _check_depth(value: Any) -> None:
    """Whoever walks through a value later, by recursion, gets to its end."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [item for inner in level for item in _items(inner) if isinstance(item, dict | list)]
        if not level:
            return
    raise RecursionError


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _check_text(value: Any, place: list[int | str]) -> None:
    """Text must be Unicode: half a character of UTF-16, which JSON can spell, is none."""
    if isinstance(value, str):
        if not _is_unicode(value):
            raise _bad(f"{path_of(place) or 'the body'} is {shown(value)}, which holds {_HALF}; expected Unicode text")
    elif isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(key, str) and not _is_unicode(key):
                raise _bad(f"the body holds a field named {shown(key)}, which has {_HALF}; expected Unicode text")
            _check_text(item, [*place, key])


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
