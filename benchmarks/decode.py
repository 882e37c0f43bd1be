"""Decoding speed in one run: ours (plain, drafter only, refined) against onnxruntime-genai fp32 and transformers, same prompts and threads.

Each contestant has a process of its own, and they take turns on every prompt, a different one going first each time, so that neither a
machine whose speed drifts nor another's idle threads favour any. Times are of decoding alone: prompt and first token are left out.

    python benchmarks/decode.py [--bundle BUNDLE] [--prompts 6] [--max-new-tokens 64] [--threads 2] [--markdown FILE] [--json FILE]

Peers are optional: pip install 'xpress-export[bench]'. A peer that is missing is named in the table, not measured.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "engines"), str(ROOT / "runtime")]

from xpress_export.cli.show import size  # noqa: E402
from xpress_export.demo.bundle import build_demo_bundle, demo_bundle_folder, find_demo_bundle, open_demo_checkpoints  # noqa: E402
from xpress_export.demo.target import default_cache, demo_prompts, fetch_demo_target  # noqa: E402
from xpress_runtime.generation import GenerationConfig  # noqa: E402
from xpress_runtime.loop import PlainLoop  # noqa: E402
from xpress_runtime.plan import Plan  # noqa: E402
from xpress_runtime.session import Session  # noqa: E402
from xpress_runtime.stats import GenerationStats, peak_memory_bytes  # noqa: E402


@dataclass(frozen=True)
class Run:
    """One prompt through one contestant: decoding seconds and tokens after the first, and the tokens themselves."""

    seconds: float
    tokens: tuple[int, ...]
    stats: GenerationStats | None = None

    @property
    def ms_per_token(self) -> float:
        return 1e3 * self.seconds / max(len(self.tokens) - 1, 1)


class MissingPeer(Exception):
    """A peer that is not installed."""


class Contestant(ABC):
    """Something that continues token ids greedily."""

    name: str

    @abstractmethod
    def run(self, prompt: Sequence[int], max_new_tokens: int) -> Run: ...


class Ours(Contestant):
    """A mode of our runtime; all modes share one session."""

    def __init__(self, name: str, session: Session, **config: Any) -> None:
        self.name = name
        self._session = session
        self._config = config

    def run(self, prompt: Sequence[int], max_new_tokens: int) -> Run:
        result = self._session.generate(prompt, GenerationConfig(max_new_tokens, **self._config))
        return Run(result.stats.decode_seconds, result.tokens, result.stats)


class OnnxRuntimeGenai(Contestant):
    """onnxruntime-genai on its own fp32 export of the same target."""

    name = "onnxruntime-genai fp32"

    def __init__(self, target: Path, cache: Path, threads: int, stop_token_ids: Sequence[int]) -> None:
        import onnxruntime_genai

        self._genai = onnxruntime_genai
        config = onnxruntime_genai.Config(str(_genai_model(target, cache, threads)))
        self._model = onnxruntime_genai.Model(config)
        self._stop = set(stop_token_ids)

    def run(self, prompt: Sequence[int], max_new_tokens: int) -> Run:
        params = self._genai.GeneratorParams(self._model)
        params.set_search_options(max_length=len(prompt) + max_new_tokens, do_sample=False)
        generator = self._genai.Generator(self._model, params)
        generator.append_tokens(list(prompt))
        generator.generate_next_token()
        started = time.perf_counter()
        while not generator.is_done():
            generator.generate_next_token()
        seconds = time.perf_counter() - started
        tokens = [int(token) for token in generator.get_sequence(0)[len(prompt) :]]
        return Run(seconds, tuple(tokens[:max_new_tokens]))


class Transformers(Contestant):
    """transformers' eager generate, fp32."""

    name = "transformers eager fp32"

    def __init__(self, target: Path, threads: int, stop_token_ids: Sequence[int]) -> None:
        import torch

        from xpress_export.checkpoints import locate
        from xpress_export.parity.reference import TransformersReference

        torch.set_num_threads(threads)
        self._reference = TransformersReference(locate(str(target)), stop_token_ids)

    def run(self, prompt: Sequence[int], max_new_tokens: int) -> Run:
        started = time.perf_counter()
        self._reference.generate(prompt, 1)
        first = time.perf_counter() - started
        started = time.perf_counter()
        run = self._reference.generate(prompt, max_new_tokens)
        return Run(time.perf_counter() - started - first, tuple(run.tokens))


def _genai_model(target: Path, cache: Path, threads: int) -> Path:
    """The target as onnxruntime-genai wants it, built once by its own model builder."""
    folder = cache / "genai-fp32"
    if not (folder / "genai_config.json").is_file():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        source = cache / "smollm2-hf"
        dequantised = AutoModelForCausalLM.from_pretrained(target.parent, gguf_file=target.name, dtype="float32")
        # Saved through a fresh model: transformers does not save one that it has read from a GGUF file.
        config = dequantised.config.to_dict()
        config.pop("quantization_config", None)
        model = AutoModelForCausalLM.from_config(type(dequantised.config).from_dict(config), dtype="float32")
        model.load_state_dict(dequantised.state_dict())
        model.save_pretrained(source)
        AutoTokenizer.from_pretrained(target.parent, gguf_file=target.name).save_pretrained(source)
        del model, dequantised
        builder = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
        options = ["-i", source, "-o", folder, "-p", "fp32", "-e", "cpu", "-c", cache / "genai-cache"]
        subprocess.run([*builder, *map(str, options)], check=True, stdout=subprocess.DEVNULL)
    path = folder / "genai_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = threads
    path.write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder


