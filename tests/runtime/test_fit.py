"""Warnings about requests that a drafter was not trained for: once each, and only where they are."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.runtime.test_bundle import description
from tests.runtime.tiny_tokenizers import byte_level
from xpress_runtime.chat_template import ChatTemplate
from xpress_runtime.errors import BundleError
from xpress_runtime.fields import Fields
from xpress_runtime.fit import DrafterFit, thinks_with
from xpress_runtime.manifest import DrafterRecord, read_manifest
from xpress_runtime.tokenizer import TextTokenizer

DEFAULT_ON = "{% if enable_thinking is defined and enable_thinking is false %}quick {% endif %}{{ messages[0].content }}"
DEFAULT_OFF = "{% if enable_thinking %}slow {% endif %}{{ messages[0].content }}"
NO_SWITCH = "{{ messages[0].content }}"
REFUSES = "{{ raise_exception('no') }}"


def with_template(source: str) -> TextTokenizer:
    return TextTokenizer(byte_level(), {}, ChatTemplate(source, {}))


def drafter(**changes: Any) -> DrafterRecord:
    return replace(read_manifest(Fields(description(), "bundle.json", BundleError)).drafter, **changes)


def warnings(caplog: pytest.LogCaptureFixture) -> Sequence[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize(
    ("template", "variables", "expected"),
    [
        (DEFAULT_ON, {}, True),
        (DEFAULT_ON, {"enable_thinking": False}, False),
        (DEFAULT_ON, {"enable_thinking": True}, True),
        (DEFAULT_OFF, {}, False),
        (DEFAULT_OFF, {"enable_thinking": True}, True),
        (NO_SWITCH, {"enable_thinking": True}, None),
        (REFUSES, {}, None),
    ],
)
def test_whether_a_chat_thinks(template: str, variables: dict[str, Any], expected: bool | None) -> None:
    assert thinks_with(with_template(template), variables) is expected


@pytest.mark.parametrize(
    ("trained", "variables", "warns"),
    [
        (True, {}, False),
        (False, {}, True),
        (False, {"enable_thinking": False}, False),
        (True, {"enable_thinking": False}, True),
        (None, {}, False),
    ],
)
def test_thinking_that_disagrees(trained: bool | None, variables: dict[str, Any], warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    fit = DrafterFit(drafter(trained_with_thinking=trained))
    for _ in range(2):
        fit.check_chat(with_template(DEFAULT_ON), variables)
    assert len(warnings(caplog)) == warns
    assert not warns or f"pass enable_thinking={str(trained).lower()}" in warnings(caplog)[0]


def test_a_text_longer_than_the_drafter_was_trained_for(caplog: pytest.LogCaptureFixture) -> None:
    fit = DrafterFit(drafter(max_positions=100))
    fit.check_length(100)
    assert not warnings(caplog)
    fit.check_length(101)
    fit.check_length(102)
    (warning,) = warnings(caplog)
    assert "101 tokens" in warning and "trained for 100" in warning
