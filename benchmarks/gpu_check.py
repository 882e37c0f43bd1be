"""The GPU backends on this machine, as a report: every engine against ONNX Runtime's CPU on the same half-precision graphs, tokens against
plain decoding and against the CPU, round time, host share, memory.

    python benchmarks/gpu_check.py [--bundle BUNDLE] [--output gpu-report]

Builds what is missing: the demo bundle, and engines of every kind that runs here. Exit code 1: something differs; 3: no GPU backend runs.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "engines"), str(ROOT / "runtime")]

from xpress_engines.profiles import ProfileSet, graph_calls  # noqa: E402
from xpress_export.parity.compare import compare_arrays, tolerance  # noqa: E402
from xpress_runtime.backends import Backend, open_backend, probe_backends  # noqa: E402
from xpress_runtime.backends.base import Program  # noqa: E402
from xpress_runtime.backends.ort_cpu import OrtCpuBackend  # noqa: E402
from xpress_runtime.bundle import Bundle  # noqa: E402
from xpress_runtime.engines import ENGINE_KINDS, engine_kinds  # noqa: E402
from xpress_runtime.errors import EnvironmentProblem, XpressError  # noqa: E402
from xpress_runtime.generation import GenerationConfig  # noqa: E402
from xpress_runtime.plan import Plan  # noqa: E402
from xpress_runtime.session import Session  # noqa: E402
from xpress_runtime.sets import Precision  # noqa: E402

Arrays = dict[str, NDArray[Any]]
MakeBackend = Callable[[], Backend]

GPU_BACKENDS = ("tensorrt", "tensorrt-rtx", "ort-cuda", "ort-trt-rtx")
_PACKAGES = ("tensorrt", "tensorrt-rtx", "onnxruntime", "onnxruntime-gpu", "onnxruntime-ep-nv-tensorrt-rtx", "cuda-bindings")
# Argmaxes of random logits are now and then nearer than a rounding.
_MAX_DIFFERENT_IDS = 0.05
_MAX_NEW_TOKENS = 64


@dataclass(frozen=True)
class Prompt:
    """Token ids of a prompt."""

    tokens: list[int]


def working_backends() -> list[str]:
    """The GPU backends that run here; EnvironmentProblem says why none does."""
    statuses = [status for status in probe_backends() if status.name in GPU_BACKENDS]
    if not any(status.runs for status in statuses):
        reasons = "; ".join(f"{status.name}: {status.reason}" for status in statuses)
        raise EnvironmentProblem(f"no GPU backend runs here: {reasons}")
    return [status.name for status in statuses if status.runs]


# Graph by graph.


def random_inputs(bundle: Bundle, program: Program, sizes: Mapping[str, int], seed: int) -> Arrays:
    """Inputs of one call that a graph may get: ``sizes`` are its dynamic dims. Positions leave room, floats are near 1, ids repeat."""
    manifest, generator = bundle.manifest, np.random.default_rng(seed)
    inputs: Arrays = {}
    for name, info in program.inputs.items():
        shape = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in info.dims)
        if info.dtype.kind == "f":
            inputs[name] = generator.standard_normal(shape).astype(info.dtype)
        elif name == "rows":
            inputs[name] = np.tile(np.arange(shape[1]) + sizes["tokens"] - shape[1], (shape[0], 1))
        elif name == "active":
            inputs[name] = np.ones(shape, np.int64)
        elif name in ("position", "context_position"):
            inputs[name] = np.full(shape, 2)
        elif name == "block_position":
            inputs[name] = np.full(shape, 2 + min(sizes["tokens"], 3))
        elif name in ("verify_ids", "target_tokens"):
            # Few different ones, so that some are accepted.
            inputs[name] = generator.integers(0, 2, shape)
        else:
            inputs[name] = generator.integers(0, manifest.target.vocab_size, shape)
        inputs[name] = inputs[name].astype(info.dtype)
    return inputs


def run_program(backend: Backend, program: Program, inputs: Arrays, output_shapes: Mapping[str, tuple[int, ...]]) -> Arrays:
    """One run on fresh buffers; caches are updated in place."""
    buffers = {}
    for name, array in inputs.items():
        buffers[name] = backend.allocate(array.shape, array.dtype)
        buffers[name].write(array)
    for name, info in program.outputs.items():
        cache = name.replace("_cache_out.", "_cache.")
        buffers[name] = buffers[cache] if cache in inputs else backend.allocate(output_shapes[name], info.dtype)
    program.bind(buffers).run()
    backend.synchronise()
    return {name: buffers[name].read() for name in program.outputs}


def compare_graphs(bundle: Bundle, make: MakeBackend) -> dict[str, Any]:
    """Every graph in every call that the runtime makes: worst scaled error of its floats, share of its ids that differ."""
    backend = make()
    try:
        backend.admit(bundle, 1)
        cpu = OrtCpuBackend(graph_set=backend.graph_set)
        precision = Precision(bundle.manifest.graph_set(backend.graph_set).precision)
        return {graph: _compare_graph(bundle, backend, cpu, graph, tolerance(precision, graph)) for graph in _graphs(bundle)}
    finally:
        backend.close()


def _graphs(bundle: Bundle) -> list[str]:
    return ["embed", "target", "head", "drafter", "accept", *(f"refiner-k{passes}" for passes in sorted(bundle.manifest.num_passes))]


def _compare_graph(bundle: Bundle, backend: Backend, cpu: Backend, graph: str, largest_error: float) -> dict[str, Any]:
    manifest = bundle.manifest
    profile = ProfileSet(manifest.prefill_chunk, 1, manifest.capacity)
    on_gpu, on_cpu = backend.load(bundle, graph), cpu.load(bundle, graph)
    worst, different, num_ids, num_calls = 0.0, 0, 0, 0
    for seed, sizes in enumerate(graph_calls(graph, profile, manifest.drafter.block_size)):
        inputs = random_inputs(bundle, on_cpu, sizes, seed)
        shapes = {name: tuple(sizes[dim] if isinstance(dim, str) else dim for dim in info.dims) for name, info in on_cpu.outputs.items()}
        expected = run_program(cpu, on_cpu, inputs, shapes)
        found = run_program(backend, on_gpu, inputs, shapes)
        num_calls += 1
        for name, array in expected.items():
            if array.dtype.kind == "f":
                worst = max(worst, compare_arrays(_valid(name, found[name], sizes), _valid(name, array, sizes)).scaled_error)
            else:
                different += int((found[name] != array).sum())
                num_ids += array.size
    exact = graph == "accept"
    passed = worst <= largest_error and different <= (0 if exact else _MAX_DIFFERENT_IDS * num_ids)
    return {
        "passed": passed,
        "calls": num_calls,
        "scaled_error": worst,
        "tolerance": largest_error,
        "ids": num_ids,
        "different_ids": different,
    }


def _valid(name: str, array: NDArray[Any], sizes: Mapping[str, int]) -> NDArray[Any]:
    """Of a cache the rows that were written; of everything else all."""
    return array[:, :, : 2 + sizes["tokens"]] if "_cache_out." in name else array


# Generation.


def compare_generation(bundle: Bundle, make: MakeBackend, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Tokens of every number of passes against plain decoding on the same backend, and plain decoding against the CPU.

    Where two differ, the first different place counts: they agree if the logits of the two tokens are nearer than twice the error of the
    backend's logits against the CPU's, measured on the prompts.
    """
    backend = make()
    free_before = _free_memory(backend)
    started = time.perf_counter()
    with Session(bundle, backend) as session, Session(bundle, OrtCpuBackend(graph_set=backend.graph_set)) as cpu:
        opened_seconds = time.perf_counter() - started
        error = max(
            float(np.abs(_logits(session.open_plan(), prompt.tokens) - _logits(cpu.open_plan(), prompt.tokens)).max()) for prompt in prompts
        )
        plain = _Decoded(session, prompts, None)
        divergences = list(_divergences("plain on the CPU", plain, _Decoded(cpu, prompts, None), cpu.open_plan(), prompts, error))
        rows = [plain.figures()]
        for num_passes in sorted(bundle.manifest.num_passes):
            refined = _Decoded(session, prompts, num_passes)
            rows.append(refined.figures())
            divergences += _divergences("plain on this backend", refined, plain, cpu.open_plan(), prompts, error)
        free_after = _free_memory(backend)
    return {
        "passed": all(divergence["explained"] for divergence in divergences),
        "logit_error": error,
        "divergences": divergences,
        "rows": rows,
        "open_seconds": opened_seconds,
        "gpu_memory_bytes": free_before - free_after,
    }


