"""Renders chat templates: Jinja with the filters, functions and tags that such templates expect.

A template comes with a checkpoint and is untrusted: it runs in Jinja's immutable sandbox, sees plain data only, cannot reach attributes
of Python objects, and its output is bounded. A template that loops for very long is not interrupted. Knows nothing of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from xpress_runtime.errors import BundleError, PromptError

MAX_TEMPLATE_CHARACTERS = 1024 * 1024
MAX_RENDERED_CHARACTERS = 64 * 1024 * 1024
_MAX_DEPTH = 64  # of nested data

# What Python code in a template can raise; a defect in the template or messages that it does not expect.
_TEMPLATE_PROBLEMS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    NotImplementedError,
    RecursionError,
    TypeError,
    ValueError,
)
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# Options of other programs that are no variables of a template: ignoring them silently would change what the user asked for.
_RESERVED = ("messages", "add_generation_prompt", "continue_final_message")


class ChatTemplate:
    """A compiled template. ``special_tokens`` are visible to it by name, as ``bos_token``."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], origin: str = "chat template") -> None:
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise BundleError(f"{origin} has {len(source)} characters, expected at most {MAX_TEMPLATE_CHARACTERS}")
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as problem:
            raise BundleError(f"{origin} is not a valid template: line {problem.lineno}: {problem.message}") from None
        except (RecursionError, MemoryError, SyntaxError, ValueError, OverflowError) as problem:
            raise BundleError(f"{origin} cannot be compiled: {type(problem).__name__}: {_one_line(problem)}") from None

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]) -> str:
        """The prompt as text. ``variables`` are visible to the template and win over special tokens of the same name."""
        for name in _RESERVED:
            if name in variables:
                raise PromptError(f"'{name}' cannot be passed to the chat template as a variable")
        values: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens}
        values.update({name: _plain(value, f"template variable '{name}'") for name, value in variables.items()})
        values["messages"] = _plain_messages(messages)
        values["add_generation_prompt"] = add_generation_prompt
        pieces: list[str] = []
        num_characters = 0
        try:
            for piece in self._template.generate(values):
                num_characters += len(piece)
                if num_characters > MAX_RENDERED_CHARACTERS:
                    raise PromptError(f"the chat template writes more than {MAX_RENDERED_CHARACTERS} characters")
                pieces.append(piece)
        except _RaisedByTemplate as problem:
            raise PromptError(f"the chat template refuses these messages: {_one_line(problem)}") from None
        except _TEMPLATE_PROBLEMS as problem:
            raise PromptError(f"the chat template failed on these messages: {type(problem).__name__}: {_one_line(problem)}") from None
        return "".join(pieces)


def _plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Check that messages are what a template can read, and copy them as plain data."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise PromptError(f"messages are of type {type(messages).__name__}, expected a list of {{role, content}} objects")
    if not messages:
        raise PromptError("the list of messages is empty, expected at least one {role, content} object")
    plain = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise PromptError(f"message {index} is of type {type(message).__name__}, expected an object with role and content")
        # Clients send null for what a message does not have; templates test for presence and would print it.
        copy = {name: value for name, value in _plain(message, f"message {index}").items() if value is not None}
        if not isinstance(copy.get("role"), str):
            raise PromptError(f"message {index} has {_found(copy, 'role')}, expected a role such as 'user'")
        content = copy.get("content")
        if isinstance(content, list):
            _check_parts(content, index)
        elif not isinstance(content, str) and (content is not None or not _may_lack_content(copy)):
            raise PromptError(f"message {index} has {_found(copy, 'content')}, expected a string")
        # The reasoning of a message goes by several names; templates read the first one, some the second.
        reasoning = next((copy[name] for name in _REASONING_FIELDS if name in copy), None)
        if reasoning is not None:
            copy = {"thinking": reasoning, **copy, "reasoning_content": reasoning}
        plain.append(copy)
    return plain


def _check_parts(parts: list[Any], index: int) -> None:
    """Content may come as a list of parts; only text can be turned into tokens here."""
    for number, part in enumerate(parts):
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            kind = f"type {part.get('type')!r}" if isinstance(part, dict) else type(part).__name__
            raise PromptError(f"message {index}, part {number} of its content is of {kind}, expected {{'type': 'text', 'text': …}}")


def _may_lack_content(message: Mapping[str, Any]) -> bool:
    return bool(message.get("tool_calls")) or any(name in message for name in _REASONING_FIELDS)


def _found(message: Mapping[str, Any], name: str) -> str:
    return f"a {name} of type {type(message[name]).__name__}" if name in message else f"no {name}"


def _plain(value: Any, name: str, depth: int = 0) -> Any:
    """Copy JSON-like data. Other objects have methods that the sandbox does not know to be dangerous."""
    if depth > _MAX_DEPTH:
        raise PromptError(f"{name} is nested deeper than {_MAX_DEPTH} levels")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if type(key) is not str:
                raise PromptError(f"{name} holds a key of type {type(key).__name__}, expected strings")
        return {key: _plain(item, name, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, name, depth + 1) for item in value]
    raise PromptError(f"{name} holds a value of type {type(value).__name__}, expected text, numbers, lists and objects only")


def _one_line(problem: BaseException) -> str:
    text = " ".join(str(problem).split())
    return text if len(text) <= 500 else text[:497] + "..."


class _RaisedByTemplate(jinja2.TemplateError):
    """``raise_exception`` was called: the template refuses the messages in its own words."""


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's text for training. It changes nothing in the text, so its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012, the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        # A block of its own: assignments inside do not reach the rest of the template.
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Namespace(jinja2.utils.Namespace):
    """A namespace that takes no underscored names: Python would look some of them up on the object."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # No named parameter, so that a template may use any name.
        instance, *rest = args
        for name in dict(*rest, **kwargs):
            _check_attribute(name)
        jinja2.utils.Namespace.__init__(instance, *rest, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: Any) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a chat template cannot set the attribute {name!r}")


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
    # A function instead of the class, so that no method of the class can be reached through it.
    environment.globals["dict"] = _make_dict
    environment.globals.pop("lipsum")
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str = "") -> None:
    raise _RaisedByTemplate(str(message))


def _strftime_now(format: str) -> str:  # noqa: A002, templates may pass it by name
    return datetime.now().strftime(format)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)
