"""Engines in a bundle: ``engines/<kind>/`` with one file a graph, and ``engines.json``, which says what they are and were built from.

A kind is built and replaced on its own; ``bundle.json`` knows nothing about engines. Reads descriptions and hashes files; knows nothing
about how engines are built or run.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from xpress_runtime.bundle import Bundle, check_file
from xpress_runtime.errors import BundleError
from xpress_runtime.fields import Fields
from xpress_runtime.manifest import FileRecord
from xpress_runtime.version import ENGINES_FORMAT

ENGINES_FOLDER = "engines"
ENGINES_FILE = "engines.json"
ENGINE_KINDS = ("tensorrt-rtx", "tensorrt")
LAYOUTS = ("shared", "pinned")


@dataclass(frozen=True)
class ShapeRange:
    """The shapes of one input that an optimization profile covers."""

    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]

    def covers(self, shape: Sequence[int]) -> bool:
        return len(shape) == len(self.min) and all(low <= size <= high for low, size, high in zip(self.min, shape, self.max, strict=True))


@dataclass(frozen=True)
class EngineRecord:
    """One engine file; ``profiles`` in the engine's own order, each with a range for every input that has a dynamic dim."""

    file: str
    bytes: int
    sha256: str
    build_seconds: float
    num_layers: int
    profiles: tuple[Mapping[str, ShapeRange], ...]

    def profile_for(self, shapes: Mapping[str, Sequence[int]]) -> int | None:
        """The number of the first profile that covers the shapes of these inputs (those without a dynamic dim may be among them)."""
        for number, profile in enumerate(self.profiles):
            if all(name in shapes and covered.covers(shapes[name]) for name, covered in profile.items()):
                return number
        return None


@dataclass(frozen=True)
class ProfileRecord:
    """What the engines were built for. ``layout``: "shared": one range of shapes for all calls; "pinned": one shape a call."""

    prefill_chunk: int
    block_size: int
    batch: int
    capacity: int
    layout: str

    @property
    def calls(self) -> dict[str, tuple[int, int]]:
        """The calls of the target by name, each as rows and tokens."""
        return {"prefill": (1, self.prefill_chunk), "verify": (self.batch, self.block_size), "single": (self.batch, 1)}


@dataclass(frozen=True)
class EngineManifest:
    """All of ``engines.json``.

    ``built_from`` is the identity of the graphs (see :func:`graphs_identity`), ``peak_build_bytes`` None where the system does not tell.
    """

    kind: str
    builder: str
    builder_version: str
    graph_set: str
    precision: str
    built_from: str
    compute_capabilities: tuple[str, ...]
    profile: ProfileRecord
    engines: Mapping[str, EngineRecord]
    build_seconds: float
    peak_build_bytes: int | None
    built_with: Mapping[str, str]

    @property
    def bytes(self) -> int:
        """Size of all engine files."""
        return sum(engine.bytes for engine in self.engines.values())

    def to_json(self) -> dict[str, Any]:
        """A JSON object, the format version first."""
        return {"format_version": ENGINES_FORMAT, **asdict(self)}


@dataclass(frozen=True)
class Engines:
    """The opened engines of one kind."""

    bundle: Bundle
    manifest: EngineManifest

    @property
    def folder(self) -> Path:
        return engines_folder(self.bundle, self.manifest.kind)

    def path(self, graph: str) -> Path:
        """The engine of a graph, checked once more: engines may be replaced while a session on them is open. Raises BundleError."""
        return self._checked(self.manifest.engines[graph], verify=True)

    def check_files(self, *, verify: bool) -> None:
        """BundleError unless every engine file is there and, with ``verify``, what was built."""
        for engine in self.manifest.engines.values():
            self._checked(engine, verify=verify)

    def _checked(self, engine: EngineRecord, *, verify: bool) -> Path:
        kind = self.manifest.kind
        # As a path in the bundle, which neither it nor a link may leave.
        name = f"{ENGINES_FOLDER}/{kind}/{engine.file}"
        check_file(self.bundle.folder, name, FileRecord(engine.bytes, engine.sha256), verify=verify, again=_again(kind))
        return self.bundle.folder / name


def engines_folder(bundle: Bundle, kind: str) -> Path:
    return bundle.folder / ENGINES_FOLDER / kind


def engine_kinds(bundle: Bundle) -> tuple[str, ...]:
    """The kinds that a bundle holds engines of, whole or not."""
    return tuple(kind for kind in ENGINE_KINDS if engines_folder(bundle, kind).is_dir())


def open_engines(bundle: Bundle, kind: str, *, verify: bool = True) -> Engines:
    """Open the engines of one kind; ``verify`` hashes every file. BundleError where they are missing, damaged or of other graphs."""
    folder = engines_folder(bundle, kind)
    if not folder.is_dir():
        held = ", ".join(engine_kinds(bundle)) or "none"
        raise BundleError(f"{bundle.folder} holds no engines of kind {kind} (it holds: {held}); {_again(kind)}")
    if not (folder / ENGINES_FILE).is_file():
        raise BundleError(f"{folder} holds no {ENGINES_FILE}; {_again(kind)}")
    manifest = read_engine_manifest(Fields.from_file(folder / ENGINES_FILE, BundleError))
    if manifest.kind != kind:
        raise BundleError(f"{folder / ENGINES_FILE}: field 'kind' is '{manifest.kind}', expected '{kind}'; {_again(kind)}")
    graphs = bundle.manifest.graph_set(manifest.graph_set).graphs
    if manifest.built_from != graphs_identity(bundle, manifest.graph_set) or set(manifest.engines) != set(graphs):
        raise BundleError(f"{folder}: the engines were built from other graphs than this bundle's {manifest.graph_set}; {_again(kind)}")
    _check_agreement(bundle, manifest, str(folder / ENGINES_FILE))
    engines = Engines(bundle, manifest)
    engines.check_files(verify=verify)
    return engines


