"""model.py of a packaged bundle, run as Triton's Python backend runs it, against what a session of its own generates."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Built
from tests.scale_out import backend_utils
from tests.scale_out.backend_utils import InferenceRequest, TritonError
from xpress_export.triton import PackageOptions, write_model
from xpress_export.triton.config import INPUTS, OUTPUTS
from xpress_runtime.generation import GenerationConfig
from xpress_runtime.session import Session

PROMPT = [3, 4, 5]
NUMPY_TYPES = {"TYPE_STRING": object, "TYPE_INT64": np.int64, "TYPE_FP64": np.float64, "TYPE_BOOL": np.bool_}


@pytest.fixture(scope="module")
def packaged(tiny: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = PackageOptions("ort-cpu", slots=2, threads=1, max_queue=40, max_tokens=60)
    return write_model(tiny.bundle, tmp_path_factory.mktemp("repository"), options, name="tiny").folder


def _initialized(folder: Path, monkeypatch: pytest.MonkeyPatch, **parameters: str) -> Any:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", backend_utils.module())
    spec = importlib.util.spec_from_file_location("packaged_model", folder / "1" / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "packaged_model", module)
    spec.loader.exec_module(module)
    found = PackageOptions("ort-cpu", slots=2, threads=1, max_queue=40, max_tokens=60).parameters() | parameters
    config = {
        "input": [{"name": tensor.name, "data_type": tensor.data_type, "dims": [tensor.dims]} for tensor in INPUTS],
        "parameters": {name: {"string_value": value} for name, value in found.items()},
    }
    model = module.TritonPythonModel()
    model.initialize(
        {
            "model_config": json.dumps(config),
            "model_instance_kind": "CPU",
            "model_instance_device_id": "0",
            "model_repository": str(folder),
            "model_version": "1",
            "model_name": folder.name,
        }
    )
    return model


@pytest.fixture
def model(packaged: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made = _initialized(packaged, monkeypatch)
    yield made
    made.finalize()


def _responses(model: Any, request: InferenceRequest) -> list[dict[str, Any]]:
    """What a request gets, outputs by name as lists; it must be no error, and of the types that the config promises."""
    model.execute([request])
    return _awaited(request)


def _awaited(request: InferenceRequest) -> list[dict[str, Any]]:
    assert request.sender.ended.wait(20), "no last response"
    found = []
    for response in request.sender.responses:
        assert not response.has_error(), response.error().message()  # type: ignore[union-attr]
        arrays = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
        assert {name: array.dtype for name, array in arrays.items()} == {t.name: np.dtype(NUMPY_TYPES[t.data_type]) for t in OUTPUTS}
        assert all(arrays[tensor.name].shape == (1,) for tensor in OUTPUTS if tensor.dims == 1)
        found.append({name: array.tolist() for name, array in arrays.items()})
    return found


def _error(request: InferenceRequest) -> TritonError:
    assert request.sender.ended.wait(20), "no last response"
    error = request.sender.responses[-1].error()
    assert error is not None
    return error


def _expected(built: Built, prompt: list[int], **config: Any) -> list[int]:
    with Session.open(built.bundle.folder, "ort-cpu", threads=1, verify=False) as session:
        return list(session.generate(prompt, GenerationConfig(speculation="off", **config)).tokens)


def test_token_ids_in_give_the_tokens_of_a_session(model: Any, tiny: Built) -> None:
    (response,) = _responses(model, InferenceRequest({"INPUT_IDS": PROMPT, "MAX_TOKENS": 24}))
    assert response["TOKEN_IDS"] == _expected(tiny, PROMPT, max_new_tokens=24)
    assert response["FINISH_REASON"] == [b"length"]
    assert json.loads(response["STATS"][0])["output_tokens"] == 24


def test_a_stream_is_the_same_tokens_step_by_step(model: Any, tiny: Built) -> None:
    request = InferenceRequest({"INPUT_IDS": PROMPT, "MAX_TOKENS": 24, "STREAM": True, "SPECULATION": "on", "NUM_PASSES": 3})
    *steps, last = _responses(model, request)
    assert len(steps) > 2
    assert [token for step in steps for token in step["TOKEN_IDS"]] == _expected(tiny, PROMPT, max_new_tokens=24)
    assert steps[0]["PROPOSED_TOKENS"] == [0] and steps[1]["PROPOSED_TOKENS"] == [3]
    assert last["TOKEN_IDS"] == [] and last["FINISH_REASON"] == [b"length"]
    assert all(step["FINISH_REASON"] == [b""] for step in steps)


def test_settings_reach_the_session(model: Any, tiny: Built) -> None:
    free = _expected(tiny, PROMPT, max_new_tokens=24)
    request = InferenceRequest({"INPUT_IDS": PROMPT, "MAX_TOKENS": 24, "STOP_TOKEN_IDS": [free[3]], "REPETITION_PENALTY": 1.0})
    (response,) = _responses(model, request)
    assert response["TOKEN_IDS"] == free[: free.index(free[3]) + 1]
    assert response["FINISH_REASON"] == [b"stop"]


def test_without_a_number_of_tokens_it_is_what_may_be_asked_for(model: Any, tiny: Built) -> None:
    (response,) = _responses(model, InferenceRequest({"INPUT_IDS": PROMPT, "IGNORE_STOP": True}))
    assert response["TOKEN_IDS"] == _expected(tiny, PROMPT, max_new_tokens=60, ignore_stop=True)


def test_requests_of_one_call_share_rounds_and_keep_their_answers(model: Any, tiny: Built) -> None:
    prompts = [[2 + number, 5, 7] for number in range(12)]
    requests = [InferenceRequest({"INPUT_IDS": prompt, "MAX_TOKENS": 20}) for prompt in prompts]
    model.execute(requests)
    assert [_awaited(request)[0]["TOKEN_IDS"] for request in requests] == [_expected(tiny, prompt, max_new_tokens=20) for prompt in prompts]


def test_calls_of_several_threads_at_once(model: Any, tiny: Built) -> None:
    requests = [InferenceRequest({"INPUT_IDS": PROMPT, "MAX_TOKENS": 16, "STREAM": bool(number % 2)}) for number in range(8)]
    threads = [threading.Thread(target=model.execute, args=([request],)) for request in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = _expected(tiny, PROMPT, max_new_tokens=16)
    for request in requests:
        assert [token for response in _awaited(request) for token in response["TOKEN_IDS"]] == expected


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "has no prompt, expected one of: PROMPT, MESSAGES, INPUT_IDS"),
        ({"INPUT_IDS": PROMPT, "PROMPT": "x"}, "has PROMPT and INPUT_IDS"),
        ({"INPUT_IDS": [3, 61]}, "prompt item 1 is 61"),
        ({"INPUT_IDS": np.array([], dtype=np.int64)}, "the prompt is empty"),
        ({"INPUT_IDS": np.array([[3, 4]])}, "INPUT_IDS has shape [1, 2]"),
        ({"PROMPT": "words"}, "this bundle has no tokenizer"),
        ({"PROMPT": b"\xff"}, "PROMPT is not UTF-8 text"),
        ({"MESSAGES": "{"}, "MESSAGES is not JSON"),
        ({"MESSAGES": "[1]"}, "MESSAGES is JSON of another kind"),
        ({"INPUT_IDS": PROMPT, "MAX_TOKENS": 0}, "max_new_tokens is 0"),
        ({"INPUT_IDS": PROMPT, "MAX_TOKENS": 61}, "at most 60 are allowed"),
        ({"INPUT_IDS": PROMPT, "MAX_TOKENS": [3, 4]}, "MAX_TOKENS has 2 values, expected 1"),
        ({"INPUT_IDS": PROMPT, "SPECULATION": "maybe"}, "speculation is 'maybe'"),
        ({"INPUT_IDS": PROMPT, "THINKING": True}, "chat variables"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_bad_input_is_an_error_response(model: Any, inputs: dict[str, Any], message: str) -> None:
    request = InferenceRequest(inputs)
    model.execute([request])
    error = _error(request)
    assert error.code() == TritonError.INVALID_ARG
    assert message in error.message()


def test_an_input_in_lower_case_is_not_ignored(model: Any) -> None:
    request = InferenceRequest({"INPUT_IDS": PROMPT}, parameters={"max_tokens": 3, "traceparent": "00"})
    model.execute([request])
    assert _error(request).message() == "the request has 'max_tokens', which is no input; the input is MAX_TOKENS"


def test_a_client_that_goes_away_frees_its_slot(model: Any) -> None:
    gone, broken = (InferenceRequest({"INPUT_IDS": PROMPT, "MAX_TOKENS": 60, "IGNORE_STOP": True, "STREAM": True}) for _ in range(2))
    gone.sender.cancelled = broken.sender.broken = True
    model.execute([gone, broken] + [InferenceRequest({"INPUT_IDS": PROMPT, "MAX_TOKENS": 60, "IGNORE_STOP": True}) for _ in range(20)])
    assert _error(broken).code() == TritonError.CANCELLED
    assert gone.sender.ended.wait(20)


def test_a_cancelled_request_that_waits_is_never_begun(model: Any) -> None:
    waiting = InferenceRequest({"INPUT_IDS": PROMPT})
    waiting.sender.cancelled = True
    before = [InferenceRequest({"INPUT_IDS": PROMPT, "MAX_TOKENS": 60, "IGNORE_STOP": True}) for _ in range(30)]
    model.execute([*before, waiting])
    assert _error(waiting).code() == TritonError.CANCELLED
    assert not [response for response in waiting.sender.responses if response.output_tensors()]


def test_a_request_has_the_time_that_it_brings(model: Any) -> None:
    request = InferenceRequest({"INPUT_IDS": PROMPT}, timeout=1)
    model.execute([request])
    assert _error(request).code() == TritonError.UNAVAILABLE


def test_a_full_queue_is_told(packaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _initialized(packaged, monkeypatch, max_queue="1")
    requests = [InferenceRequest({"INPUT_IDS": PROMPT, "MAX_TOKENS": 60, "IGNORE_STOP": True}) for _ in range(30)]
    model.execute(requests)
    model.finalize()
    codes = [request.sender.responses[-1].error() for request in requests]
    assert {error.code() for error in codes if error is not None} == {TritonError.UNAVAILABLE}
    assert None in codes


def test_finalize_finishes_what_runs_and_ends_its_threads(packaged: Path, monkeypatch: pytest.MonkeyPatch, tiny: Built) -> None:
    before = set(threading.enumerate())
    model = _initialized(packaged, monkeypatch)
    request = InferenceRequest({"INPUT_IDS": PROMPT, "MAX_TOKENS": 40})
    model.execute([request])
    model.finalize()
    assert _awaited(request)[0]["TOKEN_IDS"] == _expected(tiny, PROMPT, max_new_tokens=40)
    deadline = time.monotonic() + 5
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - before


def test_a_gpu_instance_keeps_to_its_gpu(packaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _initialized(packaged, monkeypatch).finalize()
    keep = sys.modules["packaged_model"]._keep_to_device
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    keep(1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    keep(1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"


def test_every_declared_input_is_read(packaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _initialized(packaged, monkeypatch).finalize()
    module = sys.modules["packaged_model"]
    read = {*module.SETTINGS, *module.LISTS, *module.PROMPTS, "RAW", "THINKING", "STREAM"}
    assert read == {tensor.name for tensor in INPUTS}
