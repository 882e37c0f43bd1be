"""Changes to a good checkpoint, and what a refusal must look like."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.tiny import edit_json
from xpress_export.checkpoints import open_drafter, open_target
from xpress_runtime.errors import CheckpointError, UserError

Change = Callable[[Path], object]
DRAFTERS = ("xpress", "dflash")


def open_any(folder: Path) -> object:
    """Open a copy of one of the originals, which are named after what they are."""
    return open_drafter(str(folder)) if folder.name in DRAFTERS else open_target(str(folder))


def assert_refused(action: Callable[[], object], *named: str, error: type[UserError] = CheckpointError) -> None:
    """One line of this class that holds every one of ``named``."""
    with pytest.raises(error) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 700
    for name in named:
        assert name in message


def fields(**changes: Any) -> Change:
    return lambda folder: edit_json(folder / "config.json", **changes)


def generation(**changes: Any) -> Change:
    return lambda folder: edit_json(folder / "generation_config.json", **changes)


def nested(outer: str, **changes: Any) -> Change:
    def change(folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text())[outer]
        values |= changes
        edit_json(folder / "config.json", **{outer: {name: value for name, value in values.items() if value is not ...}})

    return change


def tensors(**changes: Any) -> Change:
    """Replace tensors (dots written as __), drop them (...), or apply a function to them."""

    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        held = load_file(path)
        for key, value in changes.items():
            name = key.replace("__", ".")
            if value is ...:
                del held[name]
            else:
                held[name] = value(held[name]).contiguous() if callable(value) else value
        save_file(held, path)

    return change


def rope(**values: Any) -> Change:
    return fields(rope_parameters=values)


def edit_index(folder: Path, **changes: Any) -> None:
    """Change entries of the index of a sharded checkpoint (dots written as __), or drop them (...)."""
    path = folder / "model.safetensors.index.json"
    weight_map = json.loads(path.read_text())["weight_map"]
    for key, value in changes.items():
        name = key.replace("__", ".")
        if value is ...:
            del weight_map[name]
        else:
            weight_map[name] = value
    edit_json(path, weight_map=weight_map)
