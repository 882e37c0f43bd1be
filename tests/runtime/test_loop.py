"""The loops on drafters whose acceptance is dictated: never, always, and every number in between; rows of different length.

Once as a CPU runs them, and once as a GPU does: masked half-precision graphs, padded prompts, and the next round queued before the last one
is read.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import Built, build
from tests.scripted import BLOCK_SIZE, SEED_TOKEN, continuation, write_scripted
from xpress_runtime.backends import open_backend
from xpress_runtime.backends.ort_cpu import OrtCpuBackend
from xpress_runtime.drafters import BlockDrafter
from xpress_runtime.generation import GenerationConfig
from xpress_runtime.loop import PlainLoop, SpeculativeLoop
from xpress_runtime.plan import Plan
from xpress_runtime.session import Session
from xpress_runtime.sets import Precision
from xpress_runtime.stats import GenerationStats

CAPACITY = 60


class RoundAheadBackend(OrtCpuBackend):
    """Runs the masked graphs, and the next round before the last one is read."""

    rounds_in_flight = 2

    def __init__(self) -> None:
        super().__init__(threads=1, graph_set="fp16-mask")


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("scripted")
    precisions = (Precision.FP32, Precision.FP16)
    options = {"num_passes": (3, 2, 1), "capacity": CAPACITY, "prefill_chunk": 5}
    return build(*write_scripted(folder), folder / "bundle", precisions=precisions, **options)


@pytest.fixture(scope="module", params=["cpu", "round ahead"])
def backend(request: pytest.FixtureRequest) -> OrtCpuBackend:
    return OrtCpuBackend(threads=1) if request.param == "cpu" else RoundAheadBackend()


@pytest.fixture(scope="module")
def session(scripted: Built, backend: OrtCpuBackend) -> Session:
    return Session(scripted.bundle, backend)


def _stats(plan: Plan, num_passes: int | None) -> GenerationStats:
    return GenerationStats(prompt_tokens=0, num_proposals=plan.block_size - 1, num_passes=num_passes)


@pytest.mark.parametrize("num_passes", range(BLOCK_SIZE))
def test_pass_k_settles_slot_k(session: Session, num_passes: int) -> None:
    result = session.generate([3, 9], GenerationConfig(max_new_tokens=25, num_passes=num_passes))
    assert list(result.tokens) == continuation(9, 25)
    assert set(result.stats.acceptance_lengths) == {num_passes + 1}
    assert result.stats.acceptance_by_position == [1.0] * num_passes + [0.0] * (BLOCK_SIZE - 1 - num_passes)


@pytest.mark.parametrize("length", range(1, 14))
@pytest.mark.parametrize("num_passes", [0, 3])
def test_every_block_and_chunk_boundary(session: Session, length: int, num_passes: int) -> None:
    prompt = continuation(4, length)
    for max_new_tokens in (1, 2, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE):
        result = session.generate(prompt, GenerationConfig(max_new_tokens, num_passes=num_passes))
        assert list(result.tokens) == continuation(prompt[-1], max_new_tokens)
        assert result.finish_reason == "length"
        assert sum(result.stats.kept_lengths) == max_new_tokens - 1


@pytest.mark.parametrize("num_passes", [None, 0, 1, 3])
@pytest.mark.parametrize("length", [1, CAPACITY - 9, CAPACITY - 2, CAPACITY - 1])
def test_output_ends_where_the_capacity_does(session: Session, length: int, num_passes: int | None) -> None:
    config = GenerationConfig(1000, num_passes=num_passes, speculation="off" if num_passes is None else "on")
    result = session.generate(continuation(1, length), config)
    assert list(result.tokens) == continuation(continuation(1, length)[-1], CAPACITY - length)
    assert result.finish_reason == "capacity"


def test_plain_decoding_proposes_nothing(session: Session) -> None:
    result = session.generate([7], GenerationConfig(10, speculation="off"))
    assert list(result.tokens) == continuation(7, 10)
    assert result.stats.proposed == 0
    assert result.stats.acceptance_rate is None
    assert result.stats.rounds == 9


def test_stop_token_inside_a_block_cuts_it(session: Session) -> None:
    stop = continuation(5, 7)[-1]
    for num_passes in range(BLOCK_SIZE):
        result = session.generate([5], GenerationConfig(50, num_passes=num_passes, stop_token_ids=[stop]))
        assert list(result.tokens) == continuation(5, 7)
        assert result.finish_reason == "stop"
        ignored = session.generate([5], GenerationConfig(12, num_passes=num_passes, stop_token_ids=[stop], ignore_stop=True))
        assert list(ignored.tokens) == continuation(5, 12)


def test_rows_of_different_length_in_one_batch(scripted: Built, backend: OrtCpuBackend) -> None:
    plan = Plan(scripted.bundle, backend, num_rows=3)
    loop = SpeculativeLoop(plan, BlockDrafter(plan, 2))
    stats = _stats(plan, 2)
    prompts = [[2], continuation(8, 11), continuation(20, 5)]
    outputs = [[loop.start(row, prompt, stats)] for row, prompt in enumerate(prompts)]
    for round_index in range(6):
        if round_index == 3:
            plan.stop(1)
        committed = loop.round(stats)
        for row in range(3):
            outputs[row] += committed.tokens[row, : committed.num_emitted[row]].tolist()
    lengths = [1 + 6 * 3, 1 + 3 * 3, 1 + 6 * 3]
    assert [len(tokens) for tokens in outputs] == lengths
    assert outputs == [continuation(prompt[-1], length) for prompt, length in zip(prompts, lengths, strict=True)]


def test_a_row_that_joins_later_disturbs_none(scripted: Built, backend: OrtCpuBackend) -> None:
    plan = Plan(scripted.bundle, backend, num_rows=2)
    loop = SpeculativeLoop(plan, BlockDrafter(plan, 3))
    stats = _stats(plan, 3)
    outputs = [[loop.start(0, [9], stats)], []]
    for round_index in range(4):
        if round_index == 2:
            outputs[1].append(loop.start(1, continuation(3, 12), stats))
        committed = loop.round(stats)
        for row in range(2):
            outputs[row] += committed.tokens[row, : committed.num_emitted[row]].tolist()
    assert outputs[0] == continuation(9, len(outputs[0])) and len(outputs[0]) == 1 + 4 * BLOCK_SIZE
    # Rounds that were queued before it joined do without it.
    joined = 2 - (backend.rounds_in_flight - 1)
    assert outputs[1] == continuation(continuation(3, 12)[-1], len(outputs[1])) and len(outputs[1]) == 1 + joined * BLOCK_SIZE


def test_a_stopped_row_emits_nothing_and_stays_at_the_front(scripted: Built, backend: OrtCpuBackend) -> None:
    plan = Plan(scripted.bundle, backend, num_rows=2)
    loop = SpeculativeLoop(plan, BlockDrafter(plan, 1))
    stats = _stats(plan, 1)
    loop.start(0, [4, 5], stats)
    loop.start(1, [6], stats)
    loop.round(stats)
    plan.stop(1)
    state = [buffer.read()[1] for buffer in (plan.buffers.anchor, plan.buffers.predecessor, plan.buffers.position)]
    assert state[2] == 0
    for _ in range(3):
        assert loop.round(stats).num_emitted[1] == 0
    assert [buffer.read()[1] for buffer in (plan.buffers.anchor, plan.buffers.predecessor, plan.buffers.position)] == state


def test_rounds_freeze_before_the_end_of_the_caches(scripted: Built, backend: OrtCpuBackend) -> None:
    # A host that never stops a row: positions stay within the caches, whatever it does.
    plan = Plan(scripted.bundle, backend)
    loop = SpeculativeLoop(plan, BlockDrafter(plan, 3))
    stats = _stats(plan, 3)
    loop.start(0, [1], stats)
    emitted = [int(loop.round(stats).num_emitted[0]) for _ in range(40)]
    assert emitted[-1] == 0
    cache_rows = scripted.bundle.manifest.cache_rows
    assert CAPACITY <= int(plan.buffers.position.read()[0]) <= cache_rows
    assert 1 + sum(emitted) >= CAPACITY


def test_plain_rounds_of_a_batch(scripted: Built, backend: OrtCpuBackend) -> None:
    plan = Plan(scripted.bundle, backend, num_rows=2)
    loop = PlainLoop(plan)
    stats = _stats(plan, None)
    outputs = [[loop.start(row, prompt, stats)] for row, prompt in enumerate(([3], continuation(3, 9)))]
    for _ in range(5):
        committed = loop.round(stats)
        np.testing.assert_array_equal(committed.num_emitted, [1, 1])
        for row in range(2):
            outputs[row].append(int(committed.tokens[row, 0]))
    assert outputs == [continuation(3, 6), continuation(continuation(3, 9)[-1], 6)]


def test_drafts_before_and_after_refinement(scripted: Built) -> None:
    plan = Plan(scripted.bundle, OrtCpuBackend(threads=1))
    loop = SpeculativeLoop(plan, BlockDrafter(plan, 3))
    first = loop.start(0, [10], _stats(plan, 3))
    loop.round(_stats(plan, 3))
    before, after = plan.drafts()
    assert before.tolist() == [[SEED_TOKEN] * (BLOCK_SIZE - 1)]
    assert after.tolist() == [continuation(first, BLOCK_SIZE - 1)]


def test_caches_grow_with_the_text_and_shrink_with_the_next(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("long")
    built = build(*write_scripted(folder), folder / "bundle", num_passes=(3,), capacity=500, prefill_chunk=64)
    with Session(built.bundle, open_backend("ort-cpu", threads=1)) as session:
        for length, max_new_tokens in ((1, 499), (300, 199), (2, 20), (499, 1), (240, 30)):
            prompt = continuation(1, length)
            for config in (GenerationConfig(max_new_tokens), GenerationConfig(max_new_tokens, speculation="off")):
                assert list(session.generate(prompt, config).tokens) == continuation(prompt[-1], max_new_tokens)


def test_a_long_row_keeps_its_caches_while_another_joins(tmp_path_factory: pytest.TempPathFactory) -> None:
    # Attention must reach back to the first token: the conformance target does, the scripted one does not, so this one compares caches.
    folder = tmp_path_factory.mktemp("grow")
    built = build(*write_scripted(folder), folder / "bundle", num_passes=(3,), capacity=500, prefill_chunk=64)
    plan = Plan(built.bundle, open_backend("ort-cpu", threads=1), num_rows=2)
    loop = SpeculativeLoop(plan, BlockDrafter(plan, 3))
    stats = _stats(plan, 3)
    loop.start(0, continuation(5, 235), stats)
    before = plan.cached(0, 235)
    while int(plan.buffers.position.read()[0]) < 300:
        loop.round(stats)
    loop.start(1, [9], stats)
    for name, rows in plan.cached(0, 235).items():
        np.testing.assert_array_equal(rows, before[name], err_msg=name)
