"""First stage: prompts to train on and prompts to measure on, from families and from the user's own JSONL files.

Knows nothing of tokens or models. A row is ``{"id", "family", "messages"}``, as the benchmark reads it too.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples.distill.families import read_family
from examples.distill.run_folder import RunFolder, check_same, numbered_rows, write_json, write_rows
from examples.distill.settings import PromptSettings
from xpress_runtime.errors import OptionError, PromptError

Messages = list[dict[str, str]]
# What a row of the written files has.
ROW = {"id": str, "family": str, "messages": list}


def write_prompts(settings: PromptSettings, folder: RunFolder, report: Callable[[str], None]) -> None:
    """Write ``prompts.jsonl`` and ``held_out.jsonl``; what is there already is kept if the settings are the same."""
    note = folder.root / "prompts.json"
    check_same(note, settings.model_dump(), "prompts", "remove its prompts and answers")
    train: list[dict[str, Any]] = []
    held_out: list[dict[str, Any]] = []
    for name, count in settings.families.items():
        family = read_family(name)
        held_out += [_row(name, [_user(text)]) for text in family.prompts(settings.held_out, held_out=True, seed=settings.seed)]
        train += [_row(name, [_user(text)]) for text in family.prompts(count, held_out=False, seed=settings.seed)]
    for file in settings.files:
        rows = [_row(Path(file).stem, messages) for messages in read_prompts(Path(file))]
        # By content, so that a longer file keeps the choice.
        kept = {row["id"] for row in rows if int(row["id"], 16) % 10_000 < 10_000 * settings.held_out_share} or {rows[0]["id"]}
        held_out += [row for row in rows if row["id"] in kept]
        train += [row for row in rows if row["id"] not in kept]
    if not held_out:
        raise OptionError("no prompt is held out to measure on; name families or files under [prompts]")
    never = {row["id"] for row in held_out} | {_row("", messages)["id"] for file in settings.never for messages in read_prompts(Path(file))}
    # The same prompt in two files or families counts once.
    distinct = {row["id"]: row for row in train if row["id"] not in never}
    if not distinct:
        raise OptionError("all prompts are held out or must not be trained on; name more families or files under [prompts]")
    rows = list(distinct.values())
    random.Random(settings.seed).shuffle(rows)
    write_json(note, settings.model_dump())
    write_rows(folder.prompts("held_out"), {row["id"]: row for row in held_out}.values())
    write_rows(folder.prompts("train"), rows)
    report(f"{len(rows)} prompts to train on, {len(held_out)} held out")


def read_prompts(path: Path) -> list[Messages]:
    """The prompts of a JSONL file whose objects have ``prompt`` (text) or ``messages``. Raises PromptError."""
    found = []
    for number, row in numbered_rows(path):
        messages = row.get("messages")
        prompt = row.get("prompt")
        if isinstance(prompt, list):
            messages = prompt
        if isinstance(messages, list) and messages and all(_is_message(message) for message in messages):
            found.append([{"role": message["role"], "content": message["content"]} for message in messages])
        elif isinstance(prompt, str) and prompt.strip():
            found.append([_user(prompt)])
        else:
            raise PromptError(f"{path}, line {number}: expected 'prompt' with text or 'messages' with roles and contents")
    if not found:
        raise PromptError(f"{path} holds no prompt")
    return found


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _row(family: str, messages: Messages) -> dict[str, Any]:
    text = "\n".join(f"{message['role']}: {message['content']}" for message in messages)
    return {"id": hashlib.sha256(text.encode()).hexdigest()[:16], "family": family, "messages": messages}
