"""What the Ray Serve application is told: ``name=value`` pairs, checked. Knows nothing about Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from xpress_runtime.errors import OptionError


class Arguments(BaseModel):
    """What ``build`` takes. ``cores``, ``gpus``, ``slots`` and ``max_queue`` are those of one replica; seconds, bytes.

    What waits is better kept in the router, where the first replica with room takes it: a short ``max_queue`` in each replica, and
    ``max_waiting`` in front of all of them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    bundle: str = Field(min_length=1)
    backend: str = "auto"
    replicas: int = Field(default=1, ge=1)
    slots: int | None = Field(default=None, ge=1)
    cores: int = Field(default=1, ge=1)
    gpus: float = Field(default=0, ge=0)
    pin: bool = False
    max_queue: int = Field(default=8, ge=0)
    max_waiting: int = Field(default=64, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    timeout: float | None = Field(default=None, gt=0)
    max_body: int = Field(default=1 << 20, ge=1)
    api_key_file: str | None = None
    model_name: str | None = None
    drain_seconds: float = Field(default=30, ge=0)
    retries: int = Field(default=3, ge=0)
    routers: int = Field(default=1, ge=1)

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Arguments:
        """From ``name=value`` pairs, values as text or of their type; OptionError names what is wrong."""
        try:
            return cls.model_validate(dict(given))
        except ValidationError as problem:
            raise OptionError("; ".join(_told(error) for error in problem.errors())) from None


def _told(error: Mapping[str, Any]) -> str:
    name = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        return f"argument '{name}' does not exist; there are: {', '.join(Arguments.model_fields)}"
    if error["type"] == "missing":
        return f"argument '{name}' is missing; give it as {name}=…"
    return f"argument '{name}' is {error['input']!r}: {error['msg'][:1].lower()}{error['msg'][1:]}"
