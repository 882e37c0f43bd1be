"""Which backends exist, which run here, and which one ``auto`` means.

Asking costs little: packages are looked for, not imported; only cuda-bindings is, where a GPU backend's packages are there.
"""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from pathlib import Path

from xpress_runtime.backends.base import Backend
from xpress_runtime.backends.cuda import CudaRuntime, require_cuda_bindings
from xpress_runtime.backends.engine import PACKAGES, TensorRtLibrary
from xpress_runtime.backends.ort_gpu import RTX_PLUGIN, OrtGpuBackend, gpu_graph_set
from xpress_runtime.backends.tensorrt import TensorRtBackend
from xpress_runtime.bundle import Bundle
from xpress_runtime.engines import open_engines
from xpress_runtime.errors import EnvironmentProblem, MissingExtraError, OptionError, XpressError
from xpress_runtime.sets import AttentionForm, Precision, set_name

logger = logging.getLogger("xpress_runtime.backends")

BACKEND_NAMES = ("tensorrt", "tensorrt-rtx", "ort-cuda", "ort-trt-rtx", "ort-cpu")
# Those that compile kernels for the GPU when they load, and can keep them.
COMPILING = ("tensorrt-rtx",)
CPU_GRAPH_SET = set_name(Precision.FP32, AttentionForm.LENGTH)


@dataclass(frozen=True)
class BackendStatus:
    """Whether a backend runs here; ``reason`` says why not, and is empty where it does."""

    name: str
    runs: bool
    reason: str


def probe_backends() -> list[BackendStatus]:
    """The state of every backend, in the order in which ``auto`` tries them."""
    statuses = []
    for name in BACKEND_NAMES:
        try:
            _require(name)
            statuses.append(BackendStatus(name, True, ""))
        except EnvironmentProblem as problem:
            statuses.append(BackendStatus(name, False, str(problem)))
    return statuses


def open_backend(
    name: str = "auto", *, threads: int | None = None, bundle: Bundle | None = None, runtime_cache: Path | None = None
) -> Backend:
    """The named backend, or with ``auto`` the first that runs here and, where a bundle is given, finds its engines or graphs in it.

    ``threads`` is for ort-cpu; ``runtime_cache`` a folder for kernels that are compiled at run time. OptionError, MissingExtraError or
    EnvironmentProblem say why not.
    """
    if name != "auto" and name not in BACKEND_NAMES:
        raise OptionError(f"backend '{name}' does not exist; choose one of: auto, {', '.join(BACKEND_NAMES)}")
    statuses = {status.name: status.reason for status in probe_backends()}
    if name == "auto":
        for candidate, missing in statuses.items():
            reason = missing or _not_in(bundle, candidate)
            if not reason:
                logger.info("backend %s is used", candidate)
                if runtime_cache is not None and candidate not in COMPILING:
                    logger.warning("a runtime cache is of no use to backend %s, which compiles nothing at run time", candidate)
                    runtime_cache = None
                return _create(candidate, threads, runtime_cache)
            statuses[candidate] = reason
            logger.info("backend %s is passed over: %s", candidate, reason)
        raise EnvironmentProblem("no backend runs here: " + "; ".join(f"{other}: {reason}" for other, reason in statuses.items()))
    if statuses[name]:
        others = (other for other, missing in statuses.items() if not missing and not _not_in(bundle, other))
        other = next(others, None)
        advice = f"backend {other} would work" if other else "no other backend would work either (see: xpress-export doctor)"
        raise EnvironmentProblem(f"backend {name} does not run here: {statuses[name]}; {advice}")
    return _create(name, threads, runtime_cache)


def _require(name: str) -> None:
    """EnvironmentProblem unless the packages of a backend are installed and, where it needs one, a GPU is there."""
    if name in PACKAGES:
        package, extra = PACKAGES[name]
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(name, extra)
    else:
        extra = {"ort-cuda": "gpu", "ort-trt-rtx": "rtx", "ort-cpu": "cpu"}[name]
        spec = importlib.util.find_spec("onnxruntime")
        if spec is None or spec.origin is None:
            raise MissingExtraError("onnxruntime-gpu" if name == "ort-cuda" else "onnxruntime", extra if name == "ort-cuda" else "cpu")
        if name == "ort-cpu":
            return
        if name == "ort-cuda" and not list((Path(spec.origin).parent / "capi").glob("*onnxruntime_providers_cuda.*")):
            raise EnvironmentProblem("the installed onnxruntime has no CUDA provider; replace it by onnxruntime-gpu, never both together")
        if name == "ort-trt-rtx" and importlib.util.find_spec(RTX_PLUGIN) is None:
            raise EnvironmentProblem(f"{RTX_PLUGIN} is not installed; install it with: pip install {RTX_PLUGIN.replace('_', '-')}")
    require_cuda_bindings(extra)
    CudaRuntime()


def _not_in(bundle: Bundle | None, name: str) -> str:
    """Why a backend that runs here is not one for this bundle; empty where it is."""
    if bundle is None:
        return ""
    try:
        if name in PACKAGES:
            covered = open_engines(bundle, name, verify=False).manifest.compute_capabilities
            capability = CudaRuntime().device().compute_capability
            if capability not in covered:
                return f"the bundle's engines are for compute capability {', '.join(covered)}, and this GPU has {capability}"
        elif name == "ort-cpu":
            bundle.manifest.graph_set(CPU_GRAPH_SET)
        else:
            gpu_graph_set(bundle)
    except XpressError as problem:
        return str(problem)
    return ""


def _create(name: str, threads: int | None, runtime_cache: Path | None) -> Backend:
    if name == "ort-cpu":
        if runtime_cache is not None:
            raise OptionError("a runtime cache is of no use to backend ort-cpu, which compiles nothing at run time; leave it out")
        from xpress_runtime.backends.ort_cpu import OrtCpuBackend

        return OrtCpuBackend(threads)
    if name in PACKAGES:
        return TensorRtBackend(name, CudaRuntime(), TensorRtLibrary(name), runtime_cache)
    import onnxruntime

    return OrtGpuBackend(name, CudaRuntime(), onnxruntime, runtime_cache)
