"""Metrics, page, HEAD and the description of the interface."""

from __future__ import annotations

import time
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.server.conftest import app_of, client_of
from tests.server.fake import CAPACITY, MODEL, VOCABULARY, FakeSession
from xpress_runtime.bundle import Bundle
from xpress_runtime.server import ServerSettings
from xpress_runtime.server.settings import target_name


def figures(client: TestClient) -> dict[str, float]:
    lines = client.get("/metrics").text.splitlines()
    return {name: float(value) for name, _space, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))}


def test_metrics_tell_what_happened(client: TestClient, session: FakeSession) -> None:
    client.post("/generate", json={"prompt": "hi", "max_tokens": 5})
    client.post("/generate", json={"prompt": [99999]})
    seen = figures(client)
    assert seen['xpress_requests_total{outcome="finished"}'] == 1
    assert seen['xpress_requests_total{outcome="invalid"}'] == 1
    assert seen["xpress_output_tokens_total"] == 5
    assert seen["xpress_prompt_tokens_total"] == session.requests[0].prompt_tokens
    assert seen['xpress_rounds_total{kind="speculative"}'] == 2
    assert seen['xpress_acceptance_length_bucket{le="1.0"}'] == 0
    assert seen['xpress_acceptance_length_bucket{le="2.0"}'] == seen["xpress_acceptance_length_count"] == 2
    assert [seen[f'xpress_drafts_verified_total{{position="{place}"}}'] for place in (1, 2, 3)] == [2, 2, 2]
    assert [seen[f'xpress_drafts_accepted_total{{position="{place}"}}'] for place in (1, 2, 3)] == [2, 0, 0]
    stages = {stage: seen[f'xpress_stage_seconds_total{{stage="{stage}"}}'] for stage in ("prefill", "draft", "refine", "verify")}
    assert stages == pytest.approx({"prefill": 0.001, "draft": 0.002, "refine": 0.004, "verify": 0.006})
    for name in ("time_to_first_token", "time_between_tokens", "queue", "request"):
        assert seen[f"xpress_{name}_seconds_count"] == 1
    assert (seen["xpress_slots"], seen["xpress_slots_in_use"], seen["xpress_requests_queued"]) == (2, 0, 0)
    assert seen['xpress_http_requests_total{method="POST",path="/generate",status="200"}'] == 1
    assert seen['xpress_http_requests_total{method="POST",path="/generate",status="400"}'] == 1


def test_metrics_show_the_queue() -> None:
    session = FakeSession(hold=True)
    client = client_of(session)
    for _ in range(3):
        session.submit([1])
    seen = figures(client)
    assert (seen["xpress_slots_in_use"], seen["xpress_requests_queued"]) == (2, 1)
    session.close()
    assert figures(client)['xpress_requests_total{outcome="cancelled"}'] == 3


def test_paths_of_metrics_are_those_of_routes(client: TestClient) -> None:
    for path in ("/a", "/b", f"/v1/models/{MODEL}", "/v1/models/x/y"):
        client.get(path)
        client.request("BREW", path)
    paths = {name for name in figures(client) if name.startswith("xpress_http_requests_total")}
    assert len([name for name in paths if 'path="other"' in name]) == 2
    assert len([name for name in paths if 'path="/v1/models/{model:path}"' in name]) <= 3


def test_two_applications_have_two_registries(session: FakeSession) -> None:
    first, second = client_of(session), client_of(session)
    first.get("/nope")
    assert not [name for name in figures(second) if 'status="404"' in name]


def test_the_page_is_served_and_talks_to_nobody_else(client: TestClient) -> None:
    answer = client.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "connect-src 'self'" in answer.headers["content-security-policy"]
    assert "<html" in answer.text


@pytest.mark.parametrize("path", ["/", "/health", "/ready", "/metrics", "/v1/models", f"/v1/models/{MODEL}", "/openapi.json", "/nope"])
def test_head_is_get_without_a_body(client: TestClient, path: str) -> None:
    head, get = client.head(path), client.get(path)
    assert head.status_code == get.status_code
    assert head.content == b""
    assert head.headers["content-type"] == get.headers["content-type"]