def _open(name: str, bundle: Path, target: Path, threads: int, stop: Sequence[int]) -> Contestant:
    if name == "genai":
        return OnnxRuntimeGenai(target, default_cache(), threads, stop)
    if name == "transformers":
        return Transformers(target, threads, stop)
    session = Session.open(bundle, "ort-cpu", threads=threads, verify=False)
    if name == "plain":
        return Ours("ours, plain", session, speculation="off")
    passes = 0 if name == "drafter" else session.bundle.manifest.num_passes[0]
    return Ours("ours, drafter only (K=0)" if name == "drafter" else f"ours, refined (K={passes})", session, num_passes=passes)


def _serve(connection: Connection, name: str, *arguments: Any) -> None:
    """A contestant's process: answers with its name, then runs prompts until it is told to stop, and ends with its peak memory."""
    try:
        contestant = _open(name, *arguments)
    except ImportError as problem:
        connection.send(MissingPeer(f"{name}: {problem.name} is not installed"))
        return
    connection.send(contestant.name)
    while (request := connection.recv()) is not None:
        connection.send(contestant.run(*request))
    connection.send(peak_memory_bytes())


class Worker:
    """A contestant in its own process."""

    def __init__(self, name: str, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, name, *arguments), daemon=True)
        self._process.start()
        theirs.close()
        answer = self._receive()
        if isinstance(answer, MissingPeer):
            raise answer
        self.name: str = answer
        self.peak_memory_bytes = 0

    def run(self, prompt: Sequence[int], max_new_tokens: int) -> Run:
        self._connection.send((prompt, max_new_tokens))
        run: Run = self._receive()
        return run

    def stop(self) -> None:
        """End the process, and keep its peak memory."""
        self._connection.send(None)
        self.peak_memory_bytes = self._receive()
        self._process.join()

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except EOFError:
            raise RuntimeError("a contestant's process ended without an answer; its error stands above") from None


OURS = ("plain", "drafter", "refined")
PEERS = ("genai", "transformers")