class _Decoded:
    """Tokens and figures of all prompts; the first prompt runs once before, for what happens only once."""

    def __init__(self, session: Session, prompts: Sequence[Prompt], num_passes: int | None) -> None:
        self.num_passes = num_passes
        config = GenerationConfig(
            max_new_tokens=_MAX_NEW_TOKENS, num_passes=num_passes, speculation="off" if num_passes is None else "on", ignore_stop=True
        )
        session.generate(prompts[0].tokens, config)
        results = [session.generate(prompt.tokens, config) for prompt in prompts]
        self.tokens = [list(result.tokens) for result in results]
        self._stats = [result.stats for result in results]

    def figures(self) -> dict[str, Any]:
        rounds = sum(stats.rounds for stats in self._stats)
        seconds = sum(stats.decode_seconds for stats in self._stats)
        kept = sum(sum(stats.kept_lengths) for stats in self._stats)
        return {
            "num_passes": self.num_passes,
            "mean_acceptance_length": kept / rounds,
            "round_ms": 1e3 * seconds / rounds,
            "ms_per_token": 1e3 * seconds / kept,
            "host_share": sum(stats.host_seconds for stats in self._stats) / seconds,
            "prefill_ms": 1e3 * sum(stats.prefill_seconds for stats in self._stats) / len(self._stats),
        }


