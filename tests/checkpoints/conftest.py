"""Good checkpoints of every family and format, and copies of them to be spoilt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import write_drafter, write_target
from xpress_export.checkpoints.families import FAMILIES

# Fields that a family of these may leave out of a config it saves, and that cases spoil.
EXTRA: dict[str, dict[str, Any]] = {
    "granite": {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.0625, "logits_scaling": 8.0},
    "gemma2": {"sliding_window": 4},
    "gemma3_text": {"sliding_window": 4},
}


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Good checkpoints; a case copies what it spoils."""
    root = tmp_path_factory.mktemp("originals")
    for model_type in FAMILIES:
        write_target(root / model_type, model_type, **EXTRA.get(model_type, {}))
    write_target(root / "tied", tie_word_embeddings=True)
    write_target(root / "sharded", max_shard_size="20KB")
    write_drafter(root / "xpress", root / "llama")
    write_drafter(root / "dflash", root / "llama", refiner=False)
    return root


@pytest.fixture
def copy(originals: Path, tmp_path: Path) -> Callable[[str], Path]:
    def copy_folder(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for path in (originals / name).iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        return folder

    return copy_folder
