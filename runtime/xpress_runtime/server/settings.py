"""What a server is told beside its session: keys, sizes and the name that it serves the model under. Knows nothing of HTTP."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from xpress_runtime.bundle import Bundle
from xpress_runtime.errors import OptionError

MAX_KEY_FILE_BYTES = 1024 * 1024
# Checkpoints that are single files; their suffix is not part of a model's name.
_CHECKPOINT_SUFFIXES = (".gguf", ".safetensors", ".pt")


@dataclass(frozen=True)
class ServerSettings:
    """Settings of one server.

    ``api_keys``: any of them opens the server, none leaves it open. ``max_body_bytes``: of a request's body. ``body_seconds``: in which the
    body must have arrived. ``head_seconds``: in which a connection must bring the head of its first request, and of each further one.
    ``max_connections``: None for as many as the process may open files, less some. ``model_name``: None for the name of the bundle's
    target. ``model_created``: seconds since 1970. Raises OptionError.
    """

    # Not shown: a representation ends up in logs.
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    max_body_bytes: int = 1024 * 1024
    body_seconds: float = 30.0
    head_seconds: float = 30.0
    max_connections: int | None = None
    model_name: str | None = None
    model_created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        for key in self.api_keys:
            check_key(key, "an API key")
        if self.max_body_bytes < 1:
            raise OptionError(f"max_body_bytes is {self.max_body_bytes}, expected at least 1")
        for name, seconds in (("body_seconds", self.body_seconds), ("head_seconds", self.head_seconds)):
            if not seconds > 0:
                raise OptionError(f"{name} is {seconds}, expected more than 0")
        if self.max_connections is not None and self.max_connections < 1:
            raise OptionError(f"max_connections is {self.max_connections}, expected at least 1")
        if self.model_name is not None and not (self.model_name and self.model_name.isprintable()):
            raise OptionError(f"the model's name is {self.model_name!r}, expected printable text")


def check_key(key: str, origin: str) -> None:
    """OptionError unless ``key`` can stand in a header. The message never shows it."""
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise OptionError(f"{origin} is {'empty' if not key else 'unusable'}, expected printable ASCII characters without spaces")


def read_keys(path: Path) -> tuple[str, ...]:
    """API keys of a file, one a line; empty lines and those that begin with # are left out. Raises OptionError."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_KEY_FILE_BYTES + 1)
        text = content.decode("utf-8")
    except OSError as problem:
        raise OptionError(f"the key file {path} cannot be read: {problem.strerror or problem}") from None
    except UnicodeDecodeError as problem:
        raise OptionError(f"the key file {path} is not text: {problem.reason} at byte {problem.start}") from None
    if len(content) > MAX_KEY_FILE_BYTES:
        raise OptionError(f"the key file {path} is larger than {MAX_KEY_FILE_BYTES} bytes, expected one key a line")
    keys = []
    for number, line in enumerate(text.splitlines(), start=1):
        key = line.strip()
        if key and not key.startswith("#"):
            check_key(key, f"line {number} of the key file {path}")
            keys.append(key)
    if not keys:
        raise OptionError(f"the key file {path} holds no key, expected one a line")
    return tuple(keys)


def target_name(bundle: Bundle) -> str:
    """What a bundle's target is called: its hub id, or the last part of the path that it was read from."""
    source = bundle.manifest.target.origin.source.rstrip("/\\")
    owner, slash, name = source.partition("/")
    if (
        slash
        and owner
        and name
        and "/" not in name
        and "\\" not in source
        and not owner.startswith((".", "~"))
        and not name.endswith(".gguf")
    ):
        return source
    name = PurePosixPath(source.replace("\\", "/")).name
    for suffix in _CHECKPOINT_SUFFIXES:
        name = name.removesuffix(suffix)
    return name or "model"
