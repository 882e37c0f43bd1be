"""The model of a packaged bundle for Triton's Python backend: requests in, responses out, a session in between.

Triton runs a copy of this file, beside the bundle, in a process for each instance. Needs the runtime of xpress-export in the server's
environment; ``xpress-export package`` says which extra. Knows nothing about HTTP or gRPC.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

from xpress_runtime.errors import OptionError, PromptError, UserError, XpressError
from xpress_runtime.generation import GenerationConfig
from xpress_runtime.serving import (
    BatchSession,
    Draining,
    Limits,
    QueueFull,
    Request,
    RequestCancelled,
    RequestTimedOut,
    SessionFailed,
    Step,
)

# Inputs of one value, and the fields of GenerationConfig that they set.
SETTINGS = {
    "MAX_TOKENS": "max_new_tokens",
    "IGNORE_STOP": "ignore_stop",
    "TEMPERATURE": "temperature",
    "TOP_K": "top_k",
    "TOP_P": "top_p",
    "MIN_P": "min_p",
    "REPETITION_PENALTY": "repetition_penalty",
    "PRESENCE_PENALTY": "presence_penalty",
    "FREQUENCY_PENALTY": "frequency_penalty",
    "SEED": "seed",
    "SPECULATION": "speculation",
    "NUM_PASSES": "num_passes",
    "SHORTLIST": "shortlist",
    "DRAFT_STEPS": "draft_steps",
}
# Inputs of several values, likewise.
LISTS = {"STOP": "stop", "STOP_TOKEN_IDS": "stop_token_ids"}
PROMPTS = ("PROMPT", "MESSAGES", "INPUT_IDS")

# Seconds between two looks at whether clients are still there.
_LOOK = 0.1


@dataclass(eq=False)
class _Call:
    """A request of Triton on its way. ``steps``: what was not sent yet, where all of it goes into one response."""

    sender: Any
    stream: bool
    request: Request | None = None
    steps: list[Step] = field(default_factory=list)


class TritonPythonModel:
    """What Triton calls: initialize once, execute for requests as they come, finalize at the end."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Open the bundle beside this file. ``args``: strings, among them the config as JSON."""
        config = json.loads(args["model_config"])
        self._inputs = frozenset(entry["name"] for entry in config["input"])
        parameters = {name: entry["string_value"] for name, entry in config["parameters"].items()}
        if args.get("model_instance_kind") == "GPU":
            _keep_to_device(int(args["model_instance_device_id"]))
        folder = Path(args["model_repository"]) / args["model_version"] / "bundle"
        limits = Limits(
            max_queue=int(parameters["max_queue"]),
            max_new_tokens=_optional(int, parameters.get("max_tokens")),
            timeout=_optional(float, parameters.get("timeout")),
        )
        self._drain_seconds = float(parameters["drain_seconds"])
        self._session = BatchSession.open(
            folder,
            parameters["backend"],
            slots=_optional(int, parameters.get("slots")),
            threads=_optional(int, parameters.get("threads")),
            limits=limits,
        )
        self._lock = threading.Lock()
        self._calls: set[_Call] = set()
        # What the session's thread reports; it must not wait for Triton. (None, None) ends the thread that answers.
        self._events: SimpleQueue[tuple[_Call | None, Step | None]] = SimpleQueue()
        self._answering = threading.Thread(target=self._answer, name="xpress-answers", daemon=True)
        self._answering.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Hand requests to the session and return; responses are sent as they come."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._submit(request, sender)
            except XpressError as problem:
                _send(sender, pb_utils.InferenceResponse(error=_error(problem)), last=True)

    def finalize(self) -> None:
        """Finish what runs, for a while, and give the memory back."""
        self._session.drain(timeout=self._drain_seconds)
        self._session.close()
        self._events.put((None, None))
        self._answering.join()

    def _submit(self, request: Any, sender: Any) -> None:
        values = _Values(request)
        _refuse_misspelt(request, self._inputs)
        call = _Call(sender, stream=bool(values.one("STREAM")))
        prompt, variables = self._prompt(values)
        config = _config(values, self._session.limits.max_new_tokens)
        micros = request.timeout()
        # The thread that answers waits until the request is known.
        with self._lock:
            call.request = self._session.submit(
                prompt,
                config,
                chat_variables=variables,
                timeout=micros / 1e6 if micros else None,
                on_step=lambda step: self._events.put((call, step)),
            )
            self._calls.add(call)

    def _prompt(self, values: _Values) -> tuple[Any, dict[str, Any]]:
        """The prompt and the variables of its chat template."""
        given = [name for name in PROMPTS if values.has(name)]
        if len(given) != 1:
            raise PromptError(f"the request has {' and '.join(given) or 'no prompt'}, expected one of: {', '.join(PROMPTS)}")
        thinking = values.one("THINKING")
        variables = {} if thinking is None else {"enable_thinking": thinking}
        if given == ["INPUT_IDS"]:
            return values.many("INPUT_IDS"), variables
        text = values.one(given[0])
        if given == ["MESSAGES"]:
            try:
                messages = json.loads(text)
            except ValueError as problem:
                raise PromptError(f"MESSAGES is not JSON: {problem}; give a list of objects with role and content") from None
            if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
                raise PromptError("MESSAGES is JSON of another kind; give a list of objects with role and content")
            return messages, variables
        tokenizer = self._session.tokenizer
        if values.one("RAW") or tokenizer is None or not tokenizer.has_chat_template:
            return text, variables
        return [{"role": "user", "content": text}], variables

    def _answer(self) -> None:
        """Send what the session reports, and cancel what nobody waits for any more."""
        looked = time.monotonic()
        while True:
            try:
                call, step = self._events.get(timeout=_LOOK)
            except Empty:
                pass
            else:
                if call is None:
                    return
                with self._lock:
                    request = call.request
                if request is not None:
                    self._pass_on(call, request, step)
            if time.monotonic() - looked >= _LOOK:
                looked = time.monotonic()
                self._look_for_cancelled()

    def _pass_on(self, call: _Call, request: Request, step: Step | None) -> None:
        try:
            if step is None:
                self._calls.discard(call)
                _send(call.sender, _last_response(call, request), last=True)
            elif call.stream:
                _send(call.sender, _response([step]), last=False)
            else:
                call.steps.append(step)
        except pb_utils.TritonModelException as problem:
            # Triton takes no more responses to this request.
            pb_utils.Logger.log_warn(f"request {request.id} ends: {problem}")
            request.cancel()

    def _look_for_cancelled(self) -> None:
        with self._lock:
            calls = list(self._calls)
        for call in calls:
            if call.request is not None and call.sender.is_cancelled():
                call.request.cancel()


