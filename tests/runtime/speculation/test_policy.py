"""The policy's contract: what its choices may depend on, degenerate input, rounds in flight, its books."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.runtime.speculation.simulation import CPU, GPU, Machine, Text, alternating, constant, simulate
from xpress_runtime.speculation import SpeculationPolicy, StageCosts

WIDTHS = [tuple(range(1, 9)), (1, 8), (1, 4, 8), (2, 3, 7), (8,)]


def _costs(block_size: int = 8) -> StageCosts:
    return StageCosts.calibrated(5e-3, {1: 20e-3, block_size: 20e-3 + 1.2e-3 * (block_size - 1)}, block_size=block_size)


def _with_history(widths: Sequence[int], seed: int) -> SpeculationPolicy:
    """A policy that was just told to draft, after as many rounds of some kind as ``seed`` says."""
    machine = replace(CPU, widths=widths)
    policy = machine.policy()
    level = float(np.random.default_rng(seed).uniform(0.3, 0.95))
    simulate(policy, machine, Text(constant(level, spread=2.0), 7, 5 * seed + 1, seed))
    while not policy.begin():
        policy.record_plain(20e-3)
    return policy


# Exactness at T > 0.


def _depends_on_later_slots(policy: SpeculationPolicy, width_of: Callable[[SpeculationPolicy, list[float]], int], seed: int) -> bool:
    """Whether changing confidences from some slot on ever changes which of the slots before it are verified."""
    rng = np.random.default_rng(seed)
    for _ in range(20):
        confidence = rng.beta(1, 1, 7).tolist()
        width = width_of(copy.deepcopy(policy), confidence)
        for num_kept in range(8):
            changed = confidence[:num_kept] + rng.choice([0.0, 0.02, 0.5, 0.98, 1.0], 7 - num_kept).tolist()
            other = width_of(copy.deepcopy(policy), changed)
            if min(width - 1, num_kept) != min(other - 1, num_kept):
                return True
    return False


@pytest.mark.parametrize("widths", WIDTHS)
def test_whether_a_slot_is_verified_depends_on_no_later_confidence(widths: tuple[int, ...]) -> None:
    for seed in range(12):
        assert not _depends_on_later_slots(_with_history(widths, seed), SpeculationPolicy.width, seed)


def test_a_width_that_looks_at_later_slots_is_caught() -> None:
    def of_the_whole_block(_: SpeculationPolicy, confidence: list[float]) -> int:
        return 1 + round(sum(confidence))

    def one_slot_ahead(policy: SpeculationPolicy, confidence: list[float]) -> int:
        return policy.width([*confidence[1:], confidence[0]])

    for cheat in (of_the_whole_block, one_slot_ahead):
        assert _depends_on_later_slots(_with_history(range(1, 9), 5), cheat, 5)


def test_confidences_do_matter_where_they_are_seen_and_only_there() -> None:
    sees = _with_history(range(1, 9), 5)
    assert copy.deepcopy(sees).width([0.01] * 7) < copy.deepcopy(sees).width([0.99] * 7)
    blind = SpeculationPolicy(8, range(1, 9), False, _costs())
    assert blind.begin()
    assert copy.deepcopy(blind).width([0.01] * 7) == copy.deepcopy(blind).width([0.99] * 7) == copy.deepcopy(blind).width(None)


def test_equal_histories_give_equal_choices() -> None:
    text = Text(alternating(constant(0.05), constant(0.9), 40), 7, 400, 0)
    first, second = CPU.policy(), CPU.policy()
    assert simulate(first, CPU, text, request=100) == simulate(second, CPU, text, request=100)
    assert first.explain() == second.explain()


# Widths.


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("level", [0.05, 0.5, 0.95])
def test_only_allowed_widths_are_chosen(widths: tuple[int, ...], level: float) -> None:
    machine = replace(CPU, widths=widths)
    policy = machine.policy()
    simulate(policy, machine, Text(constant(level, spread=2.0), 7, 400, 0))
    assert policy.counts.drafted > 0
    assert set(policy.counts.widths) <= set(widths)


@pytest.mark.parametrize("block_size", [1, 2, 8])
def test_where_no_proposal_may_be_verified_nothing_is_drafted(block_size: int) -> None:
    policy = SpeculationPolicy(block_size, [1], True, _costs(block_size))
    for _ in range(50):
        assert not policy.begin()
        policy.record_plain(20e-3)
    assert policy.counts.plain == 50


@pytest.mark.parametrize(("level", "drafts"), [(0.02, False), (0.95, True)])
def test_blocks_of_two_slots_work(level: float, drafts: bool) -> None:
    machine = replace(CPU, block_size=2, widths=(1, 2))
    run = simulate(machine.policy(), machine, Text(constant(level, num_proposals=1), 1, 400, 0))
    assert (run.drafted_share(50, 400) > 0.5) == drafts


@pytest.mark.parametrize(("block_size", "widths"), [(8, []), (8, [0, 8]), (8, [1, 9]), (7, [1, 7])])
def test_widths_that_the_costs_do_not_cover_are_refused(block_size: int, widths: list[int]) -> None:
    with pytest.raises(ValueError, match="expected 1 to"):
        SpeculationPolicy(block_size, widths, True, _costs())


# Broken measurements.


@pytest.mark.parametrize("broken", [0.0, float("nan"), float("inf"), -1.0])
def test_broken_times_do_not_change_what_is_chosen_for_long(broken: float) -> None:
    policy = CPU.policy()
    for index in range(40):
        if policy.begin():
            width = policy.width([0.9] * 7)
            policy.record_round(width, width - 1, [0.9] * 7, broken, broken)
        else:
            policy.record_plain(broken)
        assert all(np.isfinite(policy._costs.verify())), index
    run = simulate(policy, CPU, Text(constant(0.02), 7, 600, 0))
    assert run.drafted_share(200, 600) < 0.15


def test_a_clock_that_shows_nothing_is_no_error() -> None:
    policy = SpeculationPolicy(8, range(1, 9), True, StageCosts.calibrated(0.0, {1: 0.0, 8: 0.0}, block_size=8))
    with np.errstate(all="raise", under="ignore"):
        for accepted in (0, 7) * 20:
            if policy.begin():
                policy.record_round(policy.width([0.5] * 7), accepted, [0.5] * 7, 0.0, 0.0)
            else:
                policy.record_plain(0.0)
    assert policy.counts.drafted > 0


def test_a_stall_in_one_try_does_not_end_trying() -> None:
    policy = GPU.policy()
    simulate(policy, replace(GPU, rounds_in_flight=1), Text(constant(1e-3, num_proposals=15), 15, 300, 0))
    while not policy.begin():
        policy.record_plain(6e-3)
    policy.record_round(policy.width(None), 0, None, 1.5e-3, 1.0)
    tries = policy.counts.tries
    for _ in range(60):
        if policy.begin():
            policy.record_round(policy.width(None), 0, None, 1.5e-3, 6.3e-3)
        else:
            policy.record_plain(6e-3)
    assert policy.counts.tries > tries


# Rounds in flight, and books.


@pytest.mark.parametrize("rounds_in_flight", [1, 2, 3])
def test_rounds_may_be_begun_before_earlier_ones_are_recorded(rounds_in_flight: int) -> None:
    machine: Machine = replace(GPU, rounds_in_flight=rounds_in_flight)
    policy = machine.policy()
    text = Text(alternating(constant(0.02, num_proposals=15), constant(0.95, num_proposals=15), 300), 15, 600, 0)
    run = simulate(policy, machine, text)
    assert run.drafted_share(0, 300) < 0.2
    assert run.drafted_share(364, 600) > 0.9
    assert (policy.counts.plain, policy.counts.drafted) == (run.drafted.count(False), run.drafted.count(True))


def test_rounds_that_a_finished_request_leaves_behind_are_forgotten() -> None:
    policy, other = CPU.policy(), CPU.policy()
    for _ in range(3):
        assert policy.begin()
    policy.new_request()
    text = Text(constant(0.5, spread=2.0), 7, 400, 0)
    assert simulate(policy, CPU, text) == simulate(other, CPU, text)


def test_a_try_that_was_not_run_costs_nothing() -> None:
    policy = CPU.policy()
    simulate(policy, CPU, Text(constant(1e-3), 7, 300, 0))
    tries = policy.counts.tries
    for _ in range(100):
        if policy.begin():
            policy.new_request()
        else:
            policy.record_plain(20e-3)
    assert policy.counts.tries > tries + 20


def test_the_books_add_up_and_are_explained() -> None:
    policy = CPU.policy()
    run = simulate(policy, CPU, Text(alternating(constant(0.05), constant(0.9), 100), 7, 600, 0))
    counts = policy.counts
    assert counts.plain == run.drafted.count(False)
    assert counts.drafted == sum(counts.widths.values()) == run.drafted.count(True)
    assert counts.switches == sum(one != other for one, other in zip(run.drafted, run.drafted[1:], strict=False))
    assert 0 < counts.tries < counts.drafted
    assert 0 < counts.extensions < counts.drafted
    for part in (f"{counts.plain} plain steps", f"{counts.drafted} drafted rounds", f"({counts.tries} tries", "acceptance by slot 0."):
        assert part in policy.explain()
