"""Requests that share rounds get what each gets alone: however they draft, whenever they join, and whatever their neighbours do."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest

from tests.serving.conftest import CAPACITY, open_batch, plainly, some_prompts
from xpress_runtime.bundle import Bundle
from xpress_runtime.generation import GenerationConfig
from xpress_runtime.serving import Request, RoundReport
from xpress_runtime.session import Session
from xpress_runtime.speculation.shared import SharedPolicy

WAYS = [
    GenerationConfig(24, speculation="on", ignore_stop=True),
    GenerationConfig(40, speculation="on", num_passes=0, ignore_stop=True),
    GenerationConfig(33, speculation="on", num_passes=1, draft_steps=2, ignore_stop=True),
    GenerationConfig(30, speculation="auto", ignore_stop=True),
    GenerationConfig(1, speculation="auto", ignore_stop=True),
    GenerationConfig(50, speculation="auto", draft_steps=3, ignore_stop=True),
    GenerationConfig(28, speculation="off", ignore_stop=True),
    GenerationConfig(CAPACITY, speculation="on"),
    GenerationConfig(CAPACITY, speculation="auto"),
]


class Recorder:
    """What a session reports."""

    def __init__(self) -> None:
        self.rounds: list[RoundReport] = []
        self.ended: list[Request] = []

    def round(self, report: RoundReport) -> None:
        self.rounds.append(report)

    def finished(self, request: Request) -> None:
        self.ended.append(request)


def _always(answer: bool) -> Callable[..., bool]:
    return lambda _policy, _num_rows: answer


def _by_chance(_policy: SharedPolicy, _num_rows: int, random: Random = Random(5)) -> bool:  # noqa: B008, one sequence for all calls
    return random.random() < 0.4


@pytest.mark.parametrize("drafts", [_always(True), _always(False), _by_chance], ids=["drafting", "plain", "by chance"])
@pytest.mark.parametrize("slots", [1, 2, 3, 7])
def test_greedy_tokens_are_those_of_each_request_alone(
    bundle: Bundle, alone: Session, slots: int, drafts: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SharedPolicy, "drafts", drafts)
    prompts = some_prompts(27, bundle.manifest.target.vocab_size)
    recorder = Recorder()
    with open_batch(bundle, slots) as session:
        session.observe(recorder)
        requests = [session.submit(prompt, WAYS[index % len(WAYS)]) for index, prompt in enumerate(prompts)]
        results = [request.result(60) for request in requests]
    for prompt, request, result in zip(prompts, requests, results, strict=True):
        expected = alone.generate(prompt, plainly(request.config))
        assert (result.tokens, result.finish_reason) == (expected.tokens, expected.finish_reason), request.config
        assert 1 + sum(request.stats.kept_lengths) == len(result.tokens)
    assert sorted(request.id for request in recorder.ended) == sorted(request.id for request in requests)
    assert sum(sum(report.kept) for report in recorder.rounds) == sum(len(result.tokens) - 1 for result in results)
    # Drafts were accepted, and rejected.
    drafted = [request.stats for request in requests if request.config.speculation == "on"]
    assert 0 < sum(stats.accepted for stats in drafted) < sum(stats.proposed for stats in drafted)
    if slots > 1:
        assert max(report.rows for report in recorder.rounds) > 1


def test_a_request_that_drafts_accepts_what_it_accepts_alone(bundle: Bundle, alone: Session) -> None:
    config = GenerationConfig(40, ignore_stop=True)
    prompts = some_prompts(9, bundle.manifest.target.vocab_size, seed=1)
    with open_batch(bundle, 4) as session:
        others = [session.submit(prompt, GenerationConfig(60, speculation="off", ignore_stop=True)) for prompt in prompts[:2]]
        requests = [session.submit(prompt, config) for prompt in prompts]
        for prompt, request in zip(prompts, requests, strict=True):
            request.result(60)
            assert request.stats.acceptance_lengths == alone.generate(prompt, config).stats.acceptance_lengths
        for request in others:
            request.cancel()


SAMPLED = [
    GenerationConfig(20, temperature=1.0, seed=7, ignore_stop=True),
    GenerationConfig(20, temperature=0.7, top_k=5, seed=8, ignore_stop=True),
    GenerationConfig(25, temperature=1.3, top_p=0.8, seed=9, speculation="off", ignore_stop=True),
    GenerationConfig(25, temperature=0.9, repetition_penalty=1.4, frequency_penalty=0.5, seed=10, ignore_stop=True),
    GenerationConfig(25, presence_penalty=1.5, ignore_stop=True),
    GenerationConfig(22, temperature=1.0, seed=7, speculation="auto", ignore_stop=True),
    GenerationConfig(22, temperature=1.0, min_p=0.1, seed=3, num_passes=1, ignore_stop=True),
]


@pytest.mark.parametrize("slots", [2, 5])
def test_sampled_tokens_follow_from_the_seed_alone(bundle: Bundle, alone: Session, slots: int) -> None:
    vocab_size = bundle.manifest.target.vocab_size
    prompts = some_prompts(len(SAMPLED), vocab_size, seed=2)
    with open_batch(bundle, slots) as session:
        greedy = [session.submit(prompt, WAYS[index]) for index, prompt in enumerate(some_prompts(8, vocab_size, seed=3))]
        requests = [session.submit(prompt, config) for prompt, config in zip(prompts, SAMPLED, strict=True)]
        results = [request.result(60) for request in requests]
        for prompt, request in zip(some_prompts(8, vocab_size, seed=3), greedy, strict=True):
            assert request.result(60).tokens == alone.generate(prompt, plainly(request.config)).tokens
    for prompt, config, result in zip(prompts, SAMPLED, results, strict=True):
        # "auto" decodes a sampled text plainly here, so that no neighbour decides.
        expected = alone.generate(prompt, plainly(config) if config.speculation == "auto" else config)
        assert result.tokens == expected.tokens, config


def test_a_slot_forgets_how_its_last_request_sampled(bundle: Bundle, alone: Session) -> None:
    prompts = some_prompts(3, bundle.manifest.target.vocab_size, seed=4)
    sampled = GenerationConfig(10, temperature=1.5, repetition_penalty=1.8, seed=1, speculation="off", ignore_stop=True)
    greedy = GenerationConfig(30, speculation="off", ignore_stop=True)
    with open_batch(bundle, 2) as session:
        session.submit(prompts[0], sampled).result(60)
        # In the first slot, beside a sampled one.
        request = session.submit(prompts[1], greedy)
        session.submit(prompts[2], sampled).result(60)
        assert request.result(60).tokens == alone.generate(prompts[1], greedy).tokens


def test_steps_say_where_tokens_come_from(bundle: Bundle) -> None:
    prompt = some_prompts(1, bundle.manifest.target.vocab_size, seed=6)[0]
    with open_batch(bundle, 2) as session:
        request = session.submit(prompt, GenerationConfig(60, ignore_stop=True))
        steps = list(request)
        plain = list(session.submit(prompt, GenerationConfig(10, speculation="off", ignore_stop=True)))
    assert [token.id for step in steps for token in step.tokens] == list(request.tokens)
    first, *rounds = steps
    assert (first.proposed, first.tokens[0].origin) == (0, "target")
    for step in rounds[:-1]:
        assert step.tokens[-1].origin == "target"
        assert step.accepted == len(step.tokens) - 1
        assert all(token.origin in {"drafter", "refiner"} for token in step.tokens[:-1])
    assert {token.origin for step in rounds for token in step.tokens} == {"drafter", "refiner", "target"}
    assert {token.origin for step in plain for token in step.tokens} == {"target"}


def test_no_running_text_waits_longer_than_two_rounds_and_a_chunk(bundle: Bundle) -> None:
    """Rounds of both kinds run and long prompts are read: a running text has a step in every tick."""
    vocab_size = bundle.manifest.target.vocab_size
    prompts = some_prompts(6, vocab_size, seed=8)
    with open_batch(bundle, 5) as session:
        ticks: list[list[int]] = []
        real = session._scheduler.tick

        def tick() -> None:
            scheduler = session._scheduler
            before = [slot for slot in scheduler.slots if slot is not None and slot.reader is None and slot.request.wanted]
            counts = [slot.request.stats.rounds for slot in before]
            real()
            ticks.append([slot.request.stats.rounds - count for slot, count in zip(before, counts, strict=True)])

        session._scheduler.tick = tick  # type: ignore[method-assign]
        ways = [GenerationConfig(60, ignore_stop=True), GenerationConfig(60, speculation="off", ignore_stop=True)]
        requests = [session.submit(prompt, ways[index % 2]) for index, prompt in enumerate(prompts)]
        for request in requests:
            request.result(60)
    assert all(advanced == 1 for tick_ in ticks for advanced in tick_)
    assert max(len(tick_) for tick_ in ticks) > 2


def test_caches_that_are_read_stay_as_they_are_beside_running_rows(bundle: Bundle) -> None:
    """A prompt of many chunks is read while another row decodes; its cached keys are those of the same prompt read alone."""
    vocab_size = bundle.manifest.target.vocab_size
    long = [index % vocab_size for index in range(3, 103)]
    cached = []
    for neighbour in (False, True):
        with open_batch(bundle, 2) as session:
            if neighbour:
                running = session.submit([5, 6], GenerationConfig(100, ignore_stop=True))
                next(iter(running))
            request = session.submit(long, GenerationConfig(20, speculation="on", ignore_stop=True))
            steps = iter(request)
            next(steps)
            request.result(60)
            plan = session._scheduler._plan
            cached.append(plan.cached(1 if neighbour else 0, len(long)))
    alone, beside = cached
    for name in alone:
        # The same numbers in another order of threads and rows.
        np.testing.assert_allclose(beside[name], alone[name], rtol=0, atol=1e-5, err_msg=name)
