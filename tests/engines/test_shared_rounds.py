"""Requests that share rounds where every call has a fixed shape, as with engines: whole chunks, every row, caches of one length."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from tests.complete import GRAPH_SET
from tests.conftest import Built
from xpress_runtime.backends.ort_cpu import OrtCpuBackend
from xpress_runtime.errors import OptionError
from xpress_runtime.generation import GenerationConfig
from xpress_runtime.serving import BatchSession
from xpress_runtime.session import Session
from xpress_runtime.speculation.shared import SharedPolicy

WAYS = [
    GenerationConfig(30, ignore_stop=True),
    GenerationConfig(40, speculation="auto", ignore_stop=True),
    GenerationConfig(20, speculation="off", ignore_stop=True),
    GenerationConfig(25, draft_steps=2, ignore_stop=True),
    GenerationConfig(25, temperature=1.0, seed=5, ignore_stop=True),
]


CHANCE = Random(3)


@pytest.mark.parametrize("drafts", [lambda *_: False, lambda *_: CHANCE.random() < 0.5], ids=["plain", "by chance"])
def test_tokens_are_those_of_each_request_alone(complete: Built, drafts: Callable[..., bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedPolicy, "drafts", drafts)
    choose = Random(1)
    prompts = [
        [choose.randrange(complete.bundle.manifest.target.vocab_size) for _ in range(length)] for length in (1, 11, 12, 13, 40, 5, 2)
    ]
    with (
        Session(complete.bundle, OrtCpuBackend(1, GRAPH_SET)) as alone,
        BatchSession(complete.bundle, OrtCpuBackend(1, GRAPH_SET)) as session,
    ):
        assert session.slots == complete.bundle.manifest.batch
        requests = [session.submit(prompt, WAYS[index % len(WAYS)]) for index, prompt in enumerate(prompts)]
        for prompt, request in zip(prompts, requests, strict=True):
            config = (
                request.config
                if request.config.temperature
                else GenerationConfig(request.config.max_new_tokens, speculation="off", ignore_stop=True)
            )
            assert request.result(60).tokens == alone.generate(prompt, config).tokens, request.config


def test_more_slots_than_were_built_are_refused(complete: Built) -> None:
    with pytest.raises(OptionError, match=r"slots is 3, and this bundle was built for 2 .* --batch 3"):
        BatchSession(complete.bundle, OrtCpuBackend(1, GRAPH_SET), slots=3)
