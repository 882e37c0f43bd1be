"""The native route: what it takes, what it gives, as one answer and as events."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from tests.server.conftest import client_of, events_of
from tests.server.fake import FakeSession, FakeTokenizer
from xpress_runtime.errors import EnvironmentProblem
from xpress_runtime.serving import Limits


def test_text_is_a_chat_message_where_there_is_a_template(client: TestClient, session: FakeSession) -> None:
    answer = client.post("/generate", json={"prompt": "hi", "max_tokens": 4})
    assert answer.status_code == 200
    body = answer.json()
    assert (body["output"], body["tokens"], body["finish_reason"]) == (" w0 w1 w2 w3", [0, 1, 2, 3], "length")
    assert body["output_tokens"] == 4
    assert body["prompt_tokens"] == session.requests[0].prompt_tokens
    assert body["accepted_tokens"] == body["stats"]["accepted"] == 2
    assert body["total_ms"] >= body["time_to_first_token_ms"] >= body["queued_ms"] >= 0
    assert session.prompts == [[{"role": "user", "content": "hi"}]]


@pytest.mark.parametrize(
    ("body", "given"),
    [
        ({"prompt": "hi", "raw": True}, "hi"),
        ({"prompt": [1, 2, 3]}, [1, 2, 3]),
        ({"prompt": [1], "raw": True}, [1]),
        ({"prompt": [{"role": "developer", "content": "a"}]}, [{"role": "system", "content": "a"}]),
        ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}, "a\nb"),
    ],
)
def test_prompts_of_every_kind(client: TestClient, session: FakeSession, body: dict[str, object], given: object) -> None:
    assert client.post("/generate", json={**body, "max_tokens": 1}).status_code == 200
    prompt = session.prompts[0]
    assert given in (prompt, prompt[0]["content"] if isinstance(prompt[0], dict) else None)


def test_text_stays_text_without_a_template() -> None:
    session = FakeSession(tokenizer=FakeTokenizer(template=False))
    assert client_of(session).post("/generate", json={"prompt": "hi", "max_tokens": 1}).status_code == 200
    assert session.prompts == ["hi"]


def test_settings_reach_the_session(client: TestClient, session: FakeSession) -> None:
    settings = {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "seed": 2**63 - 1,
        "stop_token_ids": [7],
        "num_passes": 1,
        "shortlist": 0,
        "draft_steps": 2,
        "ignore_stop": True,
        "speculation": "on",
    }
    body = {**settings, "prompt": "hi", "max_tokens": 2, "stop": "x", "thinking": False, "timeout": 9}
    assert client.post("/generate", json=body).status_code == 200
    request = session.requests[0]
    assert {name: getattr(request.config, name) for name in settings} == settings
    assert (request.config.max_new_tokens, request.config.stop, request.timeout) == (2, ["x"], 9)
    assert session.variables == [{"enable_thinking": False}]


def test_defaults(client: TestClient, session: FakeSession) -> None:
    assert client.post("/generate", json={"prompt": "hi", "temperature": None, "stop": None}).status_code == 200
    config = session.requests[0].config
    assert (config.max_new_tokens, config.temperature, config.speculation, config.draft_steps) == (128, 0, "auto", 1)


def test_a_lower_limit_is_the_default_too() -> None:
    session = FakeSession(tokenizer=FakeTokenizer(), limits=Limits(max_new_tokens=5))
    client = client_of(session)
    assert client.post("/generate", json={"prompt": "hi"}).json()["output_tokens"] == 5
    refused = client.post("/generate", json={"prompt": "hi", "max_tokens": 6})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "max_tokens is 6, expected at most 5 on this server"


def test_events_are_steps_and_then_the_answer(client: TestClient) -> None:
    answer = client.post("/generate", json={"prompt": "hi", "max_tokens": 4, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer.text)
    assert [name for name, _data in events] == ["step", "step", "step", "done"]
    first, second = events[0][1], events[1][1]
    assert first == {
        "text": " w0",
        "tokens": [{"id": 0, "text": " w0", "origin": "target"}],
        "proposed": 0,
        "accepted": 0,
        "prefill_ms": 1.0,
    }
    assert second["tokens"][0] == {"id": 1, "text": " w1", "origin": "drafter"}
    assert (second["proposed"], second["accepted"]) == (3, 1)
    assert (second["draft_ms"], second["refine_ms"], second["verify_ms"]) == (1.0, 2.0, 3.0)
    assert "".join(data["text"] for name, data in events if name == "step") == events[-1][1]["output"]
    whole = client.post("/generate", json={"prompt": "hi", "max_tokens": 4}).json()
    assert whole.keys() == events[-1][1].keys()
    assert whole["tokens"] == events[-1][1]["tokens"]


def test_a_failure_in_the_middle_is_an_event() -> None:
    session = FakeSession(tokenizer=FakeTokenizer(), failure=EnvironmentProblem("the device is gone"))
    client = client_of(session)
    events = events_of(client.post("/generate", json={"prompt": "hi", "stream": True}).text)
    assert [name for name, _data in events] == ["step", "error"]
    assert events[-1][1]["error"]["message"] == "the device is gone"
    answer = client.post("/generate", json={"prompt": "hi"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "failed")


def test_time_that_runs_out() -> None:
    held = FakeSession(tokenizer=FakeTokenizer(), hold=True)
    client = client_of(held)
    answer = client.post("/generate", json={"prompt": "hi", "timeout": 0.05})
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "timeout"
    events = events_of(client.post("/generate", json={"prompt": "hi", "timeout": 0.05, "stream": True}).text)
    assert [(name, data["error"]["code"]) for name, data in events] == [("error", "timeout")]


@pytest.mark.parametrize(("switch", "named"), [(False, "cannot switch"), (True, "no chat")])
def test_thinking_that_would_change_nothing_is_refused(switch: bool, named: str) -> None:
    client = client_of(FakeSession(tokenizer=FakeTokenizer(switch=switch)))
    answer = client.post("/generate", json={"prompt": "hi", "thinking": True, "raw": switch})
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]
