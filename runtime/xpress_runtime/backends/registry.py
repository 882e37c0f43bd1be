"""Which backends exist, which run here, and which one ``auto`` means."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from xpress_runtime.backends.base import Backend
from xpress_runtime.errors import EnvironmentProblem, MissingExtraError, OptionError

BACKEND_NAMES = ("ort-cpu",)


@dataclass(frozen=True)
class BackendStatus:
    """Whether a backend runs here; ``reason`` says why not, and is empty where it does."""

    name: str
    runs: bool
    reason: str


def probe_backends() -> list[BackendStatus]:
    """The state of every backend, in the order in which ``auto`` tries them. Imports nothing heavy."""
    if importlib.util.find_spec("onnxruntime") is None:
        return [BackendStatus("ort-cpu", False, str(MissingExtraError("onnxruntime", "cpu")))]
    return [BackendStatus("ort-cpu", True, "")]


def open_backend(name: str = "auto", *, threads: int | None = None) -> Backend:
    """The named backend, or with ``auto`` the first that runs. OptionError, MissingExtraError or EnvironmentProblem say why not."""
    statuses = probe_backends()
    if name == "auto":
        for status in statuses:
            if status.runs:
                return _create(status.name, threads)
        raise EnvironmentProblem("no backend runs here: " + "; ".join(f"{status.name}: {status.reason}" for status in statuses))
    for status in statuses:
        if status.name == name:
            if not status.runs:
                raise EnvironmentProblem(f"backend {name} does not run here: {status.reason}")
            return _create(name, threads)
    raise OptionError(f"backend '{name}' does not exist; choose one of: auto, {', '.join(BACKEND_NAMES)}")


def _create(name: str, threads: int | None) -> Backend:
    assert name == "ort-cpu"
    from xpress_runtime.backends.ort_cpu import OrtCpuBackend

    return OrtCpuBackend(threads)
