"""What sharing rounds brings: the same requests one at a time and in shared rounds, decoded plainly, drafted, and drafted while it pays.

    python benchmarks/serving.py BUNDLE [--slots 8] [--requests 32] [--max-tokens 64] [--repeats 3] [--peer TARGET] [--output serving.json]

Every way runs in every repetition, and every text must be the one that plain decoding gives one at a time (exit code 1 otherwise). Two
loads: all requests at once, for tokens per second; and arrivals at random times, at 60 % of what the session manages, for the times that a
user sees. ``--peer``: transformers as well, on the same target, in batches of as many requests as there are slots, padded at the left.
"""

from __future__ import annotations

import json
import random
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "engines"), str(ROOT / "runtime")]

from xpress_runtime.generation import GenerationConfig  # noqa: E402
from xpress_runtime.serving import BatchSession, Limits, Request, RoundReport, Step  # noqa: E402
from xpress_runtime.session import Session  # noqa: E402
from xpress_runtime.stats import Stage  # noqa: E402

PROMPTS = ROOT / "xpress_export/demo/prompts.jsonl"
# Of the tokens per second that all requests at once reached.
PACED_SHARE = 0.6


@dataclass
class Times:
    """Of one load, in seconds. A gap is the time between two steps of a text."""

    first_token: list[float] = field(default_factory=list)
    between_tokens: list[float] = field(default_factory=list)
    longest_gap: float = 0.0
    longest_round: float = 0.0
    longest_chunk: float = 0.0

    def to_json(self) -> dict[str, float]:
        found = {
            f"{name}_p{share}_ms": 1e3 * statistics.quantiles(values, n=100, method="inclusive")[share - 1]
            for name, values in (("first_token", self.first_token), ("between_tokens", self.between_tokens))
            for share in (50, 95)
        }
        longest = {"gap": self.longest_gap, "round": self.longest_round, "chunk": self.longest_chunk}
        return found | {f"longest_{name}_ms": 1e3 * seconds for name, seconds in longest.items()}


class Watch:
    """One request's steps, as they come."""

    def __init__(self, times: Times) -> None:
        self._times = times
        self._started = time.perf_counter()
        self._last: float | None = None
        self.ended = threading.Event()

    def step(self, step: Step | None) -> None:
        now = time.perf_counter()
        if step is None:
            self.ended.set()
            return
        if self._last is None:
            self._times.first_token.append(now - self._started)
            self._times.longest_chunk = max(self._times.longest_chunk, step.seconds[Stage.PREFILL])
        else:
            self._times.longest_gap = max(self._times.longest_gap, now - self._last)
            self._times.between_tokens += [(now - self._last) / len(step.tokens)] * len(step.tokens)
        self._last = now


class Rounds:
    """The longest round of a load."""

    def __init__(self) -> None:
        self.times = Times()

    def round(self, report: RoundReport) -> None:
        self.times.longest_round = max(self.times.longest_round, sum(report.seconds.values()))

    def finished(self, request: Request) -> None:
        """Watched request by request."""


def one_at_a_time(session: Session, prompts: Sequence[Any], config: GenerationConfig) -> tuple[float, list[tuple[int, ...]]]:
    """Tokens per second, and the tokens."""
    started = time.perf_counter()
    tokens = [session.generate(prompt, config).tokens for prompt in prompts]
    return sum(map(len, tokens)) / (time.perf_counter() - started), tokens


def together(
    session: BatchSession, rounds: Rounds, prompts: Sequence[Any], config: GenerationConfig, delays: Sequence[float]
) -> tuple[float, list[tuple[int, ...]], Times]:
    """Tokens per second, the tokens and the times, with ``delays`` seconds before each request."""
    times = rounds.times = Times()
    started = time.perf_counter()
    requests = []
    for prompt, delay in zip(prompts, delays, strict=True):
        time.sleep(delay)
        requests.append(session.submit(prompt, config, on_step=Watch(times).step))
    tokens = [request.result().tokens for request in requests]
    return sum(map(len, tokens)) / (time.perf_counter() - started), tokens, times


class Peer:
    """transformers' ``generate`` on batches: all of one batch begin together, and the next begins when the last one has ended."""

    def __init__(self, target: Path, threads: int | None) -> None:
        import torch
        import transformers

        if threads is not None:
            torch.set_num_threads(threads)
        place = {"gguf_file": target.name} if target.is_file() else {}
        folder = target.parent if target.is_file() else target
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left", **place)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **place).eval()

    def generate(self, prompts: Sequence[Any], max_tokens: int, slots: int) -> tuple[float, list[tuple[int, ...]]]:
        """Tokens per second, and the tokens up to the first that ends a text."""
        ends = self._model.generation_config.eos_token_id
        ends = set(ends if isinstance(ends, list) else [ends])
        found: list[tuple[int, ...]] = []
        started = time.perf_counter()
        for first in range(0, len(prompts), slots):
            inputs = self._tokenizer.apply_chat_template(
                list(prompts[first : first + slots]), add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
            )
            output = self._model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
            for row in output[:, inputs["input_ids"].shape[1] :].tolist():
                length = next((index + 1 for index, token in enumerate(row) if token in ends), len(row))
                found.append(tuple(row[:length]))
        return sum(map(len, found)) / (time.perf_counter() - started), found


