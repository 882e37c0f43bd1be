"""Strict reading of JSON objects: each field has a type and a range, and an error names the file, the field and both values."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from xpress_runtime.errors import UserError

MAX_JSON_BYTES = 64 * 1024 * 1024


class Fields:
    """A JSON object and where it came from. A reader raises ``error`` with one line that names the field."""

    def __init__(self, values: Mapping[str, Any], origin: str, error: type[UserError]) -> None:
        self.values = values
        self.origin = origin
        self.error = error

    @classmethod
    def from_file(cls, path: Path, error: type[UserError]) -> Fields:
        """Read a JSON file that must hold an object."""
        try:
            state = path.stat()
            if not stat.S_ISREG(state.st_mode):
                raise error(f"{path} is no file that can be read to an end")
            if state.st_size > MAX_JSON_BYTES:
                raise error(f"{path} is larger than {MAX_JSON_BYTES} bytes, which no description of a model is")
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise error(f"{path} does not exist") from None
        except OSError as problem:
            raise error(f"{path} cannot be read: {problem.strerror or problem}") from None
        except (ValueError, RecursionError) as problem:
            # ValueError: not UTF-8, not JSON, or an integer of thousands of digits.
            raise error(f"{path} is not valid JSON: {problem}") from None
        if not isinstance(values, dict):
            raise error(f"{path} holds a JSON {type(values).__name__}, expected an object")
        return cls(values, str(path), error)

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self.values)

    def required(self, name: str) -> Any:
        """The value of a field that must be there; null counts as missing."""
        value = self.values.get(name)
        if value is None:
            raise self.error(f"{self.origin}: field '{name}' is missing")
        return value

    def integer(self, name: str, minimum: int = 0, maximum: int = 2**31 - 1) -> int:
        value = self.required(name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, value, "an integer")
        if not minimum <= value <= maximum:
            raise self._wrong(name, value, f"an integer from {minimum} to {maximum}")
        return value

    def number(self, name: str, minimum: float = -math.inf, maximum: float = math.inf) -> float:
        value = self.required(name)
        try:
            number = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self._wrong(name, value, "a finite number")
        if not minimum <= number <= maximum:
            raise self._wrong(name, value, f"a number from {minimum:g} to {maximum:g}")
        return number

    def boolean(self, name: str) -> bool:
        value = self.required(name)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def text(self, name: str) -> str:
        value = self.required(name)
        if not isinstance(value, str):
            raise self._wrong(name, value, "a string")
        return value

    def choice(self, name: str, choices: Sequence[str]) -> str:
        """A string that is one of ``choices``."""
        value = self.text(name)
        if value not in choices:
            raise self.error(f"{self.origin}: field '{name}' is '{value[:40]}', expected one of {', '.join(choices)}")
        return value

    def integers(self, name: str, minimum: int = 0, maximum: int = 2**31 - 1) -> tuple[int, ...]:
        """A list of integers in a range; may be empty."""
        value = self.required(name)
        if not isinstance(value, list):
            raise self._wrong(name, value, "a list of integers")
        for item in value:
            if isinstance(item, bool) or not isinstance(item, int) or not minimum <= item <= maximum:
                raise self._wrong(name, value, f"a list of integers from {minimum} to {maximum}")
        return tuple(value)

    def numbers(self, name: str, minimum: float = -math.inf, maximum: float = math.inf) -> tuple[float, ...]:
        """A list of numbers in a range; may be empty."""
        value = self.required(name)
        if not isinstance(value, list):
            raise self._wrong(name, value, "a list of numbers")
        items = Fields({str(index): item for index, item in enumerate(value)}, f"{self.origin}: {name}", self.error)
        return tuple(items.number(index, minimum, maximum) for index in items)

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings; may be empty."""
        value = self.required(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(name, value, "a list of strings")
        return tuple(value)

    def objects(self, name: str) -> list[Fields]:
        """A list of objects; may be empty."""
        value = self.required(name)
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self._wrong(name, value, "a list of objects")
        return [Fields(item, f"{self.origin}: {name}[{index}]", self.error) for index, item in enumerate(value)]

    def entries(self) -> list[tuple[str, Fields]]:
        """Every field with its value, all of which are objects."""
        return [(name, self.nested(name)) for name in self]

    def nested(self, name: str) -> Fields:
        """An object inside this one."""
        value = self.required(name)
        if not isinstance(value, dict):
            raise self._wrong(name, value, "an object")
        return Fields(value, f"{self.origin}: {name}", self.error)

    def _wrong(self, name: str, value: Any, expected: str) -> UserError:
        # Not all that TOML has is JSON too.
        shown = json.dumps(value, default=str)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return self.error(f"{self.origin}: field '{name}' is {shown}, expected {expected}")
