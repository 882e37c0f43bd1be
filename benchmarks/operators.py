"""Where a step's time goes: operator times of one graph in ONNX Runtime, beside the time that reading its weights once takes here.

    python benchmarks/operators.py BUNDLE [--graph target] [--tokens 1] [--threads 2]

Times by operator come from ONNX Runtime's profiler, which itself slows a run; the step's own time is measured without it.
"""

from __future__ import annotations

import collections
import json
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnxruntime

RUNS = 30
CACHE_ROWS = 256
POSITION = 128


@click.command()
@click.argument("bundle", type=click.Path(exists=True, path_type=Path))
@click.option("--graph", default="target", show_default=True)
@click.option("--tokens", default=1, show_default=True, type=click.IntRange(1, 64))
@click.option("--threads", default=2, show_default=True, type=click.IntRange(1))
def main(bundle: Path, graph: str, tokens: int, threads: int) -> None:
    """Print operator times of a graph of BUNDLE, and the time of reading as many bytes as its weights have."""
    path = bundle / "graphs" / "fp32-length" / f"{graph}.onnx"
    step_ms, _ = _measure(path, tokens, threads, profiled=False)
    _, operators = _measure(path, tokens, threads, profiled=True)
    num_bytes = _weight_bytes(path)
    click.echo(f"{graph}, {tokens} tokens, {threads} threads: {step_ms:.2f} ms a run")
    click.echo(f"reading its {num_bytes / 1e6:.0f} MB of weights once takes {_read_ms(num_bytes, threads):.2f} ms here")
    for name, (count, milliseconds) in operators.items():
        click.echo(f"  {name:20} {count:4} x  {milliseconds:7.2f} ms")


def _measure(path: Path, tokens: int, threads: int, *, profiled: bool) -> tuple[float, dict[str, tuple[int, float]]]:
    with tempfile.TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        options.enable_profiling = profiled
        options.profile_file_prefix = str(Path(folder) / "profile")
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        binding, _keep = _bind(session, tokens)
        times = []
        for _ in range(RUNS):
            started = time.perf_counter()
            session.run_with_iobinding(binding)
            times.append(1e3 * (time.perf_counter() - started))
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8")) if profiled else []
    return statistics.median(times), _by_operator(events)


def _bind(session: Any, tokens: int) -> tuple[Any, dict[str, Any]]:
    """Random inputs; every cache is bound as input and output at one address."""
    sizes = {"batch": 1, "tokens": tokens, "rows": tokens, "verified": tokens, "cache_rows": CACHE_ROWS}
    generator = np.random.default_rng(0)
    binding, arrays = session.io_binding(), {}
    for bind, values in ((binding.bind_input, session.get_inputs()), (binding.bind_output, session.get_outputs())):
        for value in values:
            name = value.name.replace("_cache_out.", "_cache.")
            if name not in arrays:
                shape = [sizes.get(dim, dim) for dim in value.shape]
                integer = value.type == "tensor(int64)"
                arrays[name] = np.full(shape, POSITION * ("position" in name)) if integer else generator.standard_normal(shape, np.float32)
            array = arrays[name]
            bind(value.name, "cpu", 0, array.dtype.type, list(array.shape), array.ctypes.data)
    return binding, arrays


def _by_operator(events: list[dict[str, Any]]) -> dict[str, tuple[int, float]]:
    counts: collections.Counter[str] = collections.Counter()
    microseconds: collections.Counter[str] = collections.Counter()
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("kernel_time"):
            counts[event["args"]["op_name"]] += 1
            microseconds[event["args"]["op_name"]] += event["dur"]
    return {name: (counts[name] // RUNS, total / RUNS / 1e3) for name, total in microseconds.most_common()}


def _weight_bytes(path: Path) -> int:
    import onnx

    model = onnx.load(path, load_external_data=False)
    places = [{entry.key: entry.value for entry in tensor.external_data} for tensor in model.graph.initializer]
    return sum(int(place["length"]) for place in places if place)


def _read_ms(num_bytes: int, threads: int) -> float:
    """Median time in which ``threads`` threads sum that many bytes of float32, each its share."""
    shares = np.array_split(np.ones(num_bytes // 4, np.float32), threads)
    times = []
    for _ in range(10):
        workers = [threading.Thread(target=share.sum) for share in shares]
        started = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


if __name__ == "__main__":
    main()
