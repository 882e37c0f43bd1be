"""Places in a JSON value, and the value with one of them replaced: for tests that spoil one field at a time."""

from __future__ import annotations

import copy
from typing import Any

Place = tuple[str | int, ...]


def replaced(values: Any, path: Place, value: Any) -> Any:
    """A copy of a JSON value with one place replaced, or with ``...`` removed."""
    values = copy.deepcopy(values)
    place = values
    for key in path[:-1]:
        place = place[key]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return values
