"""A bundle folder: opening it, checking that every file is what the manifest says, and where its parts lie.

Reads files and their hashes; knows nothing about how graphs are run.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from xpress_runtime.errors import BundleError
from xpress_runtime.fields import Fields
from xpress_runtime.manifest import MANIFEST_FILE, FileRecord, Manifest, read_manifest

TOKENIZER_FOLDER = "tokenizer"


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
        if not path.is_dir():
            raise BundleError(f"{path} is not a bundle folder; make one with: xpress-export build --output {path} …")
        if not (path / MANIFEST_FILE).is_file():
            raise BundleError(f"{path} holds no {MANIFEST_FILE}, so it is not a bundle; make one with: xpress-export build")
        bundle = cls(path, read_manifest(Fields.from_file(path / MANIFEST_FILE, BundleError)))
        for name, record in bundle.manifest.files.items():
            bundle._check_file(name, record, verify)
        return bundle

    @property
    def tokenizer_folder(self) -> Path | None:
        return self.folder / TOKENIZER_FOLDER if self.manifest.has_tokenizer else None

    def graph_path(self, set_name: str, graph: str) -> Path:
        """The file of a graph; BundleError when the set or the graph is not in the bundle."""
        graphs = self.manifest.graph_set(set_name).graphs
        if graph not in graphs:
            raise BundleError(f"the bundle's set {set_name} holds no graph {graph} (it holds: {', '.join(graphs)})")
        return self.folder / graphs[graph].file

    def write_manifest(self, manifest: Manifest) -> Bundle:
        """Replace ``bundle.json`` in one step; the old one stays whole until then."""
        write_manifest(self.folder, manifest)
        return Bundle(self.folder, manifest)

    def _check_file(self, name: str, record: FileRecord, verify: bool) -> None:
        pure = PurePosixPath(name)
        path = self.folder / name
        # A link could lead out of the folder as well as a path can.
        if pure.is_absolute() or ".." in pure.parts or "\\" in name or not path.resolve().is_relative_to(self.folder.resolve()):
            raise BundleError(f"{self.folder}: the manifest lists '{name}', which leaves the bundle folder; do not use this bundle")
        try:
            size = path.stat().st_size
        except OSError:
            raise BundleError(f"{self.folder}: {name} is missing; build or copy the bundle again") from None
        if size != record.bytes:
            raise BundleError(f"{self.folder}: {name} has {size} bytes, the manifest says {record.bytes}; build or copy the bundle again")
        if verify and file_sha256(path) != record.sha256:
            raise BundleError(
                f"{self.folder}: the content of {name} is not what was built (sha256 differs); build or copy the bundle again"
            )


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``bundle.json`` beside its final name and rename it."""
    partial = folder / f".{MANIFEST_FILE}.partial"
    partial.write_text(json.dumps(manifest.to_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(folder / MANIFEST_FILE)
