"""What ``auto`` loses: its time per token beside the best fixed width in hindsight, on the same texts. Each bound fails a fixed policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import pytest

from tests.runtime.speculation.simulation import (
    BLIND_CPU,
    CPU,
    GPU,
    SLOWING_CPU,
    WIDE_CPU,
    Fixed,
    Machine,
    Policy,
    Process,
    Run,
    Text,
    alternating,
    best_fixed,
    constant,
    requests_of_many_kinds,
    simulate,
    total_per_token,
    useless_but_sure,
)

BOUND = 0.03
NUM_TOKENS = 1500
SEEDS = range(5)

DECAYING = [0.7 * 0.85**slot for slot in range(15)]
LOW = [0.45 * 0.9**slot for slot in range(15)]
BARELY = [0.35 * 0.9**slot for slot in range(15)]


@dataclass(frozen=True)
class Scenario:
    machine: Machine
    process: Process
    request: int | None = None


def _blocks(machine: Machine, acceptance: list[float] | float, *, spread: float = 0.0, informative: bool = True) -> Scenario:
    num_proposals = machine.block_size - 1
    cut = acceptance[:num_proposals] if isinstance(acceptance, list) else acceptance
    return Scenario(machine, constant(cut, spread=spread, informative=informative, num_proposals=num_proposals))


def _regimes(machine: Machine, good: float, *, informative: bool) -> Scenario:
    one, other = (_blocks(machine, level, informative=informative).process for level in (0.02, good))
    return Scenario(machine, alternating(one, other, 100))


SCENARIOS = {
    "useless": _blocks(CPU, 0.02),
    "useless, confidences say nothing": _blocks(CPU, 0.02, informative=False),
    "useless, sixteen slots": _blocks(WIDE_CPU, 0.02),
    "useless, fixed shapes": _blocks(GPU, 0.02),
    "perfect": _blocks(CPU, 0.999),
    "perfect, sixteen slots": _blocks(WIDE_CPU, 0.999),
    "perfect, fixed shapes": _blocks(GPU, 0.999),
    "decaying": _blocks(CPU, DECAYING),
    "decaying, confidences say nothing": _blocks(CPU, DECAYING, informative=False),
    "decaying, blind": _blocks(BLIND_CPU, DECAYING),
    "decaying, sixteen slots": _blocks(WIDE_CPU, DECAYING),
    "decaying, fixed shapes": _blocks(GPU, DECAYING),
    "decaying, contexts slow down": _blocks(SLOWING_CPU, DECAYING),
    "varying": _blocks(CPU, DECAYING, spread=2.0),
    "low": _blocks(CPU, LOW, informative=False),
    "low, varying": _blocks(CPU, LOW, spread=2.0),
    "low, fixed shapes": _blocks(GPU, LOW),
    "barely pays": _blocks(CPU, BARELY, informative=False),
    "barely fails": _blocks(CPU, 0.27),
    "cliff": _blocks(CPU, [0.95] * 3 + [0.02] * 4, informative=False),
    "regimes": _regimes(CPU, 0.93, informative=True),
    "regimes, confidences say nothing": _regimes(CPU, 0.85, informative=False),
    "regimes, fixed shapes": _regimes(GPU, 0.93, informative=True),
    "requests of many kinds": Scenario(CPU, requests_of_many_kinds(-0.6, 125), 125),
    "requests of many kinds, mostly poor": Scenario(CPU, requests_of_many_kinds(-1.2, 125), 125),
}


@cache
def _texts(name: str) -> list[Text]:
    scenario = SCENARIOS[name]
    return [Text(scenario.process, scenario.machine.block_size - 1, NUM_TOKENS, seed) for seed in SEEDS]


@cache
def _best(name: str) -> float:
    return best_fixed(SCENARIOS[name].machine, _texts(name))[0]


@cache
def _regret_of_auto(name: str) -> float:
    return _regret(name, SCENARIOS[name].machine.policy)


def _regret(name: str, make_policy: Callable[[], Policy]) -> float:
    scenario = SCENARIOS[name]
    runs = [simulate(make_policy(), scenario.machine, text, request=scenario.request) for text in _texts(name)]
    return total_per_token(runs) / _best(name) - 1.0


@pytest.mark.parametrize("name", SCENARIOS)
def test_auto_is_within_three_percent_of_the_best_fixed_width(name: str) -> None:
    assert _regret_of_auto(name) < BOUND


@pytest.mark.parametrize("name", ["useless", "useless, sixteen slots", "useless, fixed shapes", "barely fails"])
def test_that_bound_fails_a_policy_that_always_drafts(name: str) -> None:
    assert _regret(name, partial(Fixed, SCENARIOS[name].machine.block_size)) > BOUND


@pytest.mark.parametrize("name", [name for name in SCENARIOS if not name.startswith(("useless", "barely fails", "requests"))])
def test_that_bound_fails_a_policy_that_never_drafts(name: str) -> None:
    assert _regret(name, partial(Fixed, 1)) > BOUND


@pytest.mark.parametrize("name", ["decaying", "decaying, blind", "decaying, sixteen slots", "varying", "low", "cliff", "regimes"])
def test_that_bound_fails_a_policy_that_always_verifies_the_whole_block(name: str) -> None:
    assert _regret(name, partial(Fixed, SCENARIOS[name].machine.block_size)) > BOUND


@pytest.mark.parametrize(
    ("name", "at_least"),
    [
        ("varying", 0.02),
        ("low, varying", 0.02),
        ("regimes", 0.15),
        ("regimes, confidences say nothing", 0.05),
        ("regimes, fixed shapes", 0.0),
    ],
)
def test_auto_beats_every_fixed_width_where_blocks_differ(name: str, at_least: float) -> None:
    assert _regret_of_auto(name) < -at_least


# Bounds that hold for every text, not only on average.


def _loss(machine: Machine, policy: Policy, process: Process, seed: int, num_tokens: int) -> float:
    """Over plain decoding."""
    text = Text(process, machine.block_size - 1, num_tokens, seed)
    return simulate(policy, machine, text, request=128).per_token / machine.plain - 1.0


@pytest.mark.parametrize("confidence", [0.05, 0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("machine", [CPU, WIDE_CPU, GPU], ids=["cpu", "wide cpu", "gpu"])
def test_a_useless_drafter_costs_at_most_three_percent_on_any_text_however_sure_it_is(machine: Machine, confidence: float) -> None:
    process = useless_but_sure(confidence, num_proposals=machine.block_size - 1)
    assert max(_loss(machine, machine.policy(), process, seed, 256) for seed in range(6)) < BOUND
    assert _loss(machine, machine.policy(), process, 6, 2000) < 0.02
    assert _loss(machine, Fixed(min(width for width in machine.widths if width > 1)), process, 0, 256) > BOUND


def _after_the_change(machine: Machine, policy: Policy, seed: int, before: float, after: float) -> Run:
    """A thousand tokens of one kind, then of another."""
    one, other = (constant(level, num_proposals=machine.block_size - 1, informative=False) for level in (before, after))
    return simulate(policy, machine, Text(alternating(one, other, 1000), machine.block_size - 1, 1400, seed))


@pytest.mark.parametrize("machine", [CPU, GPU], ids=["cpu", "gpu"])
def test_a_drafter_that_becomes_good_is_used_within_64_tokens(machine: Machine) -> None:
    runs = [_after_the_change(machine, machine.policy(), seed, 0.02, 0.95) for seed in range(8)]
    assert min(run.drafted_share(1064, 1400) for run in runs) > 0.95
    assert _after_the_change(machine, Fixed(1), 0, 0.02, 0.95).drafted_share(1064, 1400) < 0.95


@pytest.mark.parametrize("machine", [CPU, GPU], ids=["cpu", "gpu"])
def test_a_drafter_that_becomes_useless_is_left_within_64_tokens(machine: Machine) -> None:
    runs = [_after_the_change(machine, machine.policy(), seed, 0.95, 0.02) for seed in range(8)]
    assert max(run.drafted_share(1064, 1400) for run in runs) < 0.15
    assert _after_the_change(machine, Fixed(machine.block_size), 0, 0.95, 0.02).drafted_share(1064, 1400) > 0.15


def test_far_slots_that_become_good_are_found_again() -> None:
    far = alternating(constant([0.95] * 3 + [0.02] * 4, informative=False), constant(0.95, informative=False), 1000)
    policy = CPU.policy()
    tokens = simulate(policy, CPU, Text(far, 7, 2000, 0)).tokens
    assert max(tokens[:240]) <= 5
    assert sum(tokens[-60:]) / 60 > 5.5
