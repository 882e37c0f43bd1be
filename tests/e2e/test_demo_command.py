"""The demo as a newcomer runs it, on the real bundle with few tokens."""

from __future__ import annotations

import json

import pytest

from tests.cli.invoke import invoke
from tests.e2e.conftest import Demo

MODES = ("plain", "drafter", "refined", "auto")


@pytest.mark.usefixtures("demo")
def test_the_table_has_every_mode() -> None:
    shown = invoke("demo", "--max-new-tokens", "6", "--no-parity").assert_done().out
    for name in (
        "plain decoding",
        "drafter only (K=0)",
        "drafter and refiner",
        "as far as it pays (auto)",
        "All of them gave the same text.",
    ):
        assert name in shown


def test_json_is_one_object(demo: Demo) -> None:
    shown = json.loads(invoke("demo", "--max-new-tokens", "6", "--no-parity", "--json").assert_done().out)
    assert shown["bundle"] == str(demo.bundle.folder)
    assert tuple(shown["modes"]) == MODES
    assert all(shown[name] > 0 for name in ("speedup", "speedup_drafter", "speedup_auto"))
    assert shown["same_text"]
