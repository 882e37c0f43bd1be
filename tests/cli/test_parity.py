"""`xpress-export parity` of a bundle with a draft model: where it is looked for, and what the result says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.invoke import invoke
from tests.complete import CASE, complete_bundle
from tests.conftest import Built


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the complete bundle, since its result is written into it."""
    folder = tmp_path_factory.mktemp("parity") / "bundle"
    shutil.copytree(complete_bundle(tmp_path_factory).bundle.folder, folder)
    return folder


def test_layers_of_the_target_are_found_with_the_target(copied: Path) -> None:
    shown = json.loads(invoke("parity", copied, "--threads", "1", "--max-new-tokens", "8", "--json").assert_done().out)
    assert shown["fp16-mask"]["passed"]
    assert "autoregressive" in shown["fp16-mask"]["generation"]["modes"]
    assert json.loads((copied / "bundle.json").read_text())["parity"] == shown


def test_a_place_for_layers_of_the_target_is_refused(copied: Path) -> None:
    invoke("parity", copied, "--draft-model", CASE / "target").assert_refused(
        2, "--draft-model", "has one that is made of the target's layers", "leave it out"
    )


def test_a_place_for_a_draft_model_that_is_not_there_is_refused(tiny: Built) -> None:
    invoke("parity", tiny.bundle.folder, "--draft-model", CASE / "target").assert_refused(2, "--draft-model", "this one has none")
