"""One line of a batch: from bytes to a checked request, and the digest that tells whether it is still the same.

Knows the fields; knows nothing of files, and nothing of the bundle: what only that can tell (capacity, vocabulary, chat template) shows
when the job runs. OpenAI's lines are translated by :mod:`xpress_runtime.jobs.openai`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from xpress_runtime.errors import OptionError, UserError
from xpress_runtime.generation import GenerationConfig

JobId = str | int

MAX_ID_LENGTH = 512
_MAX_INTEGER_ID = 2**63

# Field of a line → field of GenerationConfig.
GENERATION_FIELDS = {
    "max_tokens": "max_new_tokens",
    **{
        name: name
        for name in (
            *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_stop"),
            *("repetition_penalty", "presence_penalty", "frequency_penalty"),
            *("speculation", "num_passes", "shortlist", "draft_steps"),
        )
    },
}
_FIELDS = ("id", "prompt", "messages", *GENERATION_FIELDS, "raw", "thinking")


class JobError(UserError):
    """A line that is no job; the message says what is wrong with it."""


@dataclass(frozen=True)
class Job:
    """A checked request.

    ``prompt``: text, token ids or chat messages. ``raw``: text stays as it is; otherwise it becomes a chat message where the bundle has a
    template. ``thinking``: None for the template's own; ``variables`` go to the template.
    """

    id: JobId
    prompt: str | list[int] | list[dict[str, Any]]
    config: GenerationConfig
    digest: bytes
    raw: bool = False
    thinking: bool | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


def read_line(line: bytes) -> dict[str, Any]:
    """The JSON object of a line; JobError."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise JobError(f"not UTF-8: {problem.reason} at byte {problem.start + 1} of the line") from None
    try:
        values = json.loads(text, parse_constant=_no_number, object_pairs_hook=_object)
    except JobError:
        raise
    except json.JSONDecodeError as problem:
        raise JobError(f"not JSON: {problem.msg} at column {problem.colno}") from None
    except RecursionError:
        raise JobError("not JSON: nested too deeply") from None
    except ValueError:
        # The one that is left: Python refuses to read integers of thousands of digits.
        raise JobError("not JSON: an integer of thousands of digits") from None
    if not isinstance(values, dict):
        raise JobError(f"a JSON {type(values).__name__}, expected an object with id and prompt")
    return values


def parse_job(values: Mapping[str, Any]) -> Job:
    """A line's object as a job, of either kind; JobError names the field."""
    from xpress_runtime.jobs import openai

    digest = _digest(values)
    if openai.is_openai(values):
        values, variables = openai.translated(values)
    else:
        variables = {}
        if unknown := [name for name in values if name not in _FIELDS]:
            raise JobError(f"unknown field {', '.join(map(repr, unknown))}; known are {', '.join(_FIELDS)}")
    job_id = _job_id(values.get("id"))
    raw, thinking = _switch(values, "raw") or False, _switch(values, "thinking")
    prompt = _prompt(values)
    is_text = isinstance(prompt, str)
    if raw and not is_text:
        raise JobError("raw is for a prompt of text; leave it out")
    if thinking is not None and (raw or not (is_text or isinstance(prompt[0], dict))):
        raise JobError("thinking is for chats, and this prompt is not one; leave it out")
    return Job(job_id, prompt, generation_config(values), digest, raw, thinking, variables)


def generation_config(values: Mapping[str, Any]) -> GenerationConfig:
    """The settings of a line, whose fields may be null; ``speculation`` is "auto" unless given. JobError."""
    given: dict[str, Any] = {name: values[field] for field, name in GENERATION_FIELDS.items() if values.get(field) is not None}
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    if "ignore_stop" in given:
        given["ignore_stop"] = _switch(values, "ignore_stop")
    try:
        return GenerationConfig(**{"speculation": "auto", **given})
    except OptionError as problem:
        raise JobError(str(problem).replace("max_new_tokens", "max_tokens", 1)) from None


def _job_id(value: Any) -> JobId:
    if isinstance(value, str) and 0 < len(value) <= MAX_ID_LENGTH:
        return value
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MAX_INTEGER_ID:
        return value
    if value is None:
        raise JobError("no id; give each job its own string or integer")
    raise JobError(f"id is {_short(value)}, expected a string of 1 to {MAX_ID_LENGTH} characters or an integer of 64 bits")


def _prompt(values: Mapping[str, Any]) -> str | list[int] | list[dict[str, Any]]:
    prompt, messages = values.get("prompt"), values.get("messages")
    if (prompt is None) == (messages is None):
        raise JobError("neither prompt nor messages" if prompt is None else "both prompt and messages; give one of them")
    if messages is not None:
        return _messages(messages)
    if isinstance(prompt, str):
        if not prompt:
            raise JobError("the prompt is empty")
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise JobError(f"prompt is {_short(prompt)}, expected text or a list of token ids")
    if isinstance(prompt[0], dict):
        return _messages(prompt)
    for index, token in enumerate(prompt):
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise JobError(f"prompt item {index} is {_short(token)}, expected a token id")
    return prompt


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise JobError(f"messages is {_short(value)}, expected a list of {{role, content}} objects")
    for index, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise JobError(f"message {index} is {_short(message)}, expected an object with role and content")
    return value


def _switch(values: Mapping[str, Any], name: str) -> bool | None:
    value = values.get(name)
    if value is None or isinstance(value, bool):
        return value
    raise JobError(f"{name} is {_short(value)}, expected true or false")


def _digest(values: Mapping[str, Any]) -> bytes:
    """Eight bytes of what a job asks for, its id left out; order and spacing of its fields do not matter."""
    content = {name: value for name, value in values.items() if name not in ("id", "custom_id")}
    try:
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
        str(values.get("id", values.get("custom_id"))).encode("utf-8")
    except UnicodeEncodeError:
        raise JobError("text with half of a surrogate pair (\\ud800 … \\udfff), which is no character") from None
    except RecursionError:
        raise JobError("not JSON: nested too deeply") from None
    return hashlib.sha256(canonical).digest()[:8]


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _no_number(name: str) -> NoReturn:
    raise JobError(f"not JSON: {name} is no number")


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _value in pairs]
        raise JobError(f"field {next(name for name in names if names.count(name) > 1)!r} is given twice")
    return values
