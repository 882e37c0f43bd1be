"""The licence that a checkpoint states: in its model card's front matter, or in a LICENSE file. It is reported, never judged."""

from __future__ import annotations

import re
from pathlib import Path

MAX_BYTES = 1 << 20
FIELD = re.compile(r"^(license|license_name):\s*(.+?)\s*(?:#.*)?$")
KNOWN_TEXTS = (("Apache License", "apache-2.0"), ("MIT License", "mit"))


def read_licence(folder: Path) -> str | None:
    """The card's ``license`` (its ``license_name`` where that says more), else what the LICENSE file begins with, else None."""
    return _from_card(folder / "README.md") or _from_file(folder)


def _from_card(card: Path) -> str | None:
    lines = _text(card).splitlines()
    if not lines or lines[0].strip() != "---":
        return None
    found: dict[str, str] = {}
    for line in lines[1:]:
        if line.strip() == "---":
            break
        if match := FIELD.match(line):
            found[match[1]] = match[2].strip("'\"")
    if found.get("license") == "other":
        return found.get("license_name", "other")
    return found.get("license")


def _from_file(folder: Path) -> str | None:
    for path in sorted(folder.glob("LICENSE*")):
        lines = [line.strip() for line in _text(path).splitlines() if line.strip()]
        if lines:
            known = [name for text, name in KNOWN_TEXTS if text in lines[0]]
            return known[0] if known else lines[0][:100]
    return None


def _text(path: Path) -> str:
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            return file.read(MAX_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""
