"""A seed decides a row's tokens, whatever else is in the batch; a row of temperature 0 stays greedy among sampled ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import pytest

from xpress_runtime.backends.ort_cpu import OrtCpuBackend
from xpress_runtime.bundle import Bundle
from xpress_runtime.generation import GenerationConfig
from xpress_runtime.loop import Loop, PlainLoop, SpeculativeLoop
from xpress_runtime.loops import make_drafter
from xpress_runtime.plan import Plan
from xpress_runtime.sampling import SamplingForm
from xpress_runtime.session import Session
from xpress_runtime.stats import GenerationStats

NUM_ROWS = 4
NUM_ROUNDS = 8

DRAFTERS: dict[str, GenerationConfig] = {
    "no pass": GenerationConfig(num_passes=0),
    "one pass, shortlist, three steps": GenerationConfig(num_passes=1, draft_steps=3),
    "autoregressive": GenerationConfig(drafter="autoregressive"),
    "lookup": GenerationConfig(drafter="lookup"),
    "plain": GenerationConfig(speculation="off"),
}
# Everything that a form can have, and at once.
SAMPLED = {"temperature": 1.2, "top_k": 6, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1, "frequency_penalty": 0.1}

Request = tuple[Sequence[int], GenerationConfig]


@pytest.fixture(scope="module")
def plan(exported: Bundle) -> Plan:
    return Plan(exported, OrtCpuBackend(threads=1), NUM_ROWS)


@pytest.fixture(params=DRAFTERS)
def drafter(request: pytest.FixtureRequest) -> GenerationConfig:
    return DRAFTERS[request.param]


Tokens = list[list[int]]


def generate(plan: Plan, form: SamplingForm, requests: Mapping[int, Request]) -> dict[int, Tokens]:
    """Each row's first token, and what each round emitted; all of them have one kind of drafter. Rows without a request never start."""
    any_config = next(iter(requests.values()))[1]
    loop: Loop = PlainLoop(plan, form)
    if any_config.speculation == "on":
        loop = SpeculativeLoop(plan, make_drafter(plan, any_config, sampled=form.sampled), form)
    stats = GenerationStats(0, loop.num_proposals, None)
    outputs = {row: [[loop.start(row, prompt, stats, config)]] for row, (prompt, config) in requests.items()}
    for _ in range(NUM_ROUNDS):
        committed = loop.round(stats)
        for row, output in outputs.items():
            output.append(committed.tokens[row, : committed.num_emitted[row]].tolist())
    for row in requests:
        plan.stop(row)
    return outputs


def test_a_seeds_tokens_are_the_same_in_any_row_beside_any_others(plan: Plan, drafter: GenerationConfig) -> None:
    config = replace(drafter, **SAMPLED, seed=7)
    form = SamplingForm.of([config])
    request = ([3, 1, 4, 1, 5], config)
    alone = generate(plan, form, {0: request})[0]
    others = {row: ([6, 2, row], replace(config, seed=10 + row, temperature=0.7)) for row in (1, 2, 3)}
    assert generate(plan, form, {0: request, **others})[0] == alone
    greedy = ([2], replace(drafter, seed=7))
    others = {0: greedy, 1: ([3, 1, 4, 1, 5], replace(config, seed=8)), 3: ([5, 5], replace(config, top_p=1.0, seed=7))}
    assert generate(plan, form, {**others, 2: request})[2] == alone
    assert generate(plan, form, {3: request, 1: request}) == {1: alone, 3: alone}


def test_a_row_of_temperature_0_is_greedy_beside_sampled_ones(plan: Plan, drafter: GenerationConfig) -> None:
    prompts = {0: [3, 1, 4, 1, 5], 2: [2, 7]}
    greedy = generate(plan, SamplingForm(), {row: (prompt, replace(drafter, seed=0)) for row, prompt in prompts.items()})
    mixed = {
        row: (prompts.get(row, [6, row]), replace(drafter, seed=row, **({} if row in prompts else SAMPLED))) for row in range(NUM_ROWS)
    }
    form = SamplingForm.of(config for _, config in mixed.values())
    assert form == SamplingForm(sampled=True, penalised=True, top_k=True, top_p=True)
    tokens = generate(plan, form, mixed)
    assert {row: tokens[row] for row in prompts} == greedy


def test_seeds_give_different_tokens(plan: Plan, drafter: GenerationConfig) -> None:
    config = replace(drafter, temperature=1.0)
    texts = set()
    for first in (0, NUM_ROWS):
        requests = {row: ([3, 1, 4], replace(config, seed=first + row)) for row in range(NUM_ROWS)}
        texts |= {tuple(chain.from_iterable(output)) for output in generate(plan, SamplingForm.of([config]), requests).values()}
    assert len(texts) == 2 * NUM_ROWS


@pytest.fixture(scope="module")
def session(exported: Bundle) -> Iterator[Session]:
    with Session(exported, OrtCpuBackend(threads=1)) as opened:
        yield opened


def test_a_session_repeats_a_seed(session: Session, drafter: GenerationConfig) -> None:
    config = replace(drafter, **SAMPLED, max_new_tokens=20, seed=21)
    first = session.generate([3, 1, 4], config)
    other = session.generate([3, 1, 4], replace(config, seed=22))
    assert session.generate([3, 1, 4], config).tokens == first.tokens != other.tokens


def test_a_seed_that_was_drawn_is_told_and_repeats(session: Session, drafter: GenerationConfig) -> None:
    config = replace(drafter, temperature=1.0, max_new_tokens=20)
    results = [session.generate([3, 1, 4], config) for _ in range(3)]
    assert len({result.stats.seed for result in results}) == len({result.tokens for result in results}) == 3
    for result in results:
        assert session.generate([3, 1, 4], replace(config, seed=result.stats.seed)).tokens == result.tokens


def test_the_lowest_temperature_is_greedy(session: Session, drafter: GenerationConfig) -> None:
    config = replace(drafter, max_new_tokens=20)
    greedy = session.generate([3, 1, 4], config).tokens
    for seed in (1, 2):
        assert session.generate([3, 1, 4], replace(config, temperature=1e-6, seed=seed)).tokens == greedy