def _refuse_misspelt(request: Any, inputs: frozenset[str]) -> None:
    """OptionError for an input in lower case: Triton makes a parameter of what it does not know, and nobody would read it."""
    for name in json.loads(request.parameters() or "{}"):
        if name not in inputs and name.upper() in inputs:
            raise OptionError(f"the request has '{name}', which is no input; the input is {name.upper()}")


class _Values:
    """The inputs of a request by name, as Python's own values; PromptError and OptionError name the input."""

    def __init__(self, request: Any) -> None:
        self._find = partial(pb_utils.get_input_tensor_by_name, request)

    def has(self, name: str) -> bool:
        return self._find(name) is not None

    def many(self, name: str) -> list[Any]:
        tensor = self._find(name)
        if tensor is None:
            return []
        array = tensor.as_numpy()
        if array.ndim != 1:
            raise OptionError(f"{name} has shape {list(array.shape)}, expected one dimension")
        return [_text(name, value) if isinstance(value, bytes) else value for value in array.tolist()]

    def one(self, name: str) -> Any:
        if not self.has(name):
            return None
        values = self.many(name)
        if len(values) != 1:
            raise OptionError(f"{name} has {len(values)} values, expected 1")
        return values[0]


def _text(name: str, value: bytes) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise PromptError(f"{name} is not UTF-8 text: {problem.reason} at byte {problem.start}") from None


def _config(values: _Values, most: int | None) -> GenerationConfig:
    """``most``: output tokens that may be asked for; what a request gets that names no number is within it."""
    given = {setting: values.one(name) for name, setting in SETTINGS.items() if values.has(name)}
    given |= {setting: values.many(name) for name, setting in LISTS.items() if values.has(name)}
    number = GenerationConfig.max_new_tokens if most is None else min(most, GenerationConfig.max_new_tokens)
    return GenerationConfig(**{"speculation": "auto", "max_new_tokens": number, **given})


def _response(steps: Sequence[Step], finish_reason: str = "", stats: str = "") -> Any:
    tokens = [token.id for step in steps for token in step.tokens]
    outputs = (
        ("TEXT", _strings("".join(step.text for step in steps))),
        ("TOKEN_IDS", np.array(tokens, dtype=np.int64)),
        ("PROPOSED_TOKENS", np.array([sum(step.proposed for step in steps)], dtype=np.int64)),
        ("ACCEPTED_TOKENS", np.array([sum(step.accepted for step in steps)], dtype=np.int64)),
        ("FINISH_REASON", _strings(finish_reason)),
        ("STATS", _strings(stats)),
    )
    return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor(name, array) for name, array in outputs])


def _last_response(call: _Call, request: Request) -> Any:
    try:
        result = request.result(timeout=0)
    except XpressError as problem:
        return pb_utils.InferenceResponse(error=_error(problem))
    return _response(call.steps, result.finish_reason, json.dumps(result.stats.to_json()))


def _send(sender: Any, response: Any, *, last: bool) -> None:
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0)


def _error(problem: XpressError) -> Any:
    error = pb_utils.TritonError
    if isinstance(problem, QueueFull | Draining | RequestTimedOut | SessionFailed):
        code = error.UNAVAILABLE
    elif isinstance(problem, RequestCancelled):
        code = error.CANCELLED
    else:
        code = error.INVALID_ARG if isinstance(problem, UserError) else error.INTERNAL
    return error(str(problem), code)


def _strings(text: str) -> Any:
    return np.array([text.encode("utf-8")], dtype=np.object_)


def _optional(kind: type, text: str | None) -> Any:
    return None if text is None else kind(text)


def _keep_to_device(device: int) -> None:
    """Show this process its own GPU alone; nothing has used one in it yet."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = str(device) if visible is None else visible.split(",")[device]
