"""The TensorRT backend on a simulated GPU: the same tokens as on the CPU, whatever the GPU does when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.runtime.backends.simulated_cuda import SCHEDULES, SimulatedCuda
from tests.runtime.backends.simulated_engines import SimulatedLibrary
from tests.scripted import BLOCK_SIZE, continuation
from xpress_runtime.backends.tensorrt import TensorRtBackend
from xpress_runtime.bundle import Bundle
from xpress_runtime.drafters import BlockDrafter
from xpress_runtime.generation import GenerationConfig
from xpress_runtime.loop import Loop, PlainLoop, SpeculativeLoop
from xpress_runtime.plan import Plan
from xpress_runtime.session import Session
from xpress_runtime.stats import GenerationStats

CAPACITY = 64


def simulated(schedule: str = "random", seed: int = 0, *, kind: str = "tensorrt-rtx", **options: Any) -> TensorRtBackend:
    cuda = SimulatedCuda(schedule, seed, **options)
    return TensorRtBackend(kind, cuda, SimulatedLibrary(cuda))


def cuda_of(backend: TensorRtBackend) -> SimulatedCuda:
    cuda = backend.device.cuda
    assert isinstance(cuda, SimulatedCuda)
    return cuda


@pytest.fixture(params=SCHEDULES)
def session(request: pytest.FixtureRequest, scripted: Bundle) -> Iterator[Session]:
    with Session(scripted, simulated(request.param)) as opened:
        yield opened


def stats_of(plan: Plan) -> GenerationStats:
    return GenerationStats(0, plan.block_size - 1, None)


def test_every_number_of_passes_and_plain(session: Session) -> None:
    for num_passes in range(BLOCK_SIZE):
        result = session.generate([3, 9], GenerationConfig(30, num_passes=num_passes))
        assert list(result.tokens) == continuation(9, 30)
        assert set(result.stats.acceptance_lengths) == {num_passes + 1}
        assert all(seconds > 0 for seconds in result.stats.stage_seconds.values())
    assert list(session.generate([3, 9], GenerationConfig(30, speculation="off")).tokens) == continuation(9, 30)


def test_every_block_and_chunk_boundary(session: Session) -> None:
    for length in range(1, 14):
        prompt = continuation(4, length)
        for max_new_tokens in (1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE):
            result = session.generate(prompt, GenerationConfig(max_new_tokens, num_passes=3))
            assert list(result.tokens) == continuation(prompt[-1], max_new_tokens)


def test_output_ends_where_the_capacity_does(session: Session) -> None:
    for length in (1, CAPACITY - 9, CAPACITY - 2, CAPACITY - 1):
        for num_passes in (0, 3):
            result = session.generate(continuation(1, length), GenerationConfig(1000, num_passes=num_passes))
            assert list(result.tokens) == continuation(continuation(1, length)[-1], CAPACITY - length)
            assert result.finish_reason == "capacity"


def test_a_stop_one_round_late_emits_nothing_more(session: Session) -> None:
    stop = continuation(5, 7)[-1]
    for _ in range(4):
        result = session.generate([5], GenerationConfig(50, num_passes=2, stop_token_ids=[stop]))
        assert list(result.tokens) == continuation(5, 7)
        assert result.finish_reason == "stop"


def test_abandoned_streams_leave_a_round_in_flight_that_harms_nothing(session: Session) -> None:
    for speculation in ("on", "off", "on", "off"):
        for num_pieces in range(6):
            stream = session.stream([7, 8], GenerationConfig(40, speculation=speculation))
            tokens = [token for _, piece in zip(range(num_pieces), stream, strict=False) for token in piece.tokens]
            assert tokens == continuation(8, len(tokens))
    assert list(session.generate([11], GenerationConfig(20)).tokens) == continuation(11, 20)


def test_a_session_closes_everything(scripted: Bundle) -> None:
    backend = simulated()
    with Session(scripted, backend) as session:
        session.generate([3], GenerationConfig(30))
    assert cuda_of(backend).leaked() == {}
    assert (backend._library.open_engines, backend._library.open_contexts) == (0, 0)  # type: ignore[attr-defined]
    backend.close()


def run_rows(
    plan: Plan, loop: Loop, prompts: list[list[int]], num_rounds: int, configs: Sequence[GenerationConfig] | None = None
) -> list[list[int]]:
    """Rows that start together, of which one stops in between and starts anew with a prompt of its own while rounds are in flight.

    Answers with the tokens of every row and, last, with what the one that stopped had made. ``configs``: settings of each prompt.
    """
    stats = stats_of(plan)
    own = configs or [GenerationConfig(seed=0)] * len(prompts)
    outputs = [[loop.start(row, prompts[row], stats, own[row])] for row in range(plan.num_rows)]
    for index in range(num_rounds):
        if index == num_rounds // 3:
            plan.stop(1)
        if index == num_rounds // 2:
            outputs.append(outputs[1])
            outputs[1] = [loop.start(1, prompts[-1], stats, own[-1])]
        committed = loop.round(stats)
        for row in range(plan.num_rows):
            outputs[row] += committed.tokens[row, : committed.num_emitted[row]].tolist()
    return outputs


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rows_stop_and_start_with_rounds_in_flight(scripted: Bundle, schedule: str) -> None:
    plan = Plan(scripted, simulated(schedule, kind="tensorrt"), num_rows=3)
    prompts = [[2], continuation(8, 11), continuation(20, 5), continuation(14, 6)]
    for loop in (SpeculativeLoop(plan, BlockDrafter(plan, 2)), PlainLoop(plan)):
        first, restarted, third, stopped = run_rows(plan, loop, prompts, 12)
        for prompt, tokens in zip(prompts, (first, stopped, third, restarted), strict=True):
            assert tokens == continuation(prompt[-1], len(tokens))
        tokens_per_round = loop._width if isinstance(loop, PlainLoop) else 3
        assert len(first) == len(third) == 1 + 12 * tokens_per_round
        assert len(stopped) == 1 + 4 * tokens_per_round
        for row in range(3):
            plan.stop(row)
