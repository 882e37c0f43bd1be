"""Bodies that are wrong in every way: 400, one line that names the field, never a defect."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.server.conftest import client_of
from tests.server.fake import MODEL, FakeSession

JSON = {"content-type": "application/json"}
ROUTES = ("/generate", "/v1/completions", "/v1/chat/completions")


def error_of(answer: Any, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"].isprintable()
    assert len(error["message"]) <= 1000
    return error


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "empty"),
        (b"null", "null"),
        (b"[]", "[]"),
        (b'"x"', "JSON object"),
        (b"{", "not JSON"),
        (b'{"prompt": "x"} {}', "not JSON"),
        (b"\xff\xfe", "UTF-8"),
        (b'\xef\xbb\xbf{"prompt": "x"}', "BOM"),
        (b'{"prompt": NaN}', "NaN"),
        (b'{"temperature": -Infinity}', "-Infinity"),
        (b'{"temperature": 1e999}', "1e999"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "at most 300 digits"),
        (b'{"prompt": "a", "prompt": "b"}', "more than once"),
        (b'{"prompt": "\\ud800"}', "lone surrogate"),
        (b'{"prompt": "x", "stop": ["\\udfff"]}', "stop[0]"),
        (b'{"\\ud800": 1}', "lone surrogate"),
        (b"[" * 100_000, "nested"),
        (b'{"prompt": ' * 70 + b"1" + b"}" * 70, "nested"),
    ],
)
def test_what_is_no_body(client: TestClient, path: str, content: bytes, named: str) -> None:
    assert named in error_of(client.post(path, content=content, headers=JSON), 400)["message"]


@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({"max_new_tokens": 3}, "max_new_tokens", "did you mean max_tokens?"),
        ({"zzz": 3}, "zzz", "it takes"),
        ({"max_tokens": 0}, "max_tokens", "is 0, expected a number of at least 1"),
        ({"max_tokens": "4"}, "max_tokens", 'is "4", expected an integer'),
        ({"max_tokens": True}, "max_tokens", "is true"),
        ({"max_tokens": 2**62}, "max_tokens", "at most"),
        ({"max_tokens": 1.5}, "max_tokens", "is 1.5, expected an integer"),
        ({"temperature": -1}, "temperature", "is -1"),
        ({"temperature": 1e-9}, "temperature", "is 1e-09"),
        ({"temperature": 2**63 - 1}, "temperature", "at most 100"),
        ({"top_p": 0}, "top_p", "over 0"),
        ({"min_p": 1.1}, "min_p", "at most 1"),
        ({"presence_penalty": 3}, "presence_penalty", "at most 2"),
        ({"seed": -1}, "seed", "is -1"),
        ({"seed": 2**63}, "seed", "at most 9223372036854775807"),
        ({"seed": 10**299}, "seed", "is 1000"),
        ({"temperature": 10**299}, "temperature", "is 1000"),
        ({"max_tokens": -(10**298)}, "max_tokens", "is -1000"),
        ({"prompt": [10**299]}, "prompt", "prompt[0] is 1000"),
        ({"stop": [""]}, "stop", "stop[0]"),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"stop": 5}, "stop", "stop is 5"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "is -1"),
        ({"speculation": "yes"}, "speculation", "'auto'"),
        ({"num_passes": 9}, "num_passes", "num_passes is 9"),
        ({"speculation": "off", "draft_steps": 2}, "draft_steps", "speculation is off"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"timeout": 0}, "timeout", "at least 0.001"),
        ({"prompt": []}, "prompt", "prompt is [], expected text"),
        ({"prompt": ""}, "prompt", 'prompt is "", expected text'),
        ({"prompt": [1, "a"]}, "prompt", 'prompt[1] is "a"'),
        ({"prompt": [1, True]}, "prompt", "prompt[1] is true"),
        ({"prompt": [[1]]}, "prompt", "prompt[0] is [1]"),
        ({"prompt": [99999]}, "prompt", "99999"),
        ({"prompt": "x" * 300}, "prompt", "capacity"),
        ({"prompt": [{"role": "user"}]}, "prompt", "content"),
        ({"prompt": [{"role": "user", "content": "x"}, 3]}, "prompt", "prompt[1] is 3"),
        ({"prompt": [{"role": "user", "content": "x"}], "raw": True}, "raw", "raw is true"),
    ],
)
def test_a_wrong_field_is_named(client: TestClient, fields: dict[str, Any], param: str, named: str) -> None:
    error = error_of(client.post("/generate", json={"prompt": "hi", **fields}), 400)
    assert error["param"] == param
    assert named in error["message"]


def test_what_arrived_is_shortened_and_escaped(client: TestClient) -> None:
    error = error_of(client.post("/generate", json={"prompt": "hi", "seed": "\n\u2028\x1b[31mé" + "x" * 10_000}), 400)
    assert "\\n\\u2028\\u001b[31m\\u00e9xxx" in error["message"]
    assert len(error["message"]) < 200
    name = "a\nb" + "y" * 10_000
    assert len(error_of(client.post("/generate", json={"prompt": "hi", name: 1}), 400)["message"]) < 1000


def test_odd_text_is_text(client: TestClient) -> None:
    for text in ("a\0b", "\u2028", "\U0010ffff", "\ufffe", "\r\n"):
        body = {"prompt": text, "max_tokens": 1, "stop": text}
        assert client.post("/generate", content=json.dumps(body), headers=JSON).status_code == 200
        # A pair of surrogates is one character.
        assert client.post("/generate", json={**body, "stream": True}).status_code == 200


def test_a_large_body_is_read_quickly(client: TestClient) -> None:
    many = {str(number): number for number in range(60_000)}
    for body in (["x"] * 200_000, [[]] * 250_000, {**many}, {"prompt": [[1]] * 200_000}, {"prompt": ["\U0001f600"] * 60_000}):
        began = time.perf_counter()
        content = json.dumps(body, separators=(",", ":")).encode()
        assert len(content) < 1024 * 1024
        error_of(client.post("/generate", content=content, headers=JSON), 400)
        assert time.perf_counter() - began < 10


def test_the_deepest_body_that_passes(client: TestClient) -> None:
    for depth, status in ((60, 200), (70, 400)):
        ignored = b"[" * depth + b"]" * depth
        content = b'{"model": "' + MODEL.encode() + b'", "prompt": "hi", "no_such_field": ' + ignored + b"}"
        assert client.post("/v1/completions", content=content, headers=JSON).status_code == status


def test_whole_numbers_may_be_written_with_a_point(client: TestClient, session: FakeSession) -> None:
    content = b'{"prompt": [1.0, 2e0], "max_tokens": 1.0, "temperature": 0.0, "top_k": 5.0}'
    assert client.post("/generate", content=content, headers=JSON).status_code == 200
    assert session.prompts == [[1, 2]]
    assert session.requests[0].config.top_k == 5


def test_text_without_a_tokenizer() -> None:
    client = client_of(FakeSession())
    assert "token ids" in error_of(client.post("/generate", json={"prompt": "hi"}), 400)["message"]
    assert client.post("/v1/completions", json={"model": MODEL, "prompt": [1, 2]}).status_code == 200


@pytest.mark.parametrize(
    "given", [None, "text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1", "json", ";"]
)
def test_other_content_types(client: TestClient, given: str | None) -> None:
    headers = {} if given is None else {"content-type": given}
    error = error_of(client.post("/generate", content=b'{"prompt": "hi"}', headers=headers), 415)
    assert error["param"] == "content-type"


def test_utf8_may_be_said(client: TestClient) -> None:
    headers = {"content-type": "application/json; charset=UTF-8"}
    assert client.post("/generate", content='{"prompt": "é", "max_tokens": 1}'.encode(), headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/nope", "/v1", "/generate/", "/v1/models/", "/%00", "/%ff", "/docs"])
def test_other_paths(client: TestClient, path: str) -> None:
    error_of(client.get(path), 404)


@pytest.mark.parametrize(("method", "path"), [("GET", "/generate"), ("POST", "/ready"), ("DELETE", "/v1/models"), ("OPTIONS", "/generate")])
def test_other_methods(client: TestClient, method: str, path: str) -> None:
    answer = client.request(method, path)
    assert error_of(answer, 405)["code"] == "method_not_allowed"
    assert answer.headers["allow"]


def test_a_defect_of_the_server_keeps_its_words_to_itself(
    client: TestClient, session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a secret path")

    monkeypatch.setattr(session, "submit", broken)
    error = error_of(client.post("/generate", json={"prompt": "hi"}), 500)
    assert "secret" not in error["message"]
    assert error["type"] == "server_error"