def _check_agreement(bundle: Bundle, manifest: EngineManifest, origin: str) -> None:
    """BundleError where the description contradicts the bundle it lies in."""
    profile, held = manifest.profile, bundle.manifest
    for name, found, expected in (
        ("builder", manifest.builder, manifest.kind),
        ("precision", manifest.precision, held.graph_set(manifest.graph_set).precision),
        ("profile: capacity", profile.capacity, held.capacity),
        ("profile: prefill_chunk", profile.prefill_chunk, held.prefill_chunk),
        ("profile: block_size", profile.block_size, held.drafter.block_size),
    ):
        if found != expected:
            raise BundleError(f"{origin}: field '{name}' is {str(found)[:40]!r}, expected {expected!r}; {_again(manifest.kind)}")


def graphs_identity(bundle: Bundle, graph_set: str) -> str:
    """A sha256 over name, size and content hash of every file of a graph set, its weights among them."""
    records = sorted((name, record) for name, record in bundle.manifest.files.items() if name.startswith(f"graphs/{graph_set}/"))
    digest = hashlib.sha256()
    for name, record in records:
        digest.update(json.dumps([name, record.bytes, record.sha256]).encode())
    return digest.hexdigest()


def read_engine_manifest(fields: Fields) -> EngineManifest:
    """Check and convert a parsed ``engines.json``; BundleError names the field that is wrong."""
    version = fields.integer("format_version")
    if version != ENGINES_FORMAT:
        age = "newer" if version > ENGINES_FORMAT else "older"
        raise BundleError(
            f"{fields.origin}: engine format {version} is {age} than this runtime reads ({ENGINES_FORMAT}); "
            "use the release that built them, or build the engines again"
        )
    return EngineManifest(
        kind=fields.text("kind"),
        builder=fields.text("builder"),
        builder_version=_matching(fields, "builder_version", fields.text("builder_version"), r"[\w.+-]+"),
        graph_set=fields.text("graph_set"),
        precision=fields.text("precision"),
        built_from=fields.text("built_from"),
        compute_capabilities=_capabilities(fields),
        profile=_profile(fields.nested("profile")),
        engines={name: _engine(entry) for name, entry in fields.nested("engines").entries()},
        build_seconds=fields.number("build_seconds", 0),
        peak_build_bytes=fields.integer("peak_build_bytes", maximum=2**63) if "peak_build_bytes" in fields else None,
        built_with={name: fields.nested("built_with").text(name) for name in fields.nested("built_with")},
    )


def _capabilities(fields: Fields) -> tuple[str, ...]:
    found = fields.texts("compute_capabilities")
    if not found:
        raise BundleError(f"{fields.origin}: field 'compute_capabilities' is empty, expected at least one")
    return tuple(_matching(fields, "compute_capabilities", capability, r"\d+\.\d") for capability in found)


def _matching(fields: Fields, name: str, value: str, pattern: str) -> str:
    if not re.fullmatch(pattern, value, re.ASCII):
        raise BundleError(f"{fields.origin}: field '{name}' has {value[:40]!r}, expected something like {pattern}")
    return value


def _profile(fields: Fields) -> ProfileRecord:
    prefill_chunk, block_size, batch, capacity = (fields.integer(name, 1) for name in ("prefill_chunk", "block_size", "batch", "capacity"))
    return ProfileRecord(prefill_chunk, block_size, batch, capacity, fields.choice("layout", LAYOUTS))


def _engine(fields: Fields) -> EngineRecord:
    profiles = fields.objects("profiles")
    if not profiles:
        raise BundleError(f"{fields.origin}: field 'profiles' is empty, expected at least one")
    return EngineRecord(
        file=fields.text("file"),
        bytes=fields.integer("bytes", maximum=2**63),
        sha256=fields.text("sha256"),
        build_seconds=fields.number("build_seconds", 0),
        num_layers=fields.integer("num_layers", 1),
        profiles=tuple({name: _range(entry) for name, entry in profile.entries()} for profile in profiles),
    )


def _range(fields: Fields) -> ShapeRange:
    covered = ShapeRange(fields.integers("min", 1), fields.integers("opt", 1), fields.integers("max", 1))
    ranks = {len(covered.min), len(covered.opt), len(covered.max)}
    if len(ranks) > 1 or not covered.covers(covered.opt) or not covered.covers(covered.max):
        raise BundleError(f"{fields.origin}: min, opt and max must be shapes of one rank, none larger than the next")
    return covered


def _again(kind: str) -> str:
    return f"build the engines with: xpress-export engine BUNDLE --kind {kind} --force"
