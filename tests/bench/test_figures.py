"""Figures of a mode, against values worked out by hand."""

from __future__ import annotations

import pytest

from tests.bench.synthetic import BLOCK_SIZE, job, manifest, prompts, result
from xpress_export.bench.figures import Measurements
from xpress_export.bench.measure import Job
from xpress_export.bench.modes import plan_modes
from xpress_runtime.generation import GenerationConfig

PLAN = plan_modes(manifest(), GenerationConfig(64), groups=["A", "D"])
PLAIN, REFINED = PLAN.modes
EASY, HARD = prompts(["x"], each=2)

# Plain: 6 and 4 tokens of 10 ms. Refined: the easy prompt's 6 tokens in 2 rounds of 20 ms, the hard one's 4 in 3 of 22.
EASY_PLAIN = result([1] * 6, num_proposals=0, verify_ms=9, host_ms=1, prefill_ms=30)
HARD_PLAIN = result([1] * 4, num_proposals=0, verify_ms=9, host_ms=1, prefill_ms=50)
EASY_REFINED = result([4, 2], draft_ms=3, refine_ms=1, verify_ms=14, host_ms=2, prefill_ms=40)
HARD_REFINED = result([1, 2, 1], draft_ms=3, refine_ms=1, verify_ms=16, host_ms=2, prefill_ms=60)


def measured(extra: tuple[Job, ...] = ()) -> Measurements:
    jobs = [job(EASY, PLAIN, EASY_PLAIN), job(EASY, REFINED, EASY_REFINED), job(HARD, REFINED, HARD_REFINED), job(HARD, PLAIN, HARD_PLAIN)]
    return Measurements([EASY, HARD], PLAN.modes, [*jobs, *extra])


def test_time_and_speed_are_pooled() -> None:
    made = measured().figures(REFINED.name)
    # 2 × 20 + 3 × 22 ms for 10 tokens, where plain decoding takes 100 ms.
    assert made.tokens == 10
    assert made.ms_per_token is not None
    assert made.ms_per_token.value == pytest.approx(10.6)
    assert made.tokens_per_second == pytest.approx(1e3 / 10.6)
    assert made.ms_per_round == pytest.approx(106 / 5)
    assert made.break_even == pytest.approx(106 / 5 / 10)
    assert made.speedup is not None
    assert made.speedup.value == pytest.approx(100 / 106)
    assert made.time_to_first_token_ms == pytest.approx(50)


def test_speed_by_prompt_is_paired() -> None:
    made = measured().figures(REFINED.name)
    easy, hard = 60 / 40, 40 / 66
    assert made.speedup_by_prompt is not None
    assert (made.speedup_by_prompt.low, made.speedup_by_prompt.high) == (pytest.approx(hard), pytest.approx(easy))
    assert made.speedup_by_prompt.mean == pytest.approx((easy + hard) / 2)
    assert made.speedup_geometric_mean is not None
    assert made.speedup_geometric_mean.value == pytest.approx((easy * hard) ** 0.5)
    # Of two prompts, a draw of both takes the lowest and the highest.
    assert made.speedup is not None
    assert made.speedup.low == pytest.approx(hard)
    assert made.speedup.high == pytest.approx(easy)


def test_prefill_counts_end_to_end() -> None:
    made = measured().figures(REFINED.name)
    assert made.speedup_end_to_end is not None
    # Seconds per output token, the first one included: (30 + 60 + 50 + 40) / 12 over (40 + 40 + 60 + 66) / 12.
    assert made.speedup_end_to_end.value == pytest.approx(180 / 206)


def test_acceptance() -> None:
    made = measured().figures(REFINED.name)
    assert made.rounds == 5
    assert made.mean_acceptance_length is not None
    assert made.mean_acceptance_length.value == pytest.approx(10 / 5)
    assert made.mean_acceptance_length_by_prompt is not None
    assert made.mean_acceptance_length_by_prompt.high == pytest.approx(3)
    assert made.mean_acceptance_length_by_prompt.low == pytest.approx(4 / 3)
    assert (made.accepted, made.proposed) == (5, 5 * (BLOCK_SIZE - 1))
    assert made.acceptance_rate == pytest.approx(5 / 35)
    assert made.acceptance_by_position == pytest.approx((3 / 5, 1 / 5, 1 / 5, 0, 0, 0, 0))
    assert made.acceptance_lengths == {1: 2, 2: 2, 4: 1}
    assert made.width_counts == {7: 5}


