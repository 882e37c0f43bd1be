"""Bundles that may be linked to."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.conftest import Built
from xpress_runtime.bundle import Bundle


@pytest.fixture
def own(tiny: Built, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A copy of the tiny bundle: onnx refuses weights that have a second name, and other tests load those of the shared one."""
    folder: Path = tmp_path_factory.mktemp("own") / "bundle"
    shutil.copytree(tiny.bundle.folder, folder)
    return Bundle.open(folder)