def test_states(client: TestClient) -> None:
    assert client.get("/health").json()["status"] == "alive"
    ready = client.get("/ready").json()
    assert (ready["status"], ready["slots"], ready["queued"]) == ("ready", 2, 0)


# The description.


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()


def test_the_description_is_whole(client: TestClient) -> None:
    described = client.get("/openapi.json").json()
    schemas = described["components"]["schemas"]
    assert {reference.rpartition("/")[2] for reference in references(described)} <= set(schemas)
    assert "HTTPValidationError" not in schemas
    assert "securitySchemes" not in described["components"]
    for path in ("/generate", "/v1/completions", "/v1/chat/completions"):
        responses = described["paths"][path]["post"]["responses"]
        assert {"200", "400", "413", "415", "429", "503", "504"} <= set(responses)
        assert "422" not in responses
        assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
        assert "Retry-After" in responses["429"]["headers"]
    assert f"{CAPACITY} tokens" in described["info"]["description"]


def test_the_description_has_the_bundle_s_ranges(client: TestClient) -> None:
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    prompt = schemas["GenerateRequest"]["properties"]["prompt"]["anyOf"]
    ids = next(choice for choice in prompt if choice.get("items", {}).get("type") == "integer")
    assert ids["items"]["maximum"] == VOCABULARY - 1
    assert schemas["ChatRequest"]["properties"]["model"]["enum"] == [MODEL]
    seed = schemas["ChatRequest"]["properties"]["seed"]["anyOf"][0]
    assert seed["maximum"] == 2**63 - 1
    assert schemas["ChatRequest"]["properties"]["num_passes"]["anyOf"][0]["enum"] == [0, 1, 2]
    assert schemas["GenerateRequest"]["additionalProperties"] is False


def test_keys_are_described_where_there_are_some(session: FakeSession) -> None:
    described = app_of(session, ServerSettings(api_keys=("k",))).openapi()
    assert set(described["components"]["securitySchemes"]) == {"bearer", "key"}
    assert described["paths"]["/generate"]["post"]["security"] == [{"bearer": []}, {"key": []}]
    assert "401" in described["paths"]["/metrics"]["get"]["responses"]
    assert "security" not in described["paths"]["/health"]["get"]


def test_answers_are_what_the_description_says(client: TestClient) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    described = client.get("/openapi.json").json()
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    calls = [
        ("/generate", "post", {"prompt": "hi", "max_tokens": 3}),
        ("/v1/completions", "post", {"model": MODEL, "prompt": "hi"}),
        ("/v1/chat/completions", "post", {**chat, "max_tokens": 3}),
        ("/v1/chat/completions", "post", {**chat, "n": 2}),
        ("/v1/models", "get", None),
        ("/ready", "get", None),
    ]
    for path, method, body in calls:
        answer = client.request(method, path, json=body)
        schema = described["paths"][path][method]["responses"][str(answer.status_code)]["content"]["application/json"]["schema"]
        jsonschema.validate(answer.json(), {**schema, "components": described["components"]})


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B"),
        ("/models/some/Qwen3-4B/", "Qwen3-4B"),
        ("./target", "target"),
        ("model.Q4_1.gguf", "model.Q4_1"),
        ("folder/model.gguf", "model"),
        ("C:\\models\\Qwen3", "Qwen3"),
        ("/", "model"),
    ],
)
def test_names_of_targets(source: str, name: str) -> None:
    from types import SimpleNamespace

    manifest: Any = SimpleNamespace(target=SimpleNamespace(origin=SimpleNamespace(source=source)))
    bundle: Any = SimpleNamespace(manifest=manifest)
    assert isinstance(bundle, Bundle) is False
    assert target_name(bundle) == name


def test_observers_are_quick(client: TestClient, session: FakeSession) -> None:
    began = time.perf_counter()
    for _ in range(20):
        client.post("/generate", json={"prompt": "hi", "max_tokens": 20})
    assert time.perf_counter() - began < 10
    assert len(session.requests) == 20
