"""The process that builds engines: reads a job from standard input, writes one JSON object a line for each step to standard output.

A process of its own, because Polygraphy chooses between TensorRT and TensorRT-RTX when it is imported, because its peak is then the build's
alone, and because what kills TensorRT must not kill the caller. :mod:`xpress_engines.builder` runs it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from xpress_engines.contract import read_contract
from xpress_engines.network import check_network
from xpress_engines.profiles import input_ranges
from xpress_runtime.engines import ShapeRange
from xpress_runtime.errors import CheckFailed
from xpress_runtime.stats import peak_memory_bytes

Emit = Callable[[Mapping[str, Any]], None]


def main() -> None:
    # What libraries print goes where errors go; only this module writes to the caller's pipe.
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def emit(event: Mapping[str, Any]) -> None:
        events.write(json.dumps(event) + "\n")
        events.flush()

    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_the_caller, daemon=True).start()
    try:
        build(job, emit)
    except CheckFailed as failed:
        emit({"event": "check-failed", "message": str(failed)})
    except OSError as problem:
        emit({"event": "disk", "errno": problem.errno, "message": problem.strerror})
    except Exception as problem:  # noqa: BLE001
        # Libraries that do not fit each other or their settings, or a graph that was edited: standard error has the trace.
        traceback.print_exc()
        emit({"event": "build-failed", "message": f"{type(problem).__name__}: {problem}"})


def _end_with_the_caller() -> None:
    """The pipe of the job stays open as long as the caller lives."""
    sys.stdin.read()
    os._exit(1)


def build(job: Mapping[str, Any], emit: Emit) -> None:
    """Build every graph of a job (see :mod:`xpress_engines.builder`) into its folder."""
    trt = _import_tensorrt(job["module"])
    from polygraphy.exception import PolygraphyException

    for graph, ranges in job["graphs"].items():
        emit({"event": "begin", "graph": graph})
        started = time.monotonic()
        try:
            built = _build_graph(trt, job, graph, ranges)
        except PolygraphyException as problem:
            emit({"event": "build-failed", "graph": graph, "message": str(problem)})
            return
        emit({"event": "built", "graph": graph, "build_seconds": round(time.monotonic() - started, 3), **built})
    emit({"event": "done", "peak_build_bytes": peak_memory_bytes()})


def _import_tensorrt(module: str) -> Any:
    """The package, and Polygraphy on top of it: which one it drives is decided when it is imported."""
    os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = str(int(module == "tensorrt_rtx"))
    from polygraphy.logger import G_LOGGER

    G_LOGGER.module_severity = G_LOGGER.WARNING
    return __import__(module)


def _build_graph(trt: Any, job: Mapping[str, Any], graph: str, ranges: list[dict[str, tuple[int, int, int]]]) -> dict[str, Any]:
    from polygraphy.backend.trt import Profile, create_config, engine_bytes_from_network, network_from_onnx_path

    path = Path(job["graphs_folder"]) / f"{graph}.onnx"
    contract = read_contract(graph, path)
    covered = input_ranges(contract.dynamic_inputs, ranges)
    loaded = builder, network, _parser = network_from_onnx_path(str(path), strongly_typed=True)
    check_network(trt, network, contract, job["precision"])
    # Taken before building, which may change the network.
    num_layers = network.num_layers
    timing_cache = job["timing_cache"]
    known = timing_cache if timing_cache and Path(timing_cache).exists() else None
    config = create_config(builder, network, profiles=[_profile(Profile(), shapes) for shapes in covered], load_timing_cache=known)
    _set_compute_capabilities(trt, config, job["set_compute_capabilities"])
    content = engine_bytes_from_network(loaded, config=config, save_timing_cache=timing_cache)
    view = memoryview(content)
    file = f"{graph}.engine"
    with (Path(job["output_folder"]) / file).open("xb") as output:
        output.write(view)
    return {
        "file": file,
        "bytes": view.nbytes,
        "sha256": hashlib.sha256(view).hexdigest(),
        "num_layers": num_layers,
        "profiles": [{name: asdict(shapes) for name, shapes in profile.items()} for profile in covered],
    }


def _profile(profile: Any, shapes: Mapping[str, ShapeRange]) -> Any:
    for name, covered in shapes.items():
        profile.add(name, covered.min, covered.opt, covered.max)
    return profile


def _set_compute_capabilities(trt: Any, config: Any, wanted: list[str]) -> None:
    """Nothing wanted: the kind builds for the GPU present."""
    if not wanted:
        return
    config.num_compute_capabilities = len(wanted)
    for index, capability in enumerate(wanted):
        if not config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{capability.replace('.', '')}"), index):
            raise CheckFailed(f"this version of {trt.__name__} ({trt.__version__}) cannot build for compute capability {capability}")


if __name__ == "__main__":
    main()
