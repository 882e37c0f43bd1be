"""Where a checkpoint lies: a local folder, a .gguf file, or a hub id that is fetched into the hub's own cache.

It knows nothing about what is inside, except that a folder with one .gguf and no config.json means that file.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from xpress_runtime.errors import CheckpointError, EnvironmentProblem, MissingExtraError, OptionError

logger = logging.getLogger(__name__)

# README.md carries the licence in its front matter. Nothing executable and nothing pickled is ever fetched.
WANTED_FILES = ("*.json", "*.safetensors", "tokenizer.model", "*.jinja", "LICENSE*", "README.md")
# A pattern's star also matches slashes: without this, other formats in sub-folders and second copies of the weights come along.
UNWANTED_FILES = ("*/*", "consolidated*", "*.bin", "*.pt", "*.pth", "*.py")
CONFIG_FILE = "config.json"
TRAINING_SUFFIXES = (".pt", ".pth")

HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Location:
    """``path`` is a folder, a .gguf or .pt file or a config alone; ``source`` what the user gave; ``revision`` the commit on the hub."""

    path: Path
    source: str
    revision: str | None = None

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix == ".gguf" and not self.path.is_dir()

    @property
    def folder(self) -> Path:
        """The folder where files beside the weights lie."""
        return self.path.parent if self.is_gguf or self.is_training_file else self.path

    @property
    def is_training_file(self) -> bool:
        """Whether this is a training checkpoint itself, not a folder that holds one."""
        return self.path.suffix in TRAINING_SUFFIXES and not self.path.is_dir()


def locate(reference: str, revision: str | None = None, *, config_only: bool = False, training_files: bool = False) -> Location:
    """Find a checkpoint by path or hub id; whatever exists locally is never sent to the hub.

    ``config_only``: a .json file will do where a .gguf file would, and of a hub id config.json alone is fetched. ``training_files``: a .pt
    file will do too.
    """
    file = "a config.json" if config_only else "a .gguf file"
    if not reference.strip() or "\0" in reference:
        raise CheckpointError(f"{reference!r} names no checkpoint; expected a folder, {file} or a hub id such as 'org/name'")
    try:
        path = Path(reference).expanduser()
        if training_files and path.suffix in TRAINING_SUFFIXES and path.is_file():
            found: Path | None = path
        else:
            found = (_config_path if config_only else _weights_path)(path) if path.exists() else None
    except (OSError, RuntimeError) as problem:
        raise CheckpointError(f"'{reference}' cannot be opened: {getattr(problem, 'strerror', None) or problem}") from None
    if found is not None:
        if revision is not None:
            raise OptionError(f"revision '{revision}' was given for '{reference}', which is a local path; only hub ids have revisions")
        return Location(found, reference)
    if _is_path_like(reference):
        raise CheckpointError(f"'{reference}' does not exist; expected a folder or {file}")
    if not HUB_ID.fullmatch(reference):
        raise CheckpointError(f"'{reference}' is neither a folder, nor {file}, nor a hub id of the form 'org/name'")
    folder = _fetch(reference, revision, (CONFIG_FILE,) if config_only else WANTED_FILES)
    # The hub's cache names a snapshot's folder after its commit.
    return Location(folder, reference, revision=folder.name)


def _is_path_like(reference: str) -> bool:
    return (
        reference.startswith((".", "~", os.sep))
        or reference.endswith((os.sep, ".gguf", ".safetensors", ".json", *TRAINING_SUFFIXES))
        or "\\" in reference
    )


def _weights_path(path: Path) -> Path:
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"'{path}' is a file; expected a folder with config.json and safetensors, or a .gguf file")
        return path
    if not (path / CONFIG_FILE).exists():
        candidates = sorted(path.glob("*.gguf"))
        if len(candidates) > 1:
            names = ", ".join(candidate.name for candidate in candidates)
            raise CheckpointError(f"'{path}' holds several GGUF files ({names}); name the one to use")
        if candidates:
            return candidates[0]
    return path


def _config_path(path: Path) -> Path:
    if path.is_file() and path.suffix != ".json":
        raise CheckpointError(f"'{path}' is a file; expected a folder with config.json, or such a file itself")
    return path


def _fetch(hub_id: str, revision: str | None, wanted: Sequence[str]) -> Path:
    """The snapshot's folder: from the network, or from the local cache when the hub cannot be reached."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    except ImportError:
        raise MissingExtraError("huggingface_hub", "export") from None

    def download(*, local_files_only: bool) -> Path:
        return Path(
            snapshot_download(
                hub_id,
                revision=revision,
                allow_patterns=list(wanted),
                ignore_patterns=list(UNWANTED_FILES),
                local_files_only=local_files_only,
            )
        )

    named = f"'{hub_id}'" if revision is None else f"'{hub_id}' at revision '{revision}'"
    try:
        return download(local_files_only=False)
    except GatedRepoError:
        raise CheckpointError(f"{named} is gated on the hub; accept its terms there and log in with 'hf auth login'") from None
    except RepositoryNotFoundError:
        raise CheckpointError(f"{named} is neither a local folder nor a repository on the hub that you may read") from None
    except (RevisionNotFoundError, HFValidationError) as problem:
        raise CheckpointError(f"{named} cannot be read from the hub: {one_line(problem)}") from None
    except LocalEntryNotFoundError:
        raise _unreachable(named) from None
    except OSError as problem:
        # Covers the hub's HTTP errors; a refused proxy or a broken transfer arrives as the HTTP library's own exception below.
        if isinstance(problem, HfHubHTTPError):
            logger.debug("the hub answered: %s", problem)
        reason: Exception = problem
    except Exception as problem:
        if not _is_transport_error(problem):
            raise
        reason = problem
    logger.warning("%s could not be fetched (%s); looking into the local cache", named, one_line(reason))
    try:
        return download(local_files_only=True)
    except LocalEntryNotFoundError:
        raise _unreachable(named) from None


def _is_transport_error(problem: Exception) -> bool:
    return type(problem).__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore", "requests", "urllib3")


def _unreachable(named: str) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"{named} is not a local folder, is not complete in the local hub cache, and the hub cannot be reached; "
        "check the network, or give the folder of a downloaded checkpoint"
    )


def one_line(problem: BaseException) -> str:
    """An exception's message on one line."""
    return shown(" ".join(str(problem).split()), limit=200)


def shown(value: object, limit: int = 100) -> str:
    """A name or a value from an untrusted file, safe inside a one-line message."""
    text = str(value)
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= limit else text[: limit - 3] + "..."
