"""What a run was measured on: the bundle, the packages and the machine. No host name, no user, no path.

Figures mean little without it; whoever reads a report was not there.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xpress_runtime.backends.device import DeviceBackend
from xpress_runtime.manifest import Manifest, Origin
from xpress_runtime.session import Session
from xpress_runtime.version import VERSION

_PACKAGES = ("numpy", "tokenizers", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx", "cuda-bindings")


def describe_subject(session: Session) -> dict[str, Any]:
    """The bundle and the backend that runs it, as a JSON object."""
    manifest = session.bundle.manifest
    draft_model = manifest.draft_model
    return {
        "bundle": session.bundle.folder.resolve().name,
        "backend": session.backend.name,
        "graph_set": session.backend.graph_set,
        "target": _origin(manifest.target.origin),
        "drafter": _origin(manifest.drafter.origin),
        "draft_model": None if draft_model is None else {**_origin(draft_model.origin), "layers": draft_model.layers},
        "head": manifest.drafter.head,
        **_sizes(manifest),
        "built_with": dict(manifest.built_with),
    }


def _sizes(manifest: Manifest) -> dict[str, Any]:
    return {
        "block_size": manifest.drafter.block_size,
        "num_passes": list(manifest.num_passes),
        "shortlists": list(manifest.shortlists),
        "capacity": manifest.capacity,
        "prefill_chunk": manifest.prefill_chunk,
    }


def _origin(origin: Origin) -> dict[str, Any]:
    source = origin.source
    # Of a path on some machine, the last part says what it is.
    name = Path(source).name if Path(source).is_absolute() or source.startswith(("~", ".")) else source
    return {"source": name, "revision": origin.revision, "licence": origin.licence, "identity": origin.identity}


def describe_environment(session: Session, *, threads: int | None, load_before: float | None) -> dict[str, Any]:
    """Versions and machine, as a JSON object. ``load_before``: the load average before any work of ours."""
    versions = {"xpress-export": VERSION, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "versions": versions,
        "machine": {
            "system": platform.system(),
            "architecture": platform.machine(),
            "processor": _processor(),
            "num_cores": num_cores(),
            "num_threads": threads,
            "memory_bytes": _memory_bytes(),
            "device": _device(session),
            "load_before": load_before,
        },
    }


def num_cores() -> int:
    """Cores that this process may use."""
    usable = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable is not None else os.cpu_count() or 1


def load_average() -> float | None:
    """Programs that wanted a core in the last minute; None where the system does not tell."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def load_note(environment: Mapping[str, Any]) -> str | None:
    """A warning where other work was running when the measurement began."""
    load = environment["machine"]["load_before"]
    if load is None or load < 0.5:
        return None
    cores = environment["machine"]["num_cores"]
    return f"Other work was running when this began (load {load:.1f} on {cores} cores): times are less sure than their intervals say."


def _processor() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor() or None)


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _device(session: Session) -> str | None:
    if not isinstance(session.backend, DeviceBackend):
        return None
    info = session.backend.device.cuda.device()
    return f"{info.name}, compute capability {info.compute_capability}, driver for CUDA {info.driver_cuda_version}"
