"""Backends, and the choice among them. A backend's packages are imported only when it is asked for."""

from __future__ import annotations

from xpress_runtime.backends.base import Backend, BoundProgram, Buffer, Program
from xpress_runtime.backends.registry import BACKEND_NAMES, open_backend, probe_backends

__all__ = ["BACKEND_NAMES", "Backend", "BoundProgram", "Buffer", "Program", "open_backend", "probe_backends"]
