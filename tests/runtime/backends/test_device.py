"""Device memory: views, rows, host copies in any size, and the two-rounds-in-flight loop on a backend that works at once."""

from __future__ import annotations

import numpy as np
import pytest

from tests.runtime.backends.conftest import GRAPH_SET
from tests.runtime.backends.simulated_cuda import SCHEDULES, SimulatedCuda
from tests.runtime.backends.test_simulated_gpu import run_rows
from tests.scripted import continuation
from xpress_runtime.backends.device import DeviceBackend
from xpress_runtime.backends.ort_cpu import OrtCpuBackend
from xpress_runtime.bundle import Bundle
from xpress_runtime.drafters import BlockDrafter
from xpress_runtime.loop import PlainLoop, SpeculativeLoop
from xpress_runtime.plan import Plan

INT64 = np.dtype(np.int64)


@pytest.fixture(params=SCHEDULES)
def backend(request: pytest.FixtureRequest) -> DeviceBackend:
    return DeviceBackend(SimulatedCuda(request.param))


def test_memory_is_zeroed_and_views_share_it(backend: DeviceBackend) -> None:
    buffer = backend.allocate((3, 4), INT64)
    assert not buffer.read().any()
    buffer.row(1).write(np.full((1, 4), 7))
    buffer.view(2).write(np.array([1, 2]))
    np.testing.assert_array_equal(buffer.read(), [[1, 2, 0, 0], [7] * 4, [0] * 4])
    assert buffer.row(1).view(2, 2).address == buffer.address + 32
    with pytest.raises(ValueError, match="needs 104 bytes, and the buffer has 96"):
        buffer.view(13)
    with pytest.raises(ValueError, match="needs 40 bytes, and the buffer has 32"):
        buffer.row(2).view(5)
    with pytest.raises(ValueError, match="expected int64"):
        buffer.write(np.zeros((3, 4), np.int32))
    backend.close()


def test_host_values_of_any_size_arrive_and_may_change_at_once(backend: DeviceBackend) -> None:
    large = backend.allocate((400_000,), INT64)
    small = [backend.allocate((3, 1000), INT64) for _ in range(100)]
    values = np.arange(400_000)
    large.write(values)
    values[:] = -1
    for index, buffer in enumerate(small):
        values = np.full((3, 1000), index)
        buffer.write(values)
        values[:] = -1
    np.testing.assert_array_equal(large.read(), np.arange(400_000))
    assert [int(buffer.read()[2, 999]) for buffer in small] == list(range(100))
    backend.close()


def test_copies_are_in_order(backend: DeviceBackend) -> None:
    source, destination = backend.allocate((2,), INT64), backend.allocate((2,), INT64)
    source.write(np.array([1, 2]))
    backend.copy(source, destination)
    source.write(np.array([3, 4]))
    np.testing.assert_array_equal(destination.read(), [1, 2])
    with pytest.raises(ValueError, match="a copy from 16 bytes to 8"):
        backend.copy(source, destination.view(1))
    backend.close()
    backend.close()


class TwoRounds(OrtCpuBackend):
    rounds_in_flight = 2


def test_two_rounds_in_flight_on_the_cpu(scripted: Bundle) -> None:
    plan = Plan(scripted, TwoRounds(1, GRAPH_SET), num_rows=3)
    prompts = [[2], continuation(8, 11), continuation(20, 5), continuation(14, 6)]
    for loop in (SpeculativeLoop(plan, BlockDrafter(plan, 3)), PlainLoop(plan)):
        first, restarted, third, stopped = run_rows(plan, loop, prompts, 12)
        for prompt, tokens in zip(prompts, (first, stopped, third, restarted), strict=True):
            assert tokens == continuation(prompt[-1], len(tokens))
        for row in range(3):
            plan.stop(row)
