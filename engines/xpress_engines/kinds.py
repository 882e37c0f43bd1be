"""The kinds of engines as data: which package builds them, for which GPUs, and what is known about each.

Knows what a kind can do; knows nothing about graphs.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass

from xpress_runtime.backends.cuda import CudaError, CudaRuntime, require_cuda_bindings
from xpress_runtime.errors import EnvironmentProblem, MissingExtraError, OptionError


@dataclass(frozen=True)
class EngineKind:
    """One kind. ``compute_capabilities``: what it can build for without a GPU; empty where it builds for the GPU present."""

    name: str
    package: str
    module: str
    extra: str
    default_layout: str
    compute_capabilities: tuple[str, ...]
    has_timing_cache: bool


# TensorRT-RTX stores weights once for each order of them that some profile prefers, and makes its kernels at run time for the very shapes:
# one spanning profile costs nothing. TensorRT picks kernels at build time, the best ones for a profile of one shape.
KINDS = {
    "tensorrt-rtx": EngineKind(
        "tensorrt-rtx", "tensorrt-rtx", "tensorrt_rtx", "rtx", "shared", ("8.0", "8.6", "8.9", "12.0", "12.1"), has_timing_cache=False
    ),
    "tensorrt": EngineKind("tensorrt", "tensorrt", "tensorrt", "gpu", "pinned", (), has_timing_cache=True),
}

# The most that TensorRT's TopK finds, in every kind.
MAX_SHORTLIST = 3840

_WRITTEN = re.compile(r"\d+\.\d")

# What TensorRT-RTX cannot be asked for, each with the reason.
_NOT_FOR_RTX = {
    "7.5": "Turing has no fp32 matrix products there, and the graphs hold some: fc and the logits",
    "9.0": "TensorRT-RTX does not cover Hopper (H100, H200); build kind tensorrt on that machine",
    "10.0": "TensorRT-RTX does not cover data-centre Blackwell (B100, B200); build kind tensorrt on that machine",
    "10.3": "TensorRT-RTX does not cover data-centre Blackwell (B300); build kind tensorrt on that machine",
}


def engine_kind(name: str) -> EngineKind:
    """The kind of that name; OptionError lists what there is."""
    if name not in KINDS:
        raise OptionError(f"engine kind '{name}' does not exist; choose one of: {', '.join(KINDS)}")
    return KINDS[name]


def require_builder(kind: EngineKind) -> None:
    """MissingExtraError unless everything that builds this kind is installed; asked before any work, and imports nothing."""
    for module, package in ((kind.module, kind.package), ("polygraphy", "polygraphy"), ("onnx", "onnx")):
        if not _is_installed(module):
            raise MissingExtraError(package, kind.extra)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        # The package that the module would be in.
        return False


def builder_version(kind: EngineKind) -> str:
    return importlib.metadata.version(kind.package)


def resolve_compute_capabilities(kind: EngineKind, wanted: Sequence[str]) -> tuple[str, ...]:
    """What to build for: ``wanted`` of what the kind can do, all of it by default, or the GPU present. OptionError, EnvironmentProblem."""
    known = kind.compute_capabilities
    if not known:
        if wanted:
            raise OptionError(f"--compute-capability {wanted[0]}: engines of kind {kind.name} are built for the GPU present; leave it out")
        return (_gpu_compute_capability(kind),)
    for capability in wanted:
        if capability not in known:
            unknown = "unknown to TensorRT-RTX" if _WRITTEN.fullmatch(capability) else "not written like 8.9"
            reason = _NOT_FOR_RTX.get(capability, unknown)
            raise OptionError(f"--compute-capability {capability}: {reason}; expected some of {', '.join(known)}")
    return tuple(capability for capability in known if not wanted or capability in wanted)


def _gpu_compute_capability(kind: EngineKind) -> str:
    """The compute capability of GPU 0, such as 8.9."""
    require_cuda_bindings(kind.extra)
    try:
        return CudaRuntime().device().compute_capability
    except CudaError as problem:
        raise EnvironmentProblem(
            f"engines of kind {kind.name} are built for the GPU present, and none can be used here ({problem.status}); "
            "build on the GPU machine, or build kind tensorrt-rtx, which needs none"
        ) from None
