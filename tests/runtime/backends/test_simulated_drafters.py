"""Every kind of drafter, greedy and sampled, on the simulated GPU with two rounds in flight: the same tokens as on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.complete import SHORTLIST
from tests.runtime.backends.conftest import GRAPH_SET
from tests.runtime.backends.simulated_cuda import SCHEDULES
from tests.runtime.backends.test_simulated_gpu import cuda_of, run_rows, simulated
from xpress_runtime.auto import AutoLoop
from xpress_runtime.backends.base import Backend
from xpress_runtime.backends.ort_cpu import OrtCpuBackend
from xpress_runtime.backlog import Backlog
from xpress_runtime.bundle import Bundle
from xpress_runtime.drafters import AutoregressiveDrafter, BlockDrafter, Drafter, LookupDrafter
from xpress_runtime.generation import GenerationConfig
from xpress_runtime.loop import GREEDY, Loop, PlainLoop, SpeculativeLoop
from xpress_runtime.plan import Plan, Round
from xpress_runtime.sampling import SamplingForm
from xpress_runtime.session import Session
from xpress_runtime.stats import GenerationStats
from xpress_runtime.verification import Verification

PROMPTS = [[5, 17, 9, 30], list(range(2, 40)), list(range(20, 33))]
# Row 0 with everything that sampling has, row 1 greedy, and what starts in row 1 later sampled in a simple way.
SAMPLED = [
    GenerationConfig(
        temperature=0.9,
        top_k=40,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.1,
        seed=1,
    ),
    GenerationConfig(seed=2),
    GenerationConfig(temperature=1.2, seed=3),
]
GREEDY_CONFIGS = [GenerationConfig(seed=0)] * 3
DRAFTERS = (None, "K=3", "K=0", f"K=3 C={SHORTLIST}", "2 steps", "3 steps, K=0", "lookup", "autoregressive")


def drafter_of(plan: Plan, name: str, *, sampled: bool) -> Drafter:
    if name == "lookup":
        return LookupDrafter(plan, sampled=sampled)
    if name == "autoregressive":
        return AutoregressiveDrafter(plan, sampled=sampled)
    num_passes = 0 if name.endswith("K=0") else 3
    steps = int(name[0]) if name[0].isdigit() else 1
    return BlockDrafter(plan, num_passes, SHORTLIST if "C=" in name else 0, steps, sampled=sampled)


def loop_of(plan: Plan, name: str | None, configs: Sequence[GenerationConfig]) -> Loop:
    form = SamplingForm.of(configs)
    return PlainLoop(plan, form) if name is None else SpeculativeLoop(plan, drafter_of(plan, name, sampled=form.sampled), form)


def decode(bundle: Bundle, backend: Backend, name: str | None, configs: Sequence[GenerationConfig], num_rounds: int) -> list[list[int]]:
    plan = Plan(bundle, backend, num_rows=2)
    return run_rows(plan, loop_of(plan, name, configs), PROMPTS, num_rounds, configs)


@pytest.mark.parametrize("configs", [GREEDY_CONFIGS, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("seed", range(2))
def test_the_same_tokens_as_on_the_cpu(trained: Bundle, name: str | None, configs: Sequence[GenerationConfig], seed: int) -> None:
    # Long enough that rounds are captured and launched again, short enough for the capacity.
    num_rounds = 10
    kind = ("tensorrt", "tensorrt-rtx")[seed]
    expected = decode(trained, OrtCpuBackend(1, GRAPH_SET), name, configs, num_rounds)
    backend = simulated("random", seed, kind=kind)
    found = decode(trained, backend, name, configs, num_rounds)
    # What was in flight when a row stopped emits nothing, so the device may be a round short there.
    for row, (on_cpu, on_gpu) in enumerate(zip(expected, found, strict=True)):
        shorter = min(len(on_cpu), len(on_gpu))
        assert on_gpu[:shorter] == on_cpu[:shorter], row
        assert shorter > 3
    assert len(cuda_of(backend).graphs) == backend.rounds_in_flight
    backend.close()
    assert cuda_of(backend).leaked() == {}


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_greedy_row_among_sampled_ones_gets_the_greedy_tokens(trained: Bundle, name: str | None) -> None:
    beside = decode(trained, simulated(), name, [SAMPLED[0], GREEDY_CONFIGS[0], SAMPLED[2]], 6)
    alone = decode(trained, simulated(), name, GREEDY_CONFIGS, 6)
    # What ran in row 1 before it was stopped.
    shorter = min(len(beside[-1]), len(alone[-1]))
    assert beside[-1][:shorter] == alone[-1][:shorter] and shorter > 2
    assert beside[0] != alone[0]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_gives_the_same_sampled_tokens(trained: Bundle, schedule: str) -> None:
    config = GenerationConfig(40, temperature=1.0, top_p=0.9, seed=7, ignore_stop=True)
    with Session(trained, simulated(schedule)) as session, Session(trained, OrtCpuBackend(1, GRAPH_SET)) as cpu:
        for drafter in ("block", "lookup", "autoregressive"):
            own: Any = {"drafter": drafter}
            sampled = GenerationConfig(40, temperature=1.0, top_p=0.9, seed=7, ignore_stop=True, **own)
            assert session.generate(PROMPTS[0], sampled).tokens == cpu.generate(PROMPTS[0], sampled).tokens
        assert session.generate(PROMPTS[0], config).tokens == session.generate(PROMPTS[0], config).tokens


# Speculation "auto".


class Pattern:
    """Widths in turn, None for a plain step: what a policy may decide, without its reasons."""

    def __init__(self, *widths: int | None) -> None:
        self._widths = itertools.cycle(widths)
        self._current: int | None = None

    def new_request(self) -> None:
        pass

    def begin(self) -> bool:
        self._current = next(self._widths)
        return self._current is not None

    def width(self, confidence: Sequence[float] | None) -> int:  # noqa: ARG002
        assert self._current is not None
        return self._current

    def record_plain(self, seconds: float) -> None:
        assert seconds > 0

    def record_round(self, *_: object) -> None:
        pass

    def explain(self) -> str:
        return "in turn"


# Twelve plain steps fill the backlog of a chunk, so that it is read in between.
PATTERN = (4, None, 4, 1, *[None] * 3, 4, *[None] * 12)


@pytest.mark.parametrize("name", ["K=3", "2 steps", "lookup", "autoregressive"])
@pytest.mark.parametrize("schedule", ["random", "lazy"])
def test_auto_changes_between_drafted_rounds_and_plain_steps(trained: Bundle, name: str, schedule: str) -> None:
    with Session(trained, simulated(schedule)) as plain:
        expected = list(plain.generate(PROMPTS[2], GenerationConfig(70, speculation="off", ignore_stop=True)).tokens)
    plan = Plan(trained, simulated(schedule))
    backlog = plan.part(Backlog) if name in ("K=3", "2 steps") else None
    if backlog is None:
        drafter = drafter_of(plan, name, sampled=False)
    else:
        drafter = BlockDrafter(plan, 3, 0, 2 if name == "2 steps" else 1, backlog=backlog)
    policy: Any = Pattern(*PATTERN)
    loop = AutoLoop(plan, drafter, GREEDY, backlog, policy)
    accepted = 0
    for _ in range(2):
        stats = GenerationStats(0, plan.block_size - 1, None)
        tokens = [loop.start(0, PROMPTS[2], stats)]
        while len(tokens) < len(expected):
            committed = loop.round(stats)
            accepted += int(committed.accepted[0])
            tokens += committed.tokens[0, : committed.num_emitted[0]].tolist()
        plan.stop(0)
        assert tokens[: len(expected)] == expected
    assert accepted or name != "K=3"


@pytest.mark.parametrize("drafter", ["block", "lookup", "autoregressive"])
def test_auto_measures_decides_and_gives_the_greedy_tokens(trained: Bundle, drafter: Any) -> None:
    with Session(trained, simulated()) as session:
        expected = session.generate(PROMPTS[0], GenerationConfig(60, speculation="off", ignore_stop=True)).tokens
        for _ in range(2):
            result = session.generate(PROMPTS[0], GenerationConfig(60, speculation="auto", drafter=drafter, ignore_stop=True))
            assert result.tokens == expected
            assert set(result.stats.width_counts) <= {0, 3}


def test_auto_samples(trained: Bundle) -> None:
    with Session(trained, simulated()) as session:
        config = GenerationConfig(50, speculation="auto", temperature=1.0, top_k=20, seed=5, ignore_stop=True)
        assert len(session.generate(PROMPTS[0], config).tokens) == 50


# A fault must show.


def only_the_state(verification: Verification) -> None:
    """A commit that forgets how often each token was emitted."""
    verification._plan.commit()


def nothing(_drafter: Drafter, _round: Round) -> None:
    """A lookup that does not see what is emitted."""


@pytest.mark.parametrize(
    ("name", "owner", "method", "fault"),
    [
        ("K=3", Verification, "commit", only_the_state),
        (None, Verification, "commit", only_the_state),
        ("lookup", LookupDrafter, "observe", nothing),
    ],
)
def test_a_copy_that_is_left_out_is_seen(
    trained: Bundle, monkeypatch: pytest.MonkeyPatch, name: str | None, owner: type, method: str, fault: Callable[..., None]
) -> None:
    configs = [GenerationConfig(temperature=0.7, presence_penalty=2.0, frequency_penalty=2.0, seed=4)] * 3
    num_rounds = 40 if name is None else 8
    expected = decode(trained, OrtCpuBackend(1, GRAPH_SET), name, configs, num_rounds)
    monkeypatch.setattr(owner, method, fault)
    found = decode(trained, simulated(), name, configs, num_rounds)
    assert any(ours[: len(theirs)] != theirs[: len(ours)] for ours, theirs in zip(found, expected, strict=True))
