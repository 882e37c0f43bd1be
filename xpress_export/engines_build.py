"""Engines into a bundle: which graphs and profiles they are built from, and the folder of their kind, staged and renamed when complete.

Needs no torch: engines may be built on the server. Knows bundles and staging; knows nothing about TensorRT.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from xpress_engines.builder import EngineOptions, build_engines, check_timing_cache
from xpress_engines.kinds import MAX_SHORTLIST, EngineKind, engine_kind, require_builder, resolve_compute_capabilities
from xpress_engines.profiles import ProfileSet
from xpress_export.staging import refuse_existing, staged_folder
from xpress_runtime.bundle import Bundle
from xpress_runtime.engines import EngineManifest, engines_folder
from xpress_runtime.errors import BundleError, OptionError, OutputError, XpressError
from xpress_runtime.manifest import Manifest
from xpress_runtime.sets import AttentionForm, Precision, set_name

Report = Callable[[str], None]

_HALF_PRECISIONS = (Precision.FP16, Precision.BF16)
_ADVICE = "move it away, or build into another bundle"


@dataclass(frozen=True)
class EngineRequest:
    """What can be said before there is a bundle: the kind is installed, and builds for these compute capabilities."""

    kind: EngineKind
    compute_capabilities: tuple[str, ...]
    timing_cache: Path | None


def request_engines(
    kinds: Sequence[str], *, compute_capabilities: Sequence[str] = (), timing_cache: Path | None = None
) -> tuple[EngineRequest, ...]:
    """Check everything that needs no bundle, before minutes of work. OptionError, MissingExtraError or EnvironmentProblem.

    Of several kinds each takes the options that it has; an option that none has is refused.
    """
    found = [engine_kind(name) for name in dict.fromkeys(kinds)]
    for kind in found:
        require_builder(kind)
    portable = any(kind.compute_capabilities for kind in found)
    timed = any(kind.has_timing_cache for kind in found)
    requests = []
    for kind in found:
        wanted = compute_capabilities if kind.compute_capabilities or not portable else ()
        cache = timing_cache if kind.has_timing_cache or not timed else None
        check_timing_cache(kind, cache)
        requests.append(EngineRequest(kind, resolve_compute_capabilities(kind, wanted), cache))
    return tuple(requests)


def check_shortlists(shortlists: Sequence[int]) -> None:
    """OptionError where a refiner could not become an engine; asked before any work."""
    if (longest := max(shortlists)) > MAX_SHORTLIST:
        raise OptionError(
            f"a shortlist of {longest} cannot become an engine: TensorRT finds at most the {MAX_SHORTLIST} best of a vocabulary; "
            f"build the bundle with --shortlist {MAX_SHORTLIST} or less, or 0 for the whole vocabulary"
        )


def engine_options(
    request: EngineRequest,
    manifest: Manifest,
    *,
    profile: ProfileSet | None = None,
    precision: Precision | None = None,
    batch: int | None = None,
    layout: str | None = None,
) -> EngineOptions:
    """Options for a bundle; without a profile the bundle's own numbers. ``batch`` and ``layout`` win over the profile's.

    OptionError where the profile is made for another bundle or a shortlist is too long, BundleError where the bundle has no graphs for
    engines.
    """
    check_shortlists(manifest.shortlists)
    own = ProfileSet(manifest.prefill_chunk, manifest.batch, manifest.capacity)
    profile = own if profile is None else profile
    for name, wanted, held in (("capacity", profile.capacity, own.capacity), ("prefill_chunk", profile.prefill_chunk, own.prefill_chunk)):
        if wanted != held:
            raise OptionError(
                f"the profile has {name} {wanted} and the bundle was built with {held}; use a profile with {name} {held}, "
                "or build the bundle again with this profile"
            )
    return EngineOptions(
        request.kind,
        _graph_set(manifest, precision),
        profile.overridden(batch=batch, layout=layout or profile.layout or request.kind.default_layout),
        request.compute_capabilities,
        request.timing_cache,
    )


def add_engines(bundle: Bundle, options: EngineOptions, *, replace: bool = False, report: Report = lambda _: None) -> EngineManifest:
    """Build the engines of one kind into a bundle; they appear complete or not at all, and replace older ones only then.

    Other kinds and ``bundle.json`` stay as they are. Raises what :func:`xpress_engines.builder.build_engines` raises, and OutputError.
    """
    folder = engines_folder(bundle, options.kind.name)
    refuse_existing_engines(bundle, options.kind.name, replace=replace)
    with staged_folder(folder, needed_bytes=_needed_bytes(bundle.manifest, options), replace=replace, advice=_ADVICE) as staging:
        try:
            built = build_engines(bundle, options, staging, report=lambda graph: report(f"{options.kind.name} {graph}"))
            current = Bundle.open(bundle.folder, verify=False).manifest
        except (XpressError, OSError, RuntimeError):
            if staging.is_dir():
                raise
            # The bundle's folder was exchanged for a new one, and the staging folder with it; which step notices is chance.
            raise _replaced(bundle) from None
        if current.files != bundle.manifest.files:
            raise _replaced(bundle)
    return built


def refuse_existing_engines(bundle: Bundle, kind: str, *, replace: bool) -> None:
    """OutputError where the folder of a kind cannot be written, or holds engines and ``replace`` is not given."""
    folder = engines_folder(bundle, kind)
    if folder.parent.is_symlink():
        raise OutputError(f"{folder.parent} is a link; {_ADVICE}")
    if folder.is_dir() and not folder.is_symlink() and not replace:
        raise OutputError(f"{bundle.folder} holds engines of kind {kind} already; --force builds them again")
    refuse_existing(folder, replace=replace, advice=_ADVICE)


def _graph_set(manifest: Manifest, precision: Precision | None) -> str:
    """Half-precision and masked: TensorRT has fused attention for nothing else."""
    held = [graph_set.name for graph_set in manifest.graph_sets]
    wanted = _HALF_PRECISIONS if precision is None else (precision,)
    for candidate in wanted:
        if (name := set_name(candidate, AttentionForm.MASK)) in held:
            return name
    precisions = " or ".join(candidate.value for candidate in wanted)
    raise BundleError(
        f"the bundle holds no {precisions} graphs with masks, of which engines are built (it holds: {', '.join(held)}); "
        f"build it again with --precision {wanted[0].value}"
    )


def _needed_bytes(manifest: Manifest, options: EngineOptions) -> int:
    """About what engines take: each has its weights once, the head its table in fp32, and pinned layouts much of it twice."""
    folder = f"graphs/{options.graph_set}/"
    graphs = sum(record.bytes for name, record in manifest.files.items() if name.startswith(folder))
    return graphs * (2 if options.profile.layout == "shared" else 3)


def _replaced(bundle: Bundle) -> OutputError:
    return OutputError(f"{bundle.folder} was replaced by another bundle in the meantime; no engines were added to it")
