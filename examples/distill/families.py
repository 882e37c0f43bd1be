"""Prompt families: templates with placeholders and lists of words, in TOML files under ``prompt_families/``.

A held-out prompt is made of words that no training prompt has. Knows nothing of tokens or models.
"""

from __future__ import annotations

import itertools
import random
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xpress_runtime.errors import OptionError

FOLDER = Path(__file__).parent / "prompt_families"
_PLACEHOLDER = re.compile(r"<([a-z_]+)(?::(\d+))?>")
_MAX_DEPTH = 8


@dataclass(frozen=True)
class Slot:
    """What may stand for a placeholder. Shared words, numbers and words made of parts are drawn alike for training and held-out prompts."""

    train: Sequence[str]
    held_out: Sequence[str]
    splits: bool


@dataclass(frozen=True)
class Family:
    name: str
    about: str
    templates: Sequence[str]
    slots: dict[str, Slot]

    def prompts(self, count: int, *, held_out: bool, seed: int) -> list[str]:
        """``count`` different prompts, fewer where the lists do not give so many."""
        drawn: dict[str, None] = {}
        randomness = random.Random(f"{self.name} {held_out} {seed}")
        for attempt in range(20 * count):
            if len(drawn) == count:
                break
            drawn[self._fill(self.templates[attempt % len(self.templates)], held_out, randomness, {}, 0)] = None
        return list(drawn)

    def _fill(self, text: str, held_out: bool, randomness: random.Random, bound: dict[tuple[str, str], str], depth: int) -> str:
        """Replace placeholders, those inside of entries too; ``bound`` keeps what was drawn for this prompt."""
        if depth > _MAX_DEPTH:
            raise OptionError(f"family '{self.name}': the entries of {text[:40]!r} contain each other")

        def entry(match: re.Match[str]) -> str:
            name, number = match[1], match[2] or "1"
            slot = self.slots.get(name)
            if slot is None:
                return match[0]
            if (name, number) not in bound:
                used = {value for (other, _), value in bound.items() if other == name}
                words = slot.held_out if held_out else slot.train
                free = [word for word in words if word not in used] or list(words)
                bound[name, number] = randomness.choice(free)
            return self._fill(bound[name, number], held_out, randomness, bound, depth + 1)

        return _PLACEHOLDER.sub(entry, text)


def read_family(name: str, folder: Path = FOLDER) -> Family:
    """Read and check the family ``name``. Raises OptionError."""
    path = folder / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(sorted(found.stem for found in folder.glob("*.toml")))
        raise OptionError(f"there is no prompt family '{name}'; there are {known}")
    values = tomllib.loads(path.read_text(encoding="utf-8"))
    slots = {slot: _slot(path, slot, entries) for slot, entries in values["slots"].items()}
    family = Family(name, values["about"], values["templates"], slots)
    for template in family.templates:
        if not any(slots[found].splits for found in _reached(template, slots)):
            raise OptionError(f"{path}: {template!r} has no word that could be held out")
    return family


def _reached(text: str, slots: dict[str, Slot]) -> set[str]:
    """Names of all slots that a template draws from, those inside of entries included."""
    found: set[str] = set()
    pending = [text]
    while pending:
        for name, _ in _PLACEHOLDER.findall(pending.pop()):
            if name in slots and name not in found:
                found.add(name)
                pending += slots[name].train
    return found


def _slot(path: Path, name: str, entries: dict[str, list[Any]]) -> Slot:
    match entries:
        case {"range": [int(first), int(last)]}:
            numbers = [str(number) for number in range(first, last + 1)]
            return Slot(numbers, numbers, splits=False)
        case {"parts": [[_, *_], *_] as parts}:
            made = ["".join(map(str, chosen)) for chosen in itertools.product(*parts)]
            return Slot(made, made, splits=False)
        case {"shared": [_, *_] as words}:
            return Slot([str(word) for word in words], [str(word) for word in words], splits=False)
        case {"train": [_, *_] as train, "held_out": [_, *_] as held_out}:
            both = {str(word).lower() for word in train} & {str(word).lower() for word in held_out}
            if both:
                raise OptionError(f"{path}: slot '{name}' has {sorted(both)[0]!r} in train and in held_out")
            return Slot([str(word) for word in train], [str(word) for word in held_out], splits=True)
    raise OptionError(f"{path}: slot '{name}' has {', '.join(entries)}, expected train and held_out, shared, range, or parts")
