"""The GPU backends on this machine, as a report: every engine against ONNX Runtime's CPU on the same half-precision graphs, tokens of every
drafter against plain decoding and against the CPU, sampling with the same seed twice, round time, host share, memory.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "engines"), str(ROOT / "runtime")]

from benchmarks.gpu_graphs import MakeBackend, compare_graphs  # noqa: E402
from xpress_export.parity.modes import PLAIN, greedy_modes  # noqa: E402
from xpress_runtime.backends import Backend, open_backend, probe_backends  # noqa: E402
from xpress_runtime.backends.ort_cpu import OrtCpuBackend  # noqa: E402
from xpress_runtime.bundle import Bundle  # noqa: E402
from xpress_runtime.engines import ENGINE_KINDS, engine_kinds  # noqa: E402
from xpress_runtime.errors import EnvironmentProblem, XpressError  # noqa: E402
from xpress_runtime.generation import GenerationConfig  # noqa: E402
from xpress_runtime.plan import Plan  # noqa: E402
from xpress_runtime.prefill import prefill  # noqa: E402
from xpress_runtime.session import Session  # noqa: E402
from xpress_runtime.sets import Precision  # noqa: E402

GPU_BACKENDS = ("tensorrt", "tensorrt-rtx", "ort-cuda", "ort-trt-rtx")
_PACKAGES = ("tensorrt", "tensorrt-rtx", "onnxruntime", "onnxruntime-gpu", "onnxruntime-ep-nv-tensorrt-rtx", "cuda-bindings")
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


# Generation.


def compare_generation(bundle: Bundle, make: MakeBackend, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Tokens of every greedy mode against plain decoding on the same backend, and plain decoding against the CPU; and of sampled modes the
    same seed twice.

    Where two greedy texts differ, the first different place counts: they agree if the logits of the two tokens are nearer than twice the
    error of the backend's logits against the CPU's, measured on the prompts. Of one seed and one backend every token must be the same.
    """
    backend = make()
    free_before = _free_memory(backend)
    started = time.perf_counter()
    with Session(bundle, backend) as session, Session(bundle, OrtCpuBackend(graph_set=backend.graph_set)) as cpu:
        opened_seconds = time.perf_counter() - started
        error = max(
            float(np.abs(_logits(session.open_plan(), prompt.tokens) - _logits(cpu.open_plan(), prompt.tokens)).max()) for prompt in prompts
        )
        modes = greedy_modes(bundle.manifest, _MAX_NEW_TOKENS, ignore_stop=True)
        modes["auto"] = GenerationConfig(_MAX_NEW_TOKENS, ignore_stop=True, speculation="auto")
        plain = _Decoded(session, prompts, PLAIN, modes[PLAIN])
        on_cpu = _Decoded(cpu, prompts, PLAIN, modes[PLAIN])
        divergences = list(_divergences("plain on the CPU", plain, on_cpu, cpu.open_plan(), prompts, error))
        rows = [plain.figures()]
        for mode, config in modes.items():
            if mode != PLAIN:
                decoded = _Decoded(session, prompts, mode, config)
                rows.append(decoded.figures())
                divergences += _divergences("plain on this backend", decoded, plain, cpu.open_plan(), prompts, error)
        repeated = {}
        for mode, config in _sampled_modes(bundle).items():
            first, second = (_Decoded(session, prompts, mode, config) for _ in range(2))
            rows.append(first.figures())
            repeated[mode] = first.tokens == second.tokens
        free_after = _free_memory(backend)
    return {
        "passed": all(divergence["explained"] for divergence in divergences) and all(repeated.values()),
        "logit_error": error,
        "divergences": divergences,
        "same_seed_same_tokens": repeated,
        "rows": rows,
        "open_seconds": opened_seconds,
        "gpu_memory_bytes": free_before - free_after,
    }


def _sampled_modes(bundle: Bundle) -> dict[str, GenerationConfig]:
    """Sampling with all that it has, plain and with every drafter."""
    if not bundle.manifest.sampling:
        return {}
    sampled = partial(
        GenerationConfig,
        _MAX_NEW_TOKENS,
        ignore_stop=True,
        temperature=0.8,
        top_k=50,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.05,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        seed=11,
    )
    modes = {"sampled, plain": sampled(speculation="off"), "sampled": sampled(), "sampled, lookup": sampled(drafter="lookup")}
    return modes | ({"sampled, autoregressive": sampled(drafter="autoregressive")} if bundle.manifest.draft_model is not None else {})


class _Decoded:
    """Tokens and figures of all prompts; the first prompt runs once before, for what happens only once."""

    def __init__(self, session: Session, prompts: Sequence[Prompt], mode: str, config: GenerationConfig) -> None:
        self.mode = mode
        session.generate(prompts[0].tokens, config)
        results = [session.generate(prompt.tokens, config) for prompt in prompts]
        self.tokens = [list(result.tokens) for result in results]
        self._stats = [result.stats for result in results]

    def figures(self) -> dict[str, Any]:
        rounds = sum(stats.rounds for stats in self._stats)
        seconds = sum(stats.decode_seconds for stats in self._stats)
        kept = sum(sum(stats.kept_lengths) for stats in self._stats)
        return {
            "mode": self.mode,
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
            "mode": found.mode,
            "against": against,
            "token": place,
            "margin": margin,
            "explained": margin <= 2 * error,
        }


def _logits(plan: Plan, tokens: Sequence[int]) -> NDArray[Any]:
    """The target's logits [V] after a text."""
    prefill(plan, 0, np.asarray(tokens, np.int64), None)
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
        lines += ["", "| mode | mean acceptance length | round | per token | host share | prefill |", "|---|---|---|---|---|---|"]
        for row in generation["rows"]:
            lines.append(
                f"| {row['mode']} | {row['mean_acceptance_length']:.2f} | {row['round_ms']:.2f} ms | {row['ms_per_token']:.2f} ms | "
                f"{row['host_share']:.0%} | {row['prefill_ms']:.1f} ms |"
            )
        lines += ["", f"GPU memory {generation['gpu_memory_bytes'] / 2**20:.0f} MiB, opened in {generation['open_seconds']:.1f} s."]
        lines += [f"Logits differ from the CPU's by at most {generation['logit_error']:.1e}; first divergences:"]
        for found in generation["divergences"] or [None]:
            lines.append("- none" if found is None else f"- {found}")
        for mode, same in generation["same_seed_same_tokens"].items():
            lines.append(f"{mode}, the same seed twice: {'the same tokens' if same else 'DIFFERENT tokens'}.")
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

    target, drafter, draft_model = open_demo_checkpoints(fetch_demo_target())
    precisions = (Precision.FP32, Precision.FP16)
    options = resolve_options(target, drafter)
    build_bundle(
        target,
        drafter,
        folder,
        options,
        precisions=precisions,
        draft_model=draft_model,
        report=lambda step: click.echo(step, err=True),
    )


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
