"""The real server on the real bundle: many requests of all kinds at once, OpenAI's own client, and an end without loss."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.conftest import Demo
from tests.e2e.served import serving
from xpress_runtime.generation import GenerationConfig
from xpress_runtime.session import Session

NUM_REQUESTS = 64
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"speculation": "on"},
    {"speculation": "off"},
    {"draft_steps": 2},
    {"speculation": "on", "num_passes": 0},
)
PROMPTS = [
    "Name three fruits.",
    "Write one sentence about the sea.",
    "What is 12 times 3?",
    "Continue: one two three four five six",
    "Why is the sky blue? " * 25,
    "List the days of the week.",
]


@dataclass(frozen=True)
class Asked:
    """A request and how its client behaves: it waits, it streams, or it goes away after some steps."""

    body: dict[str, Any]
    streams: bool
    leaves: bool


def _mixed() -> list[Asked]:
    choice = random.Random(11)
    asked = []
    for index in range(NUM_REQUESTS):
        body: dict[str, Any] = {"prompt": PROMPTS[index % len(PROMPTS)], "max_tokens": choice.choice((1, 4, 9, 16)), "ignore_stop": True}
        body |= choice.choice(
            ({}, {"speculation": "on"}, {"speculation": "off"}, {"draft_steps": 2}, {"speculation": "on", "num_passes": 0})
        )
        if index % 5 == 0:
            body |= {"temperature": 0.8, "seed": index}
        asked.append(Asked(body, streams=index % 2 == 0, leaves=index % 8 == 2))
    return asked


def _ask(url: str, asked: Asked) -> dict[str, Any] | None:
    if not asked.streams:
        answer = httpx.post(f"{url}/generate", json=asked.body, timeout=120)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found
    ids: list[int] = []
    with httpx.stream("POST", f"{url}/generate", json=asked.body | {"stream": True}, timeout=120) as answer:
        assert answer.status_code == 200
        event = ""
        for line in answer.iter_lines():
            if line.startswith("event:"):
                event = line.removeprefix("event:").strip()
            if not line.startswith("data:"):
                continue
            data = json.loads(line.removeprefix("data:"))
            assert event in {"step", "done"}, data
            if event == "done":
                assert data["tokens"] == ids
                done: dict[str, Any] = data
                return done
            ids += [token["id"] for token in data["tokens"]]
            if asked.leaves:
                return None
    raise AssertionError("the stream ended without its last event")


def _metrics(url: str) -> dict[tuple[str, str], float]:
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    return {(sample.name, ",".join(sample.labels.values())): sample.value for family in families for sample in family.samples}


def test_many_mixed_requests_get_what_each_gets_alone(served: str, demo_session: Session) -> None:
    mixed = _mixed()
    with ThreadPoolExecutor(NUM_REQUESTS) as threads:
        answers = list(threads.map(lambda asked: _ask(served, asked), mixed))
    alone: dict[tuple[str, int], list[int]] = {}
    for asked, answer in zip(mixed, answers, strict=True):
        assert (answer is None) == asked.leaves
        if answer is None or "temperature" in asked.body:
            continue
        key = (asked.body["prompt"], asked.body["max_tokens"])
        if key not in alone:
            config = GenerationConfig(key[1], speculation="off", ignore_stop=True)
            alone[key] = list(demo_session.generate([{"role": "user", "content": key[0]}], config).tokens)
        assert answer["tokens"] == alone[key], asked.body
    for asked, answer in list(zip(mixed, answers, strict=True))[::5]:
        if answer is not None:
            # With nobody beside it.
            again = _ask(served, asked)
            assert again is not None
            assert answer["tokens"] == again["tokens"], asked.body
    _wait_until_idle(served)


def _wait_until_idle(url: str) -> None:
    for _ in range(100):
        found = _metrics(url)
        if not any(value for (name, _labels), value in found.items() if name in {"xpress_slots_in_use", "xpress_requests_queued"}):
            return
        time.sleep(0.1)
    raise AssertionError(f"slots or queue did not come free: {found}")


def test_the_openai_client_works_streaming_and_not(served: str, demo_session: Session) -> None:
    client = openai.OpenAI(base_url=f"{served}/v1", api_key="any", max_retries=0)
    (model,) = client.models.list().data
    messages: Any = [{"role": "user", "content": "Name three fruits."}]
    expected = demo_session.generate(messages, GenerationConfig(20, speculation="off"))
    answer = client.chat.completions.create(model=model.id, messages=messages, max_tokens=20)
    assert answer.choices[0].message.content == expected.text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(expected.tokens)
    stream = client.chat.completions.create(
        model=model.id, messages=messages, max_tokens=20, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected.text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    completion = client.completions.create(model=model.id, prompt="Once upon a time", max_tokens=12, seed=4, temperature=0.9)
    again = client.completions.create(model=model.id, prompt="Once upon a time", max_tokens=12, seed=4, temperature=0.9)
    assert completion.choices[0].text == again.choices[0].text
    with pytest.raises(openai.BadRequestError, match="n is 2"):
        client.chat.completions.create(model=model.id, messages=messages, n=2)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt="x")


def test_sigterm_finishes_what_runs_and_takes_nothing_new(demo: Demo) -> None:
    with serving(demo.bundle.folder, "--slots", "2") as (url, process):
        body = {"prompt": "Tell me a story.", "max_tokens": 40, "ignore_stop": True}
        answers: list[httpx.Response] = []
        waiting = threading.Thread(target=lambda: answers.append(httpx.post(f"{url}/generate", json=body, timeout=60)))
        waiting.start()
        while not any(value for (name, _labels), value in _metrics(url).items() if name == "xpress_slots_in_use"):
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        refused = None
        while waiting.is_alive() and refused is None:
            answer = httpx.post(f"{url}/generate", json=body | {"max_tokens": 1}, timeout=60)
            refused = answer if answer.status_code != 200 else None
        waiting.join(60)
        assert (answers[0].status_code, len(answers[0].json()["tokens"])) == (200, 40)
        assert refused is not None
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        try:
            assert process.wait(30) == 0
        except subprocess.TimeoutExpired:
            pytest.fail("the server did not end")
