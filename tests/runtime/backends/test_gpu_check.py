"""`make gpu-check` without a GPU: what it answers on this machine, and its checks on the simulated GPU, which pass and can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_check
from benchmarks.gpu_check import Prompt, check_backend, markdown
from tests.runtime.backends.simulated_cuda import SimulatedCuda
from tests.runtime.backends.simulated_engines import SimulatedContext, SimulatedLibrary
from xpress_runtime.backends import probe_backends
from xpress_runtime.backends.tensorrt import TensorRtBackend
from xpress_runtime.bundle import Bundle

ROOT = Path(__file__).resolve().parents[3]
needs_no_gpu = pytest.mark.skipif(
    any(status.runs for status in probe_backends() if status.name != "ort-cpu"), reason="a GPU backend runs here"
)


@needs_no_gpu
def test_without_a_gpu_it_says_in_one_line_what_is_missing(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py"), "--output", str(tmp_path / "report")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env={**os.environ})
    assert done.returncode == 3, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("gpu-check: no GPU backend runs here: tensorrt: ")
    assert not (tmp_path / "report").exists()


def simulated() -> TensorRtBackend:
    cuda = SimulatedCuda("random")
    return TensorRtBackend("tensorrt", cuda, SimulatedLibrary(cuda))


PROMPTS = [Prompt([5, 17, 9, 30]), Prompt(list(range(2, 32)))]


def test_every_check_passes_on_the_simulated_gpu(trained: Bundle) -> None:
    result = check_backend(trained, simulated, PROMPTS)
    assert result["passed"], json.dumps(result)
    assert set(result["graphs"]) == set(trained.manifest.graph_names)
    assert all(graph["calls"] >= 1 for graph in result["graphs"].values())
    sampled = ["sampled, plain", "sampled", "sampled, lookup", "sampled, autoregressive"]
    modes = ["plain", "K=3", "K=0", "K=3 C=8", "2 draft steps", "lookup", "autoregressive", "auto", *sampled]
    assert [row["mode"] for row in result["generation"]["rows"]] == modes
    assert result["generation"]["same_seed_same_tokens"] == dict.fromkeys(sampled, True)
    assert result["generation"]["gpu_memory_bytes"] > 0
    shown = markdown({"gpu": "G", "machine": "M", "bundle": "B", "passed": True, "backends": {"tensorrt": result}})
    assert "## tensorrt: passed" in shown and "| target | 3 |" in shown
    assert "sampled, lookup, the same seed twice: the same tokens." in shown


def wrong(graph: str) -> Callable[[SimulatedContext], None]:
    run = SimulatedContext._run

    def run_wrong(context: SimulatedContext) -> None:
        run(context)
        if context.engine.graph == graph:
            context.spoil()

    return run_wrong


MODELS = ["embed", "target", "head", "drafter", "draft-decoder", "refiner-k3", "refiner-k3-c8-sampled"]
BETWEEN = ["accept", "accept-candidates", "denoise", "lookup", "store-taps", "sample", "filter-top-p", "draft-start", "draft-step-sampled"]


@pytest.mark.parametrize("graph", [*MODELS, *BETWEEN])
def test_an_engine_that_computes_something_else_fails(trained: Bundle, monkeypatch: pytest.MonkeyPatch, graph: str) -> None:
    monkeypatch.setattr(SimulatedContext, "_run", wrong(graph))
    graphs = gpu_check.compare_graphs(trained, simulated)
    assert [name for name, result in graphs.items() if not result["passed"]] == [graph]


def test_tokens_that_differ_without_a_near_tie_fail(trained: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = gpu_check.Session.generate

    def one_token_off(session: Any, prompt: Any, config: Any = None) -> Any:
        result = generate(session, prompt, config)
        if session.backend.name == "tensorrt" and config.num_passes == 0:
            object.__setattr__(result, "tokens", (*result.tokens[:3], (result.tokens[3] + 1) % 50, *result.tokens[4:]))
        return result

    monkeypatch.setattr(gpu_check.Session, "generate", one_token_off)
    result = gpu_check.compare_generation(trained, simulated, PROMPTS)
    assert not result["passed"]
    assert {(found["mode"], found["token"], found["explained"]) for found in result["divergences"]} == {("K=0", 3, False)}


def test_a_seed_that_gives_other_tokens_the_second_time_fails(trained: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = gpu_check.Session.generate
    seeds = iter(range(1000))

    def another_seed(session: Any, prompt: Any, config: Any = None) -> Any:
        drawn = config.temperature > 0 and config.drafter == "lookup"
        return generate(session, prompt, replace(config, seed=next(seeds)) if drawn else config)

    monkeypatch.setattr(gpu_check.Session, "generate", another_seed)
    result = gpu_check.compare_generation(trained, simulated, PROMPTS)
    assert not result["passed"]
    assert [mode for mode, same in result["same_seed_same_tokens"].items() if not same] == ["sampled, lookup"]


def test_an_error_is_a_result(trained: Bundle) -> None:
    def refused() -> TensorRtBackend:
        cuda = SimulatedCuda(compute_capability="9.0")
        return TensorRtBackend("tensorrt", cuda, SimulatedLibrary(cuda))

    result = check_backend(trained, refused, PROMPTS)
    assert not result["passed"] and "compute capability" in result["error"]
    assert "FAILED" in markdown({"gpu": "G", "machine": "M", "bundle": "B", "passed": False, "backends": {"tensorrt": result}})
