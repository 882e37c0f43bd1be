"""A bundle folder: opening it, checking that every file is what the manifest says, and where its parts lie.

Reads files and their hashes; knows nothing about how graphs are run.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from xpress_runtime.errors import BundleError, OutputError
from xpress_runtime.fields import Fields
from xpress_runtime.manifest import MANIFEST_FILE, FileRecord, Manifest, read_manifest

TOKENIZER_FOLDER = "tokenizer"
_AGAIN = "build or copy the bundle again"


@dataclass(frozen=True)
class Bundle:
    """An opened bundle; every listed file exists, lies inside the folder and, where verified, has the recorded content."""

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, verify: bool = True) -> Bundle:
        """Open a bundle folder.

        ``verify`` hashes every file (about a second per gigabyte); without it only presence and size are checked. Raises BundleError.
        """
        path = Path(folder)
        try:
            found = path.is_dir()
        except OSError as problem:
            raise BundleError(f"{path} cannot be opened: {problem.strerror}") from None
        if not found:
            raise BundleError(f"{path} is not a bundle folder; make one with: xpress-export build --output {path} …")
        if not (path / MANIFEST_FILE).is_file():
            raise BundleError(f"{path} holds no {MANIFEST_FILE}, so it is not a bundle; make one with: xpress-export build")
        bundle = cls(path, read_manifest(Fields.from_file(path / MANIFEST_FILE, BundleError)))
        for name, record in bundle.manifest.files.items():
            check_file(path, name, record, verify=verify, again=_AGAIN)
        if bundle.manifest.has_tokenizer and not any(name.startswith(f"{TOKENIZER_FOLDER}/") for name in bundle.manifest.files):
            raise BundleError(f"{path / MANIFEST_FILE}: has_tokenizer is true, but 'files' lists nothing in {TOKENIZER_FOLDER}/")
        return bundle

    @property
    def tokenizer_folder(self) -> Path | None:
        return self.folder / TOKENIZER_FOLDER if self.manifest.has_tokenizer else None

    def graph_path(self, set_name: str, graph: str) -> Path:
        """The file of a graph, checked once more: a bundle may be replaced while a session on it is open. Raises BundleError."""
        graphs = self.manifest.graph_set(set_name).graphs
        if graph not in graphs:
            raise BundleError(f"the bundle's set {set_name} holds no graph {graph} (it holds: {', '.join(graphs)})")
        file = graphs[graph].file
        check_file(self.folder, file, self.manifest.files[file], verify=True, again=_AGAIN)
        return self.folder / file

    def write_manifest(self, manifest: Manifest) -> Bundle:
        """Replace ``bundle.json`` in one step; the old one stays whole until then. Raises OutputError, also where the bundle is another one
        by now.
        """
        if Bundle.open(self.folder, verify=False).manifest.files != self.manifest.files:
            raise OutputError(f"{self.folder} was replaced by another bundle in the meantime; nothing was written to it")
        try:
            write_manifest(self.folder, manifest)
        except OSError as problem:
            raise OutputError(f"{self.folder / MANIFEST_FILE} cannot be replaced: {problem.strerror}; it stays as it was") from None
        return Bundle(self.folder, manifest)


def check_file(folder: Path, name: str, record: FileRecord, *, verify: bool, again: str) -> None:
    """BundleError unless ``name`` is a file inside ``folder`` with the recorded size and, with ``verify``, the recorded content; ``again``
    says how to come by a good one.
    """
    path = folder / name
    if not _is_inside(folder, name):
        raise BundleError(f"{folder}: the manifest lists {name!r}, which leaves the bundle folder; do not use this bundle")
    try:
        status = path.stat()
    except OSError:
        raise BundleError(f"{folder}: {name} is missing; {again}") from None
    if not stat.S_ISREG(status.st_mode):
        raise BundleError(f"{folder}: {name!r} is not a file; {again}")
    if status.st_size != record.bytes:
        raise BundleError(f"{folder}: {name} has {status.st_size} bytes, the manifest says {record.bytes}; {again}")
    try:
        changed = verify and file_sha256(path) != record.sha256
    except OSError as problem:
        raise BundleError(f"{folder}: {name} cannot be read: {problem.strerror}") from None
    if changed:
        raise BundleError(f"{folder}: the content of {name} is not what was built (sha256 differs); {again}")


def _is_inside(folder: Path, name: str) -> bool:
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or "\\" in name or "\0" in name:
        return False
    try:
        # A link could lead out of the folder as well as a path can.
        return (folder / name).resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):
        # Python's answer to a link that leads to itself.
        return False


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``bundle.json`` beside its final name and rename it."""
    partial = folder / f".{MANIFEST_FILE}.partial"
    text = json.dumps(manifest.to_json(), indent=1, ensure_ascii=False) + "\n"
    try:
        # A path that is not valid Unicode holds lone surrogates; their backslash form is JSON's own escape.
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")
        partial.replace(folder / MANIFEST_FILE)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
