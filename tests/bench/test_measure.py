"""Order, warm-up and seeds of a run, on a session that generates nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.bench.synthetic import manifest, prompts, result
from xpress_export.bench.measure import check_modes, measure, num_steps
from xpress_export.bench.modes import ModePlan, plan_modes
from xpress_runtime.errors import OptionError
from xpress_runtime.generation import GenerationConfig, GenerationResult


@dataclass
class FakeSession:
    """Remembers what it was asked for."""

    calls: list[tuple[tuple[int, ...], GenerationConfig]] = field(default_factory=list)
    checked: list[GenerationConfig] = field(default_factory=list)
    backend: Any = None

    def generate(self, prompt: Sequence[int], config: GenerationConfig) -> GenerationResult:
        self.calls.append((tuple(prompt), config))
        return result([1])

    def stream(self, prompt: Sequence[int], config: GenerationConfig) -> None:  # noqa: ARG002
        self.checked.append(config)
        if config.num_passes == 4:
            raise OptionError("num_passes is 4, and the bundle was built for 2")


def planned(temperature: float = 0.0, **options: Any) -> ModePlan:
    return plan_modes(manifest(), GenerationConfig(64, temperature=temperature, seed=10), groups=["A", "L", "D"], **options)


def run(plan: ModePlan, **options: Any) -> tuple[FakeSession, list[Any]]:
    session = FakeSession()
    return session, measure(session, prompts(["x"], each=4), plan.modes, **options)  # type: ignore[arg-type]


def test_every_mode_is_warmed_up_briefly_before_anything_counts() -> None:
    plan = planned()
    session, jobs = run(plan)
    warm_up = session.calls[: len(plan.modes)]
    assert [config.max_new_tokens for _, config in warm_up] == [16, 16, 16]
    assert [(config.speculation, config.drafter) for _, config in warm_up] == [("off", "block"), ("on", "lookup"), ("on", "block")]
    assert all(config.max_new_tokens == 64 for _, config in session.calls[len(plan.modes) :])
    assert len(jobs) == 4 * len(plan.modes)


def test_warm_up_is_never_longer_than_what_is_measured() -> None:
    plan = plan_modes(manifest(), GenerationConfig(3), groups=["A"])
    session, _ = run(plan)
    assert session.calls[0][1].max_new_tokens == 3


def test_modes_take_turns_and_another_one_goes_first_each_time() -> None:
    _, jobs = run(planned())
    rounds = [[job.mode.name for job in jobs[first : first + 3]] for first in range(0, len(jobs), 3)]
    assert rounds[:3] == [["plain", "lookup", "steps1-k2"], ["lookup", "steps1-k2", "plain"], ["steps1-k2", "plain", "lookup"]]
    assert [jobs[first].prompt.number for first in range(0, len(jobs), 3)] == [1, 2, 3, 4]


def test_repeats_go_round_all_prompts() -> None:
    _, jobs = run(planned(), repeats=3)
    assert Counter(job.repeat for job in jobs) == {1: 12, 2: 12, 3: 12}
    assert [job.repeat for job in jobs] == sorted(job.repeat for job in jobs)
    # With 12 turns and 3 modes, each went first equally often.
    assert Counter(jobs[first].mode.name for first in range(0, 36, 3)) == {"plain": 4, "lookup": 4, "steps1-k2": 4}
    assert len({job.name for job in jobs}) == len(jobs)


def test_sampling_has_one_seed_for_all_modes_of_a_prompt_and_another_in_each_repeat() -> None:
    session, jobs = run(planned(temperature=0.8), repeats=2)
    seeds: dict[tuple[int, int], set[int | None]] = {}
    for job, (_, config) in zip(jobs, session.calls[3:], strict=True):
        seeds.setdefault((job.repeat, job.prompt.number), set()).add(config.seed)
    assert all(len(each) == 1 for each in seeds.values())
    assert len({next(iter(each)) for each in seeds.values()}) == 8
    assert seeds[1, 1] == {10}


def test_each_reported_step_was_announced() -> None:
    steps: list[str] = []
    plan = planned()
    run(plan, repeats=2, report=steps.append)
    assert len(steps) == num_steps(prompts(["x"], each=4), plan.modes, 2)
    assert steps[0] == "warm-up, plain"
    assert steps[-1] == "prompt 4 of 4, repeat 2 of 2"


def test_what_the_bundle_was_not_built_for_is_refused_before_anything_runs() -> None:
    session = FakeSession()
    with pytest.raises(OptionError, match="num_passes is 4"):
        check_modes(session, prompts()[0], planned(num_passes=4).modes)  # type: ignore[arg-type]
    assert session.calls == []
