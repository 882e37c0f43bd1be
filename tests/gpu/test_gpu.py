"""The backends on a real GPU: pytest -m gpu. Skipped with the reason where a backend does not run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from benchmarks.gpu_check import GPU_BACKENDS, Prompt, compare_generation, compare_graphs, prepare_bundle
from tests.complete import CASE
from tests.conftest import build
from xpress_runtime.backends import Backend, open_backend, probe_backends
from xpress_runtime.bundle import Bundle
from xpress_runtime.generation import GenerationConfig
from xpress_runtime.session import Session
from xpress_runtime.sets import Precision

pytestmark = pytest.mark.gpu

PROMPTS = [Prompt([5, 17, 9, 30]), Prompt(list(range(2, 32)))]


@pytest.fixture(scope="module", params=GPU_BACKENDS)
def name(request: pytest.FixtureRequest) -> str:
    """A backend that runs here."""
    backend: str = request.param
    (status,) = (status for status in probe_backends() if status.name == backend)
    if not status.runs:
        pytest.skip(f"{backend}: {status.reason}")
    return backend


@pytest.fixture(scope="module")
def bundle(name: str, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """With every kind of graph."""
    output = tmp_path_factory.mktemp("gpu") / "bundle"
    options = {"num_passes": (3, 1), "shortlists": (0, 8), "capacity": 112, "prefill_chunk": 12, "sampling": True, "draft_layers": (0, 1)}
    built = build(CASE / "target", CASE / "xpress", output, precisions=[Precision.FP32, Precision.FP16], **options)
    return prepare_bundle(built.bundle.folder, output.parent, [name])


@pytest.fixture(scope="module")
def make(name: str) -> Callable[[], Backend]:
    return partial(open_backend, name)


def test_every_graph_computes_what_it_does_on_the_cpu(bundle: Bundle, make: Callable[[], Backend]) -> None:
    wrong = {graph: result for graph, result in compare_graphs(bundle, make).items() if not result["passed"]}
    assert not wrong


def test_tokens_are_those_of_plain_decoding_and_of_the_cpu_and_seeds_repeat(bundle: Bundle, make: Callable[[], Backend]) -> None:
    result = compare_generation(bundle, make, PROMPTS)
    assert result["passed"], (result["divergences"], result["same_seed_same_tokens"])
    assert all(row["host_share"] < 1 for row in result["rows"])


def test_rounds_are_captured_and_memory_comes_back(bundle: Bundle, make: Callable[[], Backend], caplog: pytest.LogCaptureFixture) -> None:
    with Session(bundle, make()) as first:
        first.generate([5, 17], GenerationConfig(60, ignore_stop=True))
        device = getattr(first.backend, "device")  # noqa: B009
        free, _ = device.cuda.memory()
    assert "cannot be captured" not in caplog.text
    cuda = device.cuda
    assert cuda.memory()[0] > free


def test_a_runtime_cache_is_written_and_taken(name: str, bundle: Bundle, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if name != "tensorrt-rtx":
        pytest.skip(f"{name} compiles nothing at run time")
    tokens = set()
    for _ in range(2):
        with Session(bundle, open_backend(name, runtime_cache=tmp_path)) as session:
            tokens.add(session.generate([5, 17], GenerationConfig(40, ignore_stop=True)).tokens)
    assert len(tokens) == 1 and list(tmp_path.glob("*.cache")) and "damaged" not in caplog.text
