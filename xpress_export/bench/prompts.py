"""Prompts to measure on: the built-in sets, files of the user's, and their tokens.

A file has one JSON object a line: ``{"prompt": "…"}``, ``{"messages": [{"role": …, "content": …}, …]}`` or ``{"tokens": [1, 2, …]}``, each
with an optional ``"family"``, the name under which figures of related prompts are shown together. Other fields and blank lines are passed
over. Knows nothing about modes.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from xpress_runtime.errors import OptionError, PromptError
from xpress_runtime.prompts import Prompt
from xpress_runtime.session import Session

BUILT_IN_SETS = ("math", "code", "chat")
DEFAULT_NUM_PROMPTS = 10
_EXCERPT_CHARACTERS = 160
# As a name in tables, in job ids and in the first cell of a spreadsheet's row, where "=" would begin a formula.
_MAX_BYTES = 64 << 20
_FAMILY = re.compile(r"\w[\w .+-]{0,39}")


@dataclass(frozen=True)
class PromptLine:
    """One prompt as read; ``where`` names its place for errors, ``content`` is text, messages or token ids."""

    where: str
    family: str
    content: Prompt


@dataclass(frozen=True)
class BenchPrompt:
    """A prompt as the target gets it. ``number`` counts from 1 within the family; ``excerpt`` is for people."""

    family: str
    number: int
    excerpt: str
    tokens: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.family}-{self.number:03d}"


def built_in_prompts(names: Sequence[str], num_prompts: int | None = None) -> list[PromptLine]:
    """The first ``num_prompts`` (default: 10) of each named set. Raises OptionError."""
    lines = []
    for name in dict.fromkeys(names):
        if name not in BUILT_IN_SETS:
            raise OptionError(f"--set {name} does not exist; choose among {', '.join(BUILT_IN_SETS)}, or give a file with --prompts")
        text = resources.files("xpress_export.bench").joinpath("sets", f"{name}.jsonl").read_text(encoding="utf-8")
        lines += _parse(text, f"set {name}", name)
    return _first_of_each_family(lines, DEFAULT_NUM_PROMPTS if num_prompts is None else num_prompts)


def read_prompts(path: Path, num_prompts: int | None = None) -> list[PromptLine]:
    """The prompts of a file, or the first ``num_prompts`` of each family. Lines without a family belong to one that is named like the file.

    Raises OptionError where the file cannot be used, PromptError with the number of a line that cannot.
    """
    try:
        # A pipe would wait for a writer, a device never end.
        if path.exists() and not path.is_file():
            raise OptionError(f"--prompts {path} is not a file, expected one with a prompt a line")
        if path.exists() and path.stat().st_size > _MAX_BYTES:
            raise OptionError(f"--prompts {path} has {path.stat().st_size} bytes, expected at most {_MAX_BYTES}; measure on a part of it")
        text = path.read_text(encoding="utf-8-sig")
    except OSError as problem:
        raise OptionError(f"--prompts {path} cannot be read: {problem.strerror}") from None
    except UnicodeDecodeError as problem:
        raise OptionError(f"--prompts {path} is not UTF-8 text: {problem.reason} at byte {problem.start}") from None
    lines = _parse(text, str(path), path.stem if _FAMILY.fullmatch(path.stem) else "prompts")
    if not lines:
        raise OptionError(f'--prompts {path} holds no prompts, expected one a line, such as {{"prompt": "…"}}')
    return lines if num_prompts is None else _first_of_each_family(lines, num_prompts)


def encode_prompts(
    session: Session, lines: Sequence[PromptLine], *, chat: bool | None = None, chat_variables: Mapping[str, Any] | None = None
) -> list[BenchPrompt]:
    """Turn prompts into tokens. ``chat``: whether a text goes through the chat template; None: where there is one.

    ``chat_variables`` are what the template is told besides messages; a prompt that does not go through one takes none.

    PromptError names the line that cannot be encoded or leaves no room in the bundle's capacity.
    """
    has_template = session.tokenizer is not None and session.tokenizer.has_chat_template
    as_chat = has_template if chat is None else chat
    capacity = session.bundle.manifest.capacity
    numbers: Counter[str] = Counter()
    prompts = []
    for line in lines:
        content = [{"role": "user", "content": line.content}] if as_chat and isinstance(line.content, str) else line.content
        try:
            tokens = session.encode(content, chat_variables=chat_variables)
        except PromptError as problem:
            raise PromptError(f"{line.where} (family {line.family}): {problem}") from None
        # The first token comes from the prompt, and only the second one from decoding.
        if len(tokens) + 2 > capacity:
            raise PromptError(
                f"{line.where} (family {line.family}): the prompt has {len(tokens)} tokens and the bundle's capacity is {capacity} for "
                "prompt and output together; shorten it, leave it out, or build the bundle with a larger --capacity"
            )
        numbers[line.family] += 1
        prompts.append(BenchPrompt(line.family, numbers[line.family], _excerpt(line.content), tuple(tokens)))
    return prompts


def _first_of_each_family(lines: Sequence[PromptLine], num_prompts: int) -> list[PromptLine]:
    if num_prompts < 1:
        raise OptionError(f"--num-prompts is {num_prompts}, expected at least 1")
    for family, available in Counter(line.family for line in lines).items():
        if available < num_prompts:
            raise OptionError(f"--num-prompts is {num_prompts}, and {family} has {available} prompts; ask for at most that many")
    return first_of_each_family(lines, num_prompts)


def first_of_each_family(lines: Sequence[PromptLine], num_prompts: int) -> list[PromptLine]:
    """The first ``num_prompts`` of each family, or all where it has fewer."""
    taken: Counter[str] = Counter()
    kept = []
    for line in lines:
        taken[line.family] += 1
        if taken[line.family] <= num_prompts:
            kept.append(line)
    return kept


def _parse(text: str, origin: str, family: str) -> list[PromptLine]:
    # Not splitlines: it also breaks at characters that JSON allows within a string.
    numbered = ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())
    return [_line(line, f"{origin}, line {number}", family) for number, line in numbered]


def _line(text: str, where: str, family: str) -> PromptLine:
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict):
        raise PromptError(f'{where} is not a JSON object such as {{"prompt": "…"}}')
    family = entry.get("family", family)
    if not isinstance(family, str) or not _FAMILY.fullmatch(family):
        raise PromptError(f"{where}: family is {_shown(family)}, expected up to 40 letters, digits, spaces and . + - _")
    given = [field for field in _READERS if field in entry]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise PromptError(f"{where} has {found}, expected one of prompt, messages and tokens")
    return PromptLine(where, family, _READERS[given[0]](entry[given[0]], where))


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise PromptError(f"{where}: prompt is {_shown(value)}, expected text")
    return value


def _messages(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise PromptError(f"{where}: messages is {_shown(value)}, expected a list of role and content")
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(field), str) for field in ("role", "content")):
            raise PromptError(f'{where}: a message is {_shown(message)}, expected {{"role": "…", "content": "…"}}')
    return value


def _tokens(value: Any, where: str) -> list[int]:
    if not isinstance(value, list) or not value or not all(type(token) is int for token in value):
        raise PromptError(f"{where}: tokens is {_shown(value)}, expected a list of token ids")
    return value


_READERS: dict[str, Callable[[Any, str], Prompt]] = {"prompt": _text, "messages": _messages, "tokens": _tokens}


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _excerpt(content: Prompt) -> str:
    """The beginning of what was asked last, on one line."""
    if isinstance(content, str):
        text = content
    else:
        last = content[-1]
        text = str(last["content"]) if isinstance(last, dict) else f"{len(content)} token ids"
    # A lone surrogate would end every later attempt to write the report.
    text = " ".join(text.encode("utf-8", "replace").decode("utf-8").split())
    return text if len(text) <= _EXCERPT_CHARACTERS else f"{text[: _EXCERPT_CHARACTERS - 1]}…"