@click.command()
@click.option("--bundle", type=click.Path(path_type=Path), help="A bundle of the demo target. Default: the demo's, built if missing.")
@click.option("--prompts", "num_prompts", default=6, show_default=True, type=click.IntRange(1, 50))
@click.option("--max-new-tokens", default=64, show_default=True, type=click.IntRange(2))
@click.option("--threads", default=2, show_default=True, type=click.IntRange(1))
@click.option("--markdown", type=click.Path(path_type=Path), help="Write the report here as well.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write every figure here.")
@click.option("--no-peers", is_flag=True, help="Measure our own modes only.")
def main(
    bundle: Path | None,
    num_prompts: int,
    max_new_tokens: int,
    threads: int,
    markdown: Path | None,
    json_path: Path | None,
    no_peers: bool,
) -> None:
    """Compare decoding speed and memory in one run."""
    cache = default_cache()
    target = fetch_demo_target(cache)
    folder = bundle or demo_bundle_folder(cache)
    if bundle is None and find_demo_bundle(folder) is None:
        build_demo_bundle(*open_demo_checkpoints(target), folder, lambda step: click.echo(f"build: {step}", err=True))

    with Session.open(folder, "ort-cpu", threads=threads, verify=False) as session:
        stop = session.bundle.manifest.target.stop_token_ids
        prompts = [session.encode([{"role": "user", "content": text}]) for text in demo_prompts()[:: 50 // num_prompts][:num_prompts]]
        verify_ratio = _verify_ratio(session)
    workers, missing = {}, []
    for name in OURS if no_peers else OURS + PEERS:
        try:
            workers[name] = Worker(name, folder, target, threads, stop)
        except MissingPeer as problem:
            missing.append(str(problem))
    runs = _interleave(workers, prompts, max_new_tokens)
    for worker in workers.values():
        worker.stop()
    report = _report(workers, runs, verify_ratio, threads, max_new_tokens, missing)
    click.echo(report.text)
    if markdown is not None:
        markdown.write_text(report.text + "\n", encoding="utf-8")
    if json_path is not None:
        json_path.write_text(json.dumps(report.figures, indent=1) + "\n", encoding="utf-8")


def _interleave(workers: dict[str, Worker], prompts: list[list[int]], max_new_tokens: int) -> dict[str, list[Run]]:
    for worker in workers.values():
        worker.run(prompts[0], 8)
    runs: dict[str, list[Run]] = {name: [] for name in workers}
    order = list(workers)
    for index, prompt in enumerate(prompts):
        for turn in range(len(order)):
            name = order[(index + turn) % len(order)]
            runs[name].append(workers[name].run(prompt, max_new_tokens))
        click.echo(f"prompt {index + 1} of {len(prompts)}", err=True)
    return runs


def _verify_ratio(session: Session, repeats: int = 60) -> float:
    """Median time of verifying a block over that of one token, taking turns at the same position."""
    plan = Plan(session.bundle, session.backend)
    loop = PlainLoop(plan)
    loop.start(0, list(range(100, 228)), GenerationStats(128, 0, None))
    widths = {"block": plan.block_size, "token": 1}
    times: dict[str, list[float]] = {kind: [] for kind in widths}
    for _ in range(repeats):
        for kind, width in widths.items():
            started = time.perf_counter()
            # Not committed, so the next one runs at the same position.
            loop.verification.run(plan.begin_round(width))
            times[kind].append(time.perf_counter() - started)
    return statistics.median(times["block"]) / statistics.median(times["token"])


@dataclass(frozen=True)
class Report:
    """The report as markdown, and its figures."""

    text: str
    figures: dict[str, Any]


@dataclass(frozen=True)
class Figures:
    """``ms_per_token`` is the median over prompts; ``speedup``, tokens per round and ``break_even`` are pooled over all of them."""

    name: str
    ms_per_token: float
    speedup: float
    peak_memory_bytes: int
    same_tokens: int
    mean_acceptance_length: float | None
    break_even: float | None
    host_share: float | None


def _pooled_ms(runs: list[Run]) -> float:
    return 1e3 * sum(run.seconds for run in runs) / sum(len(run.tokens) - 1 for run in runs)


def _figures(name: str, worker: Worker, runs: dict[str, list[Run]]) -> Figures:
    made, plain = runs[name], runs["plain"]
    per_token = statistics.median(run.ms_per_token for run in made)
    stats = [run.stats for run in made if run.stats is not None]
    rounds = sum(each.rounds for each in stats)
    speculative = bool(stats) and stats[0].num_proposals > 0
    seconds = sum(each.decode_seconds for each in stats)
    plain_ms, pooled_ms = _pooled_ms(plain), _pooled_ms(made)
    return Figures(
        name=worker.name,
        ms_per_token=per_token,
        speedup=plain_ms / pooled_ms,
        peak_memory_bytes=worker.peak_memory_bytes,
        same_tokens=sum(run.tokens == base.tokens for base, run in zip(plain, made, strict=True)),
        mean_acceptance_length=sum(each.output_tokens - 1 for each in stats) / rounds if speculative else None,
        break_even=1e3 * seconds / rounds / plain_ms if speculative else None,
        host_share=sum(each.host_seconds for each in stats) / seconds if stats else None,
    )


_EXPLANATION = (
    "ms per token is the median over prompts. Speed-up (over ours, plain), tokens per round and break-even (time of a round over that of a "
    "plain step) are of all prompts together. Host is the share of decoding that is not graph execution."
)


def _report(
    workers: dict[str, Worker],
    runs: dict[str, list[Run]],
    verify_ratio: float,
    threads: int,
    max_new_tokens: int,
    missing: list[str],
) -> Report:
    figures = {name: _figures(name, worker, runs) for name, worker in workers.items()}
    num_prompts = len(runs["plain"])
    header = ["", "ms per token", "speed-up", "tokens per round", "break-even", "host", "peak memory", "same tokens"]
    rows = [
        [
            made.name,
            f"{made.ms_per_token:.1f}",
            f"{made.speedup:.2f}x",
            "" if made.mean_acceptance_length is None else f"{made.mean_acceptance_length:.2f}",
            "" if made.break_even is None else f"{made.break_even:.2f}",
            "" if made.host_share is None else f"{made.host_share:.1%}",
            size(made.peak_memory_bytes),
            f"{made.same_tokens}/{num_prompts}",
        ]
        for made in figures.values()
    ]
    lines = [
        f"{num_prompts} prompts, at most {max_new_tokens} tokens, {threads} threads. {_EXPLANATION}",
        "",
        *_markdown(header, rows),
        "",
        f"Verifying a block takes {verify_ratio:.2f} x the time of one token.",
    ]
    if "genai" in figures:
        ratio = statistics.median(run.ms_per_token / peer.ms_per_token for run, peer in zip(runs["plain"], runs["genai"], strict=True))
        lines.append(f"Plain decoding takes {ratio:.2f} x the time of onnxruntime-genai per token.")
    refined = figures["refined"]
    assert refined.mean_acceptance_length is not None and refined.break_even is not None
    verdict = "pays" if refined.mean_acceptance_length > refined.break_even else "does not pay yet"
    lines.append(f"Speculation pays above the break-even; with {refined.mean_acceptance_length:.2f} tokens per round it {verdict} here.")
    lines += [f"Not measured: {line}" for line in missing]
    return Report("\n".join(lines), {"verify_ratio": verify_ratio, **{name: asdict(made) for name, made in figures.items()}})


def _markdown(header: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *rows)]


if __name__ == "__main__":
    main()
