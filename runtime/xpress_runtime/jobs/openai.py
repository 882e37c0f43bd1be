"""Lines of OpenAI's batch files as fields of a job: {"custom_id", "method", "url", "body"}.

A field of the body that would change the output and is not served is refused by name; one that says what happens anyway, or that only
concerns the service (user, metadata, store, …), is let pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xpress_runtime.jobs.job import GENERATION_FIELDS, JobError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

_LINE = ("custom_id", "method", "url", "body")
_OWN = {CHAT: ("messages", "max_completion_tokens", "chat_template_kwargs"), COMPLETIONS: ("prompt",)}
_WITHOUT_EFFECT = ("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
# What other fields may say, because it is so without them; null always may.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (),
    "suffix": ("",),
    "logit_bias": ({},),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "stream_options": (),
}


def is_openai(values: Mapping[str, Any]) -> bool:
    """Whether a line is meant as one of these."""
    return "custom_id" in values or "body" in values


def translated(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of a job, and the variables for its chat template; JobError."""
    if unknown := [name for name in values if name not in _LINE]:
        raise JobError(f"unknown field {', '.join(map(repr, unknown))}; a line with custom_id has {', '.join(_LINE)}")
    url, body = values.get("url"), values.get("body")
    if url not in _OWN:
        raise JobError(f"url is {url!r}, expected '{CHAT}' or '{COMPLETIONS}'")
    if values.get("method") != "POST":
        raise JobError(f"method is {values.get('method')!r}, expected 'POST'")
    if not isinstance(body, dict):
        raise JobError(f"body is of type {type(body).__name__}, expected an object")
    fields: dict[str, Any] = {"id": values.get("custom_id")}
    for name, value in body.items():
        if name in GENERATION_FIELDS or name in _OWN[url]:
            fields[name] = value
        elif value is not None and name not in _WITHOUT_EFFECT and not _is_neutral(name, value):
            raise JobError(f"field {name!r} of the body is not served; leave it out")
    variables = fields.pop("chat_template_kwargs", None) or {}
    if not isinstance(variables, dict):
        raise JobError(f"chat_template_kwargs is of type {type(variables).__name__}, expected an object")
    longest = fields.pop("max_completion_tokens", None)
    if longest is not None:
        if fields.get("max_tokens") not in (None, longest):
            raise JobError("max_tokens and max_completion_tokens disagree; leave one of them out")
        fields["max_tokens"] = longest
    if url == COMPLETIONS:
        fields |= _completion(fields.get("prompt"))
    return fields, variables


def _is_neutral(name: str, value: Any) -> bool:
    # Not by "in": False is 0, and 1 is 1.0.
    return any(type(value) is type(neutral) and value == neutral for neutral in _NEUTRAL.get(name, ()))


def _completion(prompt: Any) -> dict[str, Any]:
    """A completion continues its text: no chat template."""
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1 or isinstance(prompt[0], dict):
            raise JobError("prompt is a list of prompts; give each a line of its own")
        prompt = prompt[0]
    return {"prompt": prompt, "raw": isinstance(prompt, str)}
