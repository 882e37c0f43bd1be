"""OpenAI's routes, seen by OpenAI's shapes."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.server.conftest import client_of, events_of
from tests.server.fake import CAPACITY, MODEL, FakeSession, FakeTokenizer
from xpress_runtime.errors import EnvironmentProblem
from xpress_runtime.server import ServerSettings

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "hi", "max_tokens": 4}


def test_chat(client: TestClient) -> None:
    body = client.post("/v1/chat/completions", json=CHAT).json()
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"]) == ("chat.completion", MODEL)
    (choice,) = body["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": " w0 w1 w2 w3", "refusal": None},
        "logprobs": None,
        "finish_reason": "length",
    }
    usage = body["usage"]
    assert usage["completion_tokens"] == 4
    assert usage["total_tokens"] == usage["prompt_tokens"] + 4
    assert usage["completion_tokens_details"] == {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 4}
    assert usage["speculation"]["rounds"] == 2
    assert usage["speculation"]["proposed"] == 6


@pytest.mark.parametrize("usage", [False, True])
def test_chat_in_chunks(client: TestClient, usage: bool) -> None:
    body = {**CHAT, "stream": True, **({"stream_options": {"include_usage": True}} if usage else {})}
    events = events_of(client.post("/v1/chat/completions", json=body).text)
    assert {name for name, _data in events} == {""}
    *chunks, (_name, end) = events
    assert end == "[DONE]"
    data = [chunk for _name, chunk in chunks]
    assert len({chunk["id"] for chunk in data}) == len({chunk["created"] for chunk in data}) == 1
    assert {chunk["object"] for chunk in data} == {"chat.completion.chunk"}
    assert all(("usage" in chunk) == usage for chunk in data)
    if usage:
        last = data.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 4
        assert all(chunk["usage"] is None for chunk in data)
    choices = [chunk["choices"][0] for chunk in data]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert choices[-1]["delta"] == {}
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == " w0 w1 w2 w3"


def test_completion(client: TestClient) -> None:
    body = client.post("/v1/completions", json=COMPLETION).json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": " w0 w1 w2 w3", "logprobs": None, "finish_reason": "length"}]
    assert body["usage"]["prompt_tokens"] == 2


def test_completion_in_chunks(client: TestClient) -> None:
    *chunks, end = events_of(client.post("/v1/completions", json={**COMPLETION, "stream": True}).text)
    assert end == ("", "[DONE]")
    assert "".join(data["choices"][0]["text"] for _name, data in chunks) == " w0 w1 w2 w3"
    assert [data["choices"][0]["finish_reason"] for _name, data in chunks][-2:] == [None, "length"]


def test_defaults(client: TestClient, session: FakeSession) -> None:
    del (chat := dict(CHAT))["max_tokens"], (completion := dict(COMPLETION))["max_tokens"]
    assert client.post("/v1/chat/completions", json=chat).status_code == 200
    assert client.post("/v1/completions", json=completion).status_code == 200
    configs = [request.config for request in session.requests]
    assert [config.max_new_tokens for config in configs] == [CAPACITY, 16]
    assert [(config.temperature, config.speculation) for config in configs] == [(0, "auto")] * 2


def test_a_full_cache_is_a_length() -> None:
    client = client_of(FakeSession(tokenizer=FakeTokenizer(), finish_reason="capacity"))
    assert client.post("/v1/chat/completions", json=CHAT).json()["choices"][0]["finish_reason"] == "length"
    assert '"finish_reason":"length"' in client.post("/v1/completions", json={**COMPLETION, "stream": True}).text


def test_extensions_reach_the_session(client: TestClient, session: FakeSession) -> None:
    extra = {"top_k": 2, "min_p": 0.1, "repetition_penalty": 1.2, "speculation": "on", "num_passes": 1, "draft_steps": 2, "seed": 3}
    body = {**CHAT, **extra, "chat_template_kwargs": {"enable_thinking": False}, "stop": ["a", "b"], "ignore_eos": True}
    assert client.post("/v1/chat/completions", json={**body, "max_completion_tokens": 4}).status_code == 200
    config = session.requests[0].config
    assert {name: getattr(config, name) for name in extra} == extra
    assert (config.stop, config.ignore_stop, config.max_new_tokens) == (["a", "b"], True, 4)
    assert session.variables == [{"enable_thinking": False}]


def test_fields_without_effect_are_ignored(client: TestClient) -> None:
    harmless = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "parallel_tool_calls": True, "no_such_field": 1}
    neutral = {"n": 1, "tools": [], "tool_choice": "auto", "logprobs": False, "logit_bias": {}, "response_format": {"type": "text"}}
    assert client.post("/v1/chat/completions", json={**CHAT, **harmless, **neutral}).status_code == 200
    assert client.post("/v1/completions", json={**COMPLETION, **harmless, "best_of": 1, "echo": False, "suffix": None}).status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("n", True),
        ("tools", [{}]),
        ("functions", [{}]),
        ("tool_choice", "required"),
        ("logprobs", True),
        ("logit_bias", {"5": 1}),
        ("response_format", {"type": "json_object"}),
        ("modalities", ["audio"]),
        ("reasoning_effort", "low"),
        ("min_tokens", 3),
        ("guided_json", {}),
    ],
)
def test_what_would_change_the_output_is_refused_by_name(client: TestClient, field: str, value: object) -> None:
    answer = client.post("/v1/chat/completions", json={**CHAT, field: value})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == field
    assert "not served" in error["message"]


@pytest.mark.parametrize(("field", "value"), [("best_of", 2), ("echo", True), ("suffix", "x"), ("logprobs", 0), ("n", 3)])
def test_completions_refuse_by_name(client: TestClient, field: str, value: object) -> None:
    answer = client.post("/v1/completions", json={**COMPLETION, field: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize("prompt", [["a", "b"], [[1, 2]], [[1], [2]], [1, "a"], {}, None, 3, "", [], [""]])
def test_one_prompt_per_request(client: TestClient, prompt: object) -> None:
    answer = client.post("/v1/completions", json={**COMPLETION, "prompt": prompt})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "content": "x", "tool_call_id": "1"},
        {"role": "user", "content": None},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "assistant", "content": "x", "tool_calls": [{}]},
        {"content": "x"},
    ],
)
def test_messages_that_are_not_text_are_refused(client: TestClient, message: object) -> None:
    answer = client.post("/v1/chat/completions", json={**CHAT, "messages": [message]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("messages[0]")


def test_another_model_is_not_found(client: TestClient) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        answer = client.post(path, json={**body, "model": "gpt-4"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert client.get("/v1/models/gpt-4").json()["error"]["code"] == "model_not_found"


def test_models(client: TestClient) -> None:
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    (card,) = listed["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", CAPACITY)
    assert client.get(f"/v1/models/{MODEL}").json() == card


def test_a_name_of_its_own(session: FakeSession) -> None:
    client = client_of(session, ServerSettings(model_name="mine", model_created=5))
    assert client.get("/v1/models/mine").json()["created"] == 5
    assert client.post("/v1/completions", json={**COMPLETION, "model": "mine"}).json()["model"] == "mine"


@pytest.mark.parametrize(("old", "new", "count"), [(3, None, 3), (None, 5, 5), (3, 5, 3), (6, 5, 5)])
def test_two_names_of_one_limit_both_hold(client: TestClient, old: int | None, new: int | None, count: int) -> None:
    answer = client.post("/v1/chat/completions", json={**CHAT, "max_tokens": old, "max_completion_tokens": new})
    assert answer.json()["usage"]["completion_tokens"] == count


def test_a_failure_in_the_middle_is_a_chunk() -> None:
    client = client_of(FakeSession(tokenizer=FakeTokenizer(), failure=EnvironmentProblem("the device is gone")))
    events = events_of(client.post("/v1/chat/completions", json={**CHAT, "stream": True}).text)
    assert events[-2][1]["error"]["message"] == "the device is gone"
    assert events[-1][1] == "[DONE]"


def test_chat_without_a_template() -> None:
    answer = client_of(FakeSession(tokenizer=FakeTokenizer(template=False))).post("/v1/chat/completions", json=CHAT)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
