"""Writing a bundle into a Triton model repository: config, model and the bundle's files, complete under its name or not there at all."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from xpress_export.staging import BUNDLE_OR_GRAPHS, Written, refuse_existing, staged_folder
from xpress_export.triton.config import InstanceKind, config_text
from xpress_runtime.bundle import Bundle
from xpress_runtime.engines import ENGINES_FILE, ENGINES_FOLDER, engine_kinds, open_engines
from xpress_runtime.errors import OptionError, OutputError
from xpress_runtime.manifest import MANIFEST_FILE
from xpress_runtime.version import VERSION

NOTE_FILE = "xpress-export.json"
_VERSION_FOLDER = "1"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_ADVICE = "give another --name"
_WRITTEN = Written(
    re.compile(
        rf"config\.pbtxt|{re.escape(NOTE_FILE)}|{_VERSION_FOLDER}/(model\.py|__pycache__/[^/]+\.pyc)"
        rf"|{_VERSION_FOLDER}/bundle/({BUNDLE_OR_GRAPHS.files.pattern})"
    ),
    "a packaged bundle",
    (NOTE_FILE, "files"),
    marked=True,
)


@dataclass(frozen=True)
class PackageOptions:
    """How the model runs: those of BatchSession, and ``instances``, the sessions of it (for each GPU, where it runs on GPUs)."""

    backend: str = "auto"
    slots: int | None = None
    threads: int | None = None
    instances: int = 1
    max_queue: int = 64
    max_tokens: int | None = None
    timeout: float | None = None
    drain_seconds: float = 30.0

    @property
    def kind(self) -> InstanceKind:
        if self.backend == "auto":
            return "KIND_AUTO"
        return "KIND_CPU" if self.backend == "ort-cpu" else "KIND_GPU"

    def parameters(self) -> dict[str, str]:
        """As model.py reads them; what is not set is left out."""
        names = ("backend", "slots", "threads", "max_queue", "max_tokens", "timeout", "drain_seconds")
        return {name: str(value) for name in names if (value := getattr(self, name)) is not None}


@dataclass(frozen=True)
class Packaged:
    """A model that was written: ``requirement`` is what the image of the server needs to have installed."""

    folder: Path
    name: str
    requirement: str
    bytes: int
    linked: bool


def write_model(
    bundle: Bundle, repository: Path, options: PackageOptions, *, name: str | None = None, link: bool = False, overwrite: bool = False
) -> Packaged:
    """Write ``repository``/``name``. ``link``: hard links to the bundle's files, which must lie on the same disk, instead of copies.

    ``name``: by default that of the target. Raises OptionError, BundleError and OutputError.
    """
    name = default_name(bundle) if name is None else name
    if not _NAME.fullmatch(name):
        raise OptionError(f"the name is {name[:200]!r}, expected letters, digits, '.', '_' and '-', beginning with a letter or digit")
    output = repository / name
    refuse_existing(output, replace=overwrite, advice=_ADVICE, written=_WRITTEN)
    files = list(_files(bundle))
    size = sum((bundle.folder / file).stat().st_size for file in files)
    requirement = f"xpress-export[{_extra(bundle, options.backend)}]=={VERSION}"
    comment = f"Written by xpress-export {VERSION}. The environment of Triton's Python backend needs:\n  pip install '{requirement}'"
    with ExitStack() as stack:
        with _place_errors(output):
            needed = 0 if link else size
            staging = stack.enter_context(staged_folder(output, needed_bytes=needed, replace=overwrite, advice=_ADVICE, written=_WRITTEN))
        version = staging / _VERSION_FOLDER
        for file in files:
            _place(bundle.folder / file, version / "bundle" / file, link=link)
        # As it is in the bundle now: nothing may have replaced it in the meantime.
        if Bundle.open(version / "bundle", verify=not link).manifest != bundle.manifest:
            raise OutputError(f"{bundle.folder} was replaced while it was packaged; package it again when nothing writes to it")
        shutil.copyfile(Path(__file__).with_name("model.py"), version / "model.py")
        config = config_text(name, instances=options.instances, kind=options.kind, parameters=options.parameters(), comment=comment)
        (staging / "config.pbtxt").write_text(config, encoding="utf-8")
        note = {
            "written_by": f"xpress-export {VERSION}",
            "target": bundle.manifest.target.origin.source,
            "drafter": bundle.manifest.drafter.origin.source,
            "requirement": requirement,
            "files": [f"{_VERSION_FOLDER}/bundle/{file}" for file in files],
        }
        (staging / NOTE_FILE).write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")
    return Packaged(output, name, requirement, size, link)


@contextmanager
def _place_errors(output: Path) -> Iterator[None]:
    """Where no folder can be made, some file systems (/proc) say that it is not there."""
    try:
        yield
    except FileNotFoundError as problem:
        raise OutputError(f"{output} cannot be written: {problem.strerror}; give another --triton") from None


def default_name(bundle: Bundle) -> str:
    """The last part of the target's name, with what a model name cannot hold replaced."""
    last = re.split(r"[/\\]", bundle.manifest.target.origin.source.rstrip("/\\"))[-1].removesuffix(".gguf")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("-._")[:128] or "xpress"


def _extra(bundle: Bundle, backend: str) -> str:
    """The extra that brings a backend's packages; of "auto" that of the engines, where the bundle holds some."""
    if backend == "auto":
        backend = next(iter(engine_kinds(bundle)), "ort-cpu")
    return {"ort-cpu": "cpu", "tensorrt-rtx": "rtx"}.get(backend, "gpu")


def _files(bundle: Bundle) -> Iterator[str]:
    """What belongs to a bundle, its engines included, as paths in it; BundleError where engines are damaged."""
    yield MANIFEST_FILE
    yield from bundle.manifest.files
    for kind in engine_kinds(bundle):
        engines = open_engines(bundle, kind)
        yield f"{ENGINES_FOLDER}/{kind}/{ENGINES_FILE}"
        yield from (f"{ENGINES_FOLDER}/{kind}/{engine.file}" for engine in engines.manifest.engines.values())


def _place(source: Path, target: Path, *, link: bool) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if not link:
        shutil.copyfile(source, target)
        return
    try:
        # Of what a link leads to, not of the link.
        os.link(source.resolve(), target)
    except OSError as problem:
        if problem.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
        raise OutputError(f"{source} cannot be linked into the repository: {problem.strerror}; use --copy") from None