def test_a_slot_counts_only_in_rounds_that_verified_it() -> None:
    narrow = result([2, 1], draft_ms=1)
    narrow.stats.proposals[:] = [1, 0]
    jobs = [job(EASY, PLAIN, EASY_PLAIN), job(EASY, REFINED, narrow)]
    made = Measurements([EASY], PLAN.modes, jobs).figures(REFINED.name)
    assert made.acceptance_by_position[:2] == (1.0, None)
    assert made.width_counts == {0: 1, 1: 1}


def test_stages_add_up_to_the_whole() -> None:
    made = measured().figures(REFINED.name)
    assert made.stage_ms_per_round == pytest.approx({"draft": 3, "refine": 1, "verify": (28 + 48) / 5, "host": 2})
    assert made.stage_ms_per_token is not None
    assert sum(made.stage_ms_per_token.values()) == pytest.approx(10.6)


def test_plain_is_its_own_measure() -> None:
    made = measured().figures(PLAIN.name)
    assert made.speedup is not None
    assert made.speedup.value == made.speedup.low == made.speedup.high == 1
    assert made.acceptance_rate is None
    assert made.acceptance_by_position == ()
    assert made.num_same_tokens == 2


def test_same_tokens_are_counted_by_prompt() -> None:
    other = result([4, 2], tokens=(9,) * 7)
    jobs = [job(EASY, PLAIN, EASY_PLAIN), job(EASY, REFINED, other), job(HARD, PLAIN, HARD_PLAIN), job(HARD, REFINED, HARD_REFINED)]
    assert Measurements([EASY, HARD], PLAN.modes, jobs).figures(REFINED.name).num_same_tokens == 1


def test_sampled_tokens_are_not_compared() -> None:
    plan = plan_modes(manifest(), GenerationConfig(64, temperature=1.0), groups=["A", "D"])
    jobs = [job(EASY, plan.modes[0], EASY_PLAIN), job(EASY, plan.modes[1], EASY_REFINED)]
    assert Measurements([EASY], plan.modes, jobs).figures(REFINED.name).num_same_tokens is None


def test_repeats_belong_to_their_prompt() -> None:
    slower = result([4, 2], draft_ms=3, refine_ms=1, verify_ms=34, host_ms=2)
    again = [
        job(EASY, PLAIN, EASY_PLAIN, 2),
        job(EASY, REFINED, slower, 2),
        job(HARD, PLAIN, HARD_PLAIN, 2),
        job(HARD, REFINED, HARD_REFINED, 2),
    ]
    made = measured(tuple(again)).figures(REFINED.name)
    assert (made.num_prompts, made.num_jobs) == (2, 4)
    # Easy: 120 ms plain over 40 + 80; the interval still draws two prompts.
    assert made.speedup_by_prompt is not None
    assert made.speedup_by_prompt.high == pytest.approx(120 / 120)


def test_families_are_figured_alone() -> None:
    asked = prompts(["x", "y"], each=1)
    made = [(EASY_PLAIN, EASY_REFINED), (HARD_PLAIN, HARD_REFINED)]
    jobs = [job(prompt, mode, one) for prompt, pair in zip(asked, made, strict=True) for mode, one in zip(PLAN.modes, pair, strict=True)]
    measurements = Measurements(asked, PLAN.modes, jobs)
    assert measurements.families == ("x", "y")
    easy = measurements.figures(REFINED.name, "x")
    assert easy.speedup is not None
    assert easy.speedup.value == pytest.approx(1.5)
    assert easy.speedup.low is None


def test_difference_of_acceptance() -> None:
    change = measured().acceptance_difference(REFINED.name, PLAIN.name)
    assert change is not None
    assert change.value == pytest.approx(2 - 1)
    assert (change.low, change.high) == (pytest.approx(1 / 3), pytest.approx(2))


def test_a_prompt_that_ends_at_once_leaves_the_others_figures_alone() -> None:
    ended = result([], num_proposals=0), result([])
    jobs = [job(EASY, PLAIN, EASY_PLAIN), job(EASY, REFINED, EASY_REFINED), job(HARD, PLAIN, ended[0]), job(HARD, REFINED, ended[1])]
    measurements = Measurements([EASY, HARD], PLAN.modes, jobs)
    made = measurements.figures(REFINED.name)
    assert made.speedup is not None
    assert made.speedup.value == pytest.approx(1.5)
    assert measurements.speedup_of_prompt(REFINED.name, HARD) is None


def test_nothing_decoded_is_no_figure() -> None:
    jobs = [job(EASY, PLAIN, result([], num_proposals=0)), job(EASY, REFINED, result([]))]
    made = Measurements([EASY], PLAN.modes, jobs).figures(REFINED.name)
    assert (made.speedup, made.ms_per_token, made.mean_acceptance_length, made.break_even, made.stage_ms_per_token) == (None,) * 5
    assert made.tokens == made.rounds == 0
