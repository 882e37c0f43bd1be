"""The conformance target with its trained drafter, with sampling: some drafts are accepted and some not, in every way of drafting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from tests.conftest import CONFORMANCE, build
from xpress_runtime.backends import open_backend
from xpress_runtime.bundle import Bundle
from xpress_runtime.generation import GenerationConfig
from xpress_runtime.serving import BatchSession
from xpress_runtime.session import Session

CAPACITY = 128


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = CONFORMANCE / "qwen3-b4"
    output = tmp_path_factory.mktemp("serving") / "bundle"
    options: dict[str, Any] = {"num_passes": (2, 1), "capacity": CAPACITY, "batch": 2, "prefill_chunk": 16}
    return build(folder / "target", folder / "xpress", output, sampling=True, **options).bundle


@pytest.fixture(scope="session")
def alone(bundle: Bundle) -> Iterator[Session]:
    """A session that serves one request at a time."""
    with Session(bundle, open_backend("ort-cpu", threads=1)) as session:
        yield session


def open_batch(bundle: Bundle, slots: int, **options: Any) -> BatchSession:
    return BatchSession(bundle, open_backend("ort-cpu", threads=1), slots=slots, **options)


def some_prompts(count: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 1 to 60 tokens, so that some are read in one chunk and some in four."""
    random = Random(seed)
    return [[random.randrange(vocab_size) for _ in range(random.choice((1, 2, 15, 16, 17, 33, 60)))] for _ in range(count)]


def plainly(config: GenerationConfig) -> GenerationConfig:
    """What the target alone does with the same settings."""
    return replace(config, speculation="off", num_passes=None, draft_steps=1)
