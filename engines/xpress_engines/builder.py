"""Graphs of one set → engines of one kind in a folder, built in a process of its own, and the manifest that describes them.

Knows the process and what may become of it; knows nothing about where in a bundle the engines will lie.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import IO, Any

from xpress_engines.kinds import EngineKind, builder_version
from xpress_engines.profiles import BlockSizes, ProfileSet, dim_ranges
from xpress_runtime import version
from xpress_runtime.bundle import Bundle
from xpress_runtime.engines import ENGINES_FILE, EngineManifest, EngineRecord, ProfileRecord, ShapeRange, graphs_identity
from xpress_runtime.errors import CheckFailed, EnvironmentProblem, OptionError

Report = Callable[[str], None]

# -P: what lies in the current folder is not imported.
WORKER = (sys.executable, "-P", "-m", "xpress_engines.worker")
_BUILT_WITH = ("polygraphy", "onnx")
# TensorRT looks for a GPU and says so when it finds none, which is no error here.
_NO_ERROR = "catchCudaError"
_MAX_REASON = 600


@dataclass(frozen=True)
class EngineOptions:
    """What to build. ``profile.layout`` must be set; ``compute_capabilities`` are those that the engines will run on."""

    kind: EngineKind
    graph_set: str
    profile: ProfileSet
    compute_capabilities: tuple[str, ...]
    timing_cache: Path | None = None


def check_timing_cache(kind: EngineKind, timing_cache: Path | None) -> None:
    """OptionError unless the file can be kept there; asked before any work."""
    if timing_cache is None:
        return
    if not kind.has_timing_cache:
        raise OptionError(
            f"--timing-cache {timing_cache}: {kind.package} times nothing while it builds; what it compiles later is cached by the runtime"
        )
    if timing_cache.is_dir() or not timing_cache.absolute().parent.is_dir():
        raise OptionError(f"--timing-cache {timing_cache} is no file in an existing folder")


def build_engines(bundle: Bundle, options: EngineOptions, folder: Path, *, report: Report = lambda _: None) -> EngineManifest:
    """Build every graph of the set into ``folder``, and the manifest beside them. ``report`` hears each graph's name as its build begins.

    Raises CheckFailed where a network would not compute what its graph says, EnvironmentProblem where TensorRT or the system gives up.
    """
    kind, profile = options.kind, options.profile
    graph_set = bundle.manifest.graph_set(options.graph_set)
    layout, sizes = profile.layout, BlockSizes.of(bundle.manifest)
    assert layout is not None, "the caller resolves the layout"
    started = time.monotonic()
    ranges = {graph: dim_ranges(graph, profile, layout, sizes) for graph in graph_set.graphs}
    engines: dict[str, EngineRecord] = {}
    peak: int | None = None
    for event in run_worker(worker_job(bundle, options, folder, ranges), kind.package):
        if event["event"] == "begin":
            report(event["graph"])
        elif event["event"] == "built":
            engines[event["graph"]] = _record(event)
        elif event["event"] == "done":
            peak = event["peak_build_bytes"]
    built = EngineManifest(
        kind=kind.name,
        builder=kind.package,
        builder_version=builder_version(kind),
        graph_set=graph_set.name,
        precision=graph_set.precision,
        built_from=graphs_identity(bundle, graph_set.name),
        compute_capabilities=options.compute_capabilities,
        profile=ProfileRecord(profile.prefill_chunk, sizes.block_size, profile.batch, profile.capacity, layout),
        engines=engines,
        build_seconds=round(time.monotonic() - started, 3),
        peak_build_bytes=peak,
        built_with={"xpress-export": version.VERSION, **{name: importlib.metadata.version(name) for name in _BUILT_WITH}},
    )
    (folder / ENGINES_FILE).write_text(json.dumps(built.to_json(), indent=1) + "\n", encoding="utf-8")
    return built


def worker_job(
    bundle: Bundle, options: EngineOptions, folder: Path, ranges: Mapping[str, Sequence[Mapping[str, tuple[int, int, int]]]]
) -> dict[str, Any]:
    """What the worker reads; ``ranges`` has the optimization profiles of each graph to build, as (min, opt, max) of its dynamic dims."""
    kind = options.kind
    return {
        "module": kind.module,
        "graphs_folder": str(bundle.folder.absolute() / "graphs" / options.graph_set),
        "output_folder": str(folder.absolute()),
        "precision": bundle.manifest.graph_set(options.graph_set).precision,
        "set_compute_capabilities": options.compute_capabilities if kind.compute_capabilities else (),
        "timing_cache": str(options.timing_cache.absolute()) if options.timing_cache else None,
        "graphs": ranges,
    }


def _record(event: Mapping[str, Any]) -> EngineRecord:
    profiles = tuple(
        {name: ShapeRange(*(tuple(shapes[bound]) for bound in ("min", "opt", "max"))) for name, shapes in profile.items()}
        for profile in event["profiles"]
    )
    return EngineRecord(event["file"], event["bytes"], event["sha256"], event["build_seconds"], event["num_layers"], profiles)


def run_worker(job: Mapping[str, Any], package: str) -> Iterator[dict[str, Any]]:
    """What the worker says, until it is done. It never outlives this generator; each way in which it may fail is an error of its own."""
    graph = "the first graph"
    with tempfile.TemporaryFile() as log, _worker(log) as worker:
        assert worker.stdin is not None and worker.stdout is not None
        try:
            # Not closed: the worker ends when it reads an end here.
            worker.stdin.write(json.dumps(job) + "\n")
            worker.stdin.flush()
        except BrokenPipeError:
            # It ended at once; how, its exit status says below.
            pass
        for line in worker.stdout:
            event = json.loads(line)
            graph = event.get("graph", graph)
            if event["event"] == "check-failed":
                raise CheckFailed(event["message"])
            if event["event"] == "disk":
                raise OSError(event["errno"], event["message"])
            if event["event"] == "build-failed":
                reason = _first_error(log) or event["message"]
                raise EnvironmentProblem(f"{package} could not build an engine of graph {graph}: {reason}")
            yield event
            if event["event"] == "done":
                return
        _raise_for_end(worker.wait(), graph, package, log)


@contextmanager
def _worker(log: IO[bytes]) -> Iterator[subprocess.Popen[str]]:
    # The house's packages as this process has them, also where they come from a checkout.
    homes = {str(Path(file).parents[1]) for file in (__file__, version.__file__)}
    paths = os.pathsep.join([*sorted(homes), *filter(None, [os.environ.get("PYTHONPATH")])])
    worker = subprocess.Popen(
        WORKER,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env={**os.environ, "PYTHONPATH": paths},
        text=True,
        encoding="utf-8",
    )
    try:
        yield worker
    finally:
        # Ctrl-C and SIGTERM arrive here as exceptions. TensorRT hears no polite signal while it builds.
        worker.kill()
        with worker:
            pass


def _raise_for_end(status: int, graph: str, package: str, log: IO[bytes]) -> None:
    """The worker ended without a word."""
    if status == -signal.SIGKILL:
        raise EnvironmentProblem(
            f"the system killed the build of graph {graph}, most likely because memory ran out; free some, or build smaller engines: "
            "a smaller batch or prefill chunk, or layout shared"
        )
    if status < 0:
        reason = _first_error(log) or "it said nothing"
        raise EnvironmentProblem(f"{package} crashed ({signal.Signals(-status).name}) while it built graph {graph}: {reason}")
    raise RuntimeError(f"the engine worker ended with status {status} at graph {graph}:\n{_text(log)[-4000:]}")


def _first_error(log: IO[bytes]) -> str | None:
    lines = _text(log).splitlines()
    for number, line in enumerate(lines):
        if line.startswith("[E]") and _NO_ERROR not in line:
            # The reason often stands in the lines behind the first.
            rest = takewhile(lambda line: not line.startswith("["), lines[number + 1 :])
            return " ".join([line.removeprefix("[E]").strip(), *(line.strip() for line in rest)])[:_MAX_REASON]
    return None


def _text(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read().decode("utf-8", errors="replace")
