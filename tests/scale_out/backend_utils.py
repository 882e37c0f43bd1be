"""A stand-in for Triton's ``triton_python_backend_utils``: what model.py uses of it, with the same refusals."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class TritonModelException(Exception):
    pass


class TritonError:
    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message, self._code = message, code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class Tensor:
    def __init__(self, name: str, array: Any) -> None:
        if not isinstance(array, np.ndarray) or (array.dtype == object and not all(isinstance(item, bytes) for item in array.flat)):
            raise TritonModelException(f"{name} is no array of numbers or bytes")
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self._array


class InferenceResponse:
    def __init__(self, output_tensors: Sequence[Tensor] = (), error: TritonError | None = None) -> None:
        self._tensors, self._error = list(output_tensors), error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error


class ResponseSender:
    """Takes responses until one is the last, as Triton does; ``responses`` are there when ``ended`` is set."""

    def __init__(self) -> None:
        self.responses: list[InferenceResponse] = []
        self.ended = threading.Event()
        self.cancelled = False
        self.broken = False

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if self.ended.is_set():
            raise TritonModelException("a response after the last one")
        if self.broken and not flags:
            raise TritonModelException("the other side is gone")
        if response is not None:
            self.responses.append(response)
        if flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL:
            self.ended.set()

    def is_cancelled(self) -> bool:
        return self.cancelled


class InferenceRequest:
    """A request of a client. ``inputs`` by name: arrays, or plain values that become one of their type."""

    def __init__(self, inputs: Mapping[str, Any], *, timeout: int = 0, parameters: Mapping[str, Any] | None = None) -> None:
        self._inputs = {name: Tensor(name, _array(value)) for name, value in inputs.items()}
        self._timeout, self._parameters = timeout, dict(parameters or {})
        self.sender = ResponseSender()

    def inputs(self) -> list[Tensor]:
        return list(self._inputs.values())

    def get_response_sender(self) -> ResponseSender:
        return self.sender

    def timeout(self) -> int:
        return self._timeout

    def parameters(self) -> str:
        return json.dumps(self._parameters)


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
    return next((tensor for tensor in request.inputs() if tensor.name() == name), None)


def module() -> ModuleType:
    """As the module that model.py imports."""
    made = ModuleType("triton_python_backend_utils")
    made.__dict__.update({name: value for name, value in globals().items() if not name.startswith("_")})
    made.__dict__["Logger"] = type("Logger", (), {"log_warn": staticmethod(print)})
    return made


def _array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value
    values = list(value) if isinstance(value, list | tuple) else [value]
    texts = any(isinstance(item, str | bytes) for item in values)
    return np.array([item.encode() if isinstance(item, str) else item for item in values], dtype=object if texts else None)