def read_prompts(count: int) -> list[Any]:
    """Chat requests of the held-out prompts, from the first one on again where there are fewer."""
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines if line.strip()]
    return [[{"role": "user", "content": found[index % len(found)]["prompt"]}] for index in range(count)]


@click.command()
@click.argument("bundle", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--slots", default=8, show_default=True)
@click.option("--requests", "num_requests", default=32, show_default=True)
@click.option("--max-tokens", default=64, show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--backend", default="auto", show_default=True)
@click.option("--threads", type=int)
@click.option("--peer", type=click.Path(exists=True, path_type=Path), help="The bundle's target: measure transformers on it too.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Write every figure as JSON.")
def main(
    bundle: Path,
    slots: int,
    num_requests: int,
    max_tokens: int,
    repeats: int,
    backend: str,
    threads: int | None,
    peer: Path | None,
    output: Path | None,
) -> None:
    """Measure BUNDLE."""
    prompts = read_prompts(num_requests)
    configs = {way: GenerationConfig(max_tokens, speculation=way) for way in ("off", "on", "auto")}  # type: ignore[arg-type]
    rates: dict[str, list[float]] = {}
    paced: dict[str, list[dict[str, float]]] = {}
    differing: list[str] = []
    at_once = [0.0] * num_requests
    other = None if peer is None else Peer(peer, threads)
    limits = Limits(max_queue=num_requests)
    with (
        Session.open(bundle, backend, threads=threads) as alone,
        BatchSession.open(bundle, backend, threads=threads, verify=False, slots=slots, limits=limits) as shared,
    ):
        rounds = Rounds()
        shared.observe(rounds)
        # What is measured or loaded at first use is not what a server does all day.
        expected = one_at_a_time(alone, prompts, configs["off"])[1]
        for config in configs.values():
            one_at_a_time(alone, prompts[:2], config)
            together(shared, rounds, prompts[:slots], config, at_once[:slots])
        begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        def run(name: str, measure: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
            found = measure()
            if found[1] != expected:
                differing.append(name)
            click.echo(f"{name}: {found[0]:.1f} tokens/s")
            return found

        for repeat in range(repeats):
            for way, config in configs.items():
                name = f"one at a time, speculation {way}"
                rates.setdefault(name, []).append(run(name, lambda config=config: one_at_a_time(alone, prompts, config))[0])  # type: ignore[misc]
            for way, config in configs.items():
                name = f"{slots} slots, speculation {way}"
                found = run(name, lambda config=config: together(shared, rounds, prompts, config, at_once))  # type: ignore[misc]
                rates.setdefault(name, []).append(found[0])
                spread = random.Random(repeat)
                seconds_per_request = statistics.mean(map(len, expected)) / (PACED_SHARE * found[0])
                delays = [spread.expovariate(1 / seconds_per_request) for _ in prompts]
                measured = run(f"{name}, paced", lambda config=config, delays=delays: together(shared, rounds, prompts, config, delays))  # type: ignore[misc]
                paced.setdefault(name, []).append(measured[2].to_json())
            if other is not None:
                name = f"transformers, batches of {slots}"
                rates.setdefault(name, []).append(run(name, lambda: other.generate(prompts, max_tokens, slots))[0])  # type: ignore[union-attr]
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begun
    figures = {
        "slots": slots,
        "requests": num_requests,
        "max_tokens": max_tokens,
        "tokens_per_second": {name: statistics.median(values) for name, values in rates.items()},
        "paced": {name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in paced.items()},
        "peak_memory_growth_bytes": 1024 * grown,
        "differing": sorted(set(differing)),
    }
    _show(figures)
    if output is not None:
        output.write_text(json.dumps(figures | {"repeats": rates}, indent=2) + "\n", encoding="utf-8")
    sys.exit(1 if differing else 0)


def _show(figures: dict[str, Any]) -> None:
    rates = figures["tokens_per_second"]
    baseline = rates["one at a time, speculation off"]
    click.echo("\n| | tokens/s | against one at a time, plain |\n|---|---|---|")
    for name, rate in rates.items():
        click.echo(f"| {name} | {rate:.1f} | {rate / baseline:.2f} × |")
    click.echo("\n| paced | first token p50, p95 | between tokens p50, p95 | longest gap | longest round, prompt |\n|---|---|---|---|---|")
    for name, found in figures["paced"].items():
        click.echo(
            f"| {name} | {found['first_token_p50_ms']:.0f}, {found['first_token_p95_ms']:.0f} ms "
            f"| {found['between_tokens_p50_ms']:.0f}, {found['between_tokens_p95_ms']:.0f} ms | {found['longest_gap_ms']:.0f} ms "
            f"| {found['longest_round_ms']:.0f}, {found['longest_chunk_ms']:.0f} ms |"
        )
    click.echo(f"\ndiffering texts: {', '.join(figures['differing']) or 'none'}")
    click.echo(f"peak memory grew by {figures['peak_memory_growth_bytes'] / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