def _divergences(
    against: str, found: _Decoded, expected: _Decoded, cpu: Plan, prompts: Sequence[Prompt], error: float
) -> Iterator[dict[str, Any]]:
    for index, (prompt, ours, theirs) in enumerate(zip(prompts, found.tokens, expected.tokens, strict=True)):
        place = next((place for place, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        if place is None:
            continue
        logits = _logits(cpu, [*prompt.tokens, *theirs[:place]])
        margin = abs(float(logits[ours[place]] - logits[theirs[place]]))
        yield {
            "prompt": index,
            "num_passes": found.num_passes,
            "against": against,
            "token": place,
            "margin": margin,
            "explained": margin <= 2 * error,
        }


def _logits(plan: Plan, tokens: Sequence[int]) -> NDArray[Any]:
    """The target's logits [V] after a text."""
    plan.prefill(0, np.asarray(tokens, np.int64), with_drafter=False)
    return plan.buffers.logits.view(1, 1, plan.buffers.logits.shape[2]).read()[0, 0]


def _free_memory(backend: Backend) -> int:
    device = getattr(backend, "device", None)
    return int(device.cuda.memory()[0]) if device is not None else 0


def check_backend(bundle: Bundle, make: MakeBackend, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Both checks; an error of the environment is a result too."""
    try:
        graphs = compare_graphs(bundle, make)
        generation = compare_generation(bundle, make, prompts)
    except XpressError as problem:
        return {"passed": False, "error": str(problem)}
    return {
        "passed": generation["passed"] and all(graph["passed"] for graph in graphs.values()),
        "graphs": graphs,
        "generation": generation,
    }


# The report.


def markdown(report: Mapping[str, Any]) -> str:
    """The report for people."""
    lines = ["# GPU check", "", f"{report['gpu']}, {report['machine']}, bundle {report['bundle']}: {_verdict(report['passed'])}"]
    for name, result in report["backends"].items():
        lines += ["", f"## {name}: {_verdict(result['passed'])}", ""]
        if "error" in result:
            lines.append(result["error"])
            continue
        lines += ["| graph | calls | scaled error | tolerance | different ids | |", "|---|---|---|---|---|---|"]
        for graph, row in result["graphs"].items():
            ids = f"{row['different_ids']} of {row['ids']}"
            lines.append(
                f"| {graph} | {row['calls']} | {row['scaled_error']:.1e} | {row['tolerance']:.0e} | {ids} | {_verdict(row['passed'])} |"
            )
        generation = result["generation"]
        lines += ["", "| passes | mean acceptance length | round | per token | host share | prefill |", "|---|---|---|---|---|---|"]
        for row in generation["rows"]:
            passes = "plain" if row["num_passes"] is None else row["num_passes"]
            lines.append(
                f"| {passes} | {row['mean_acceptance_length']:.2f} | {row['round_ms']:.2f} ms | {row['ms_per_token']:.2f} ms | "
                f"{row['host_share']:.0%} | {row['prefill_ms']:.1f} ms |"
            )
        lines += ["", f"GPU memory {generation['gpu_memory_bytes'] / 2**20:.0f} MiB, opened in {generation['open_seconds']:.1f} s."]
        lines += [f"Logits differ from the CPU's by at most {generation['logit_error']:.1e}; first divergences:"]
        for found in generation["divergences"] or [None]:
            lines.append("- none" if found is None else f"- {found}")
    return "\n".join(lines) + "\n"


def _verdict(passed: bool) -> str:
    return "passed" if passed else "FAILED"


def prepare_bundle(folder: Path | None, output: Path, backends: Sequence[str]) -> Bundle:
    """The given bundle, or the demo's with half-precision graphs in ``output``; with engines of every kind among ``backends``."""
    from xpress_export.engines_build import add_engines, engine_options, request_engines

    if folder is None:
        folder = output / "bundle"
        if not folder.exists():
            _build_demo(folder)
    bundle = Bundle.open(folder)
    for kind in ENGINE_KINDS:
        if kind in backends and kind not in engine_kinds(bundle):
            (request,) = request_engines([kind])
            options = engine_options(request, bundle.manifest, batch=1)
            add_engines(bundle, options, report=lambda graph: click.echo(f"engine {graph}", err=True))
    return bundle


def _build_demo(folder: Path) -> None:
    from xpress_export.build import build_bundle
    from xpress_export.demo.bundle import open_demo_checkpoints
    from xpress_export.demo.target import fetch_demo_target
    from xpress_export.options import resolve_options

    target, drafter = open_demo_checkpoints(fetch_demo_target())
    precisions = (Precision.FP32, Precision.FP16)
    options = resolve_options(target, drafter)
    build_bundle(target, drafter, folder, options, precisions=precisions, report=lambda step: click.echo(step, err=True))


def default_prompts(bundle: Bundle) -> list[Prompt]:
    """Texts where the bundle has a tokenizer, else random ids; of different length, the longest more than one chunk."""
    generator = np.random.default_rng(7)
    longest = min(bundle.manifest.prefill_chunk + 9, bundle.manifest.capacity - _MAX_NEW_TOKENS - 1)
    lengths = (5, max(6, longest // 2), max(7, longest))
    random = [Prompt(generator.integers(0, bundle.manifest.target.vocab_size, length).tolist()) for length in lengths]
    folder = bundle.tokenizer_folder
    if folder is None:
        return random
    from xpress_export.demo.target import demo_prompts
    from xpress_runtime.tokenizer import TextTokenizer

    tokenizer = TextTokenizer.open(folder)
    return [Prompt(tokenizer.encode(text)[: bundle.manifest.capacity - _MAX_NEW_TOKENS - 1]) for text in demo_prompts()[:6]]


@click.command()
@click.option(
    "--bundle", type=click.Path(path_type=Path), help="A bundle with half-precision graphs. Default: the demo's, built if needed."
)
@click.option("--output", type=click.Path(path_type=Path), default=Path("gpu-report"), show_default=True, help="Folder of the report.")
@click.option("--backend", "backends", multiple=True, type=click.Choice(GPU_BACKENDS), help="Default: all that run here.")
def main(bundle: Path | None, output: Path, backends: tuple[str, ...]) -> None:
    """Check the GPU backends of this machine and write report.json and report.md."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        running = working_backends()
        chosen = backends or tuple(running)
        output.mkdir(parents=True, exist_ok=True)
        opened = prepare_bundle(bundle, output, chosen)
        results = {}
        for name in chosen:
            click.echo(f"backend {name}", err=True)
            cache = output / "runtime-cache" if name.endswith("rtx") else None
            results[name] = check_backend(opened, partial(open_backend, name, runtime_cache=cache), default_prompts(opened))
        passed = all(result["passed"] for result in results.values())
        report = {**_machine(), "bundle": opened.folder.name, "passed": passed, "backends": results}
        (output / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        (output / "report.md").write_text(markdown(report), encoding="utf-8")
    except XpressError as problem:
        click.echo(f"gpu-check: {' '.join(str(problem).split())}", err=True)
        sys.exit(problem.exit_code)
    click.echo(markdown(report))
    sys.exit(0 if report["passed"] else 1)


def _machine() -> dict[str, str]:
    from xpress_runtime.backends.cuda import CudaRuntime, show_bytes

    cuda = CudaRuntime()
    device, (_, total) = cuda.device(), cuda.memory()
    gpu = (
        f"{device.name} (compute capability {device.compute_capability}, {show_bytes(total)}, driver for CUDA {device.driver_cuda_version})"
    )
    machine = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    versions = [f"{package} {version}" for package in _PACKAGES if (version := _version(package))]
    return {"gpu": gpu, "machine": ", ".join([machine, *versions])}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
