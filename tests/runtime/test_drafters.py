"""Every drafter on a trained target: greedy output is plain decoding's, and a drafter that slept knows what a wakeful one would."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.conftest import CONFORMANCE, Built, build
from xpress_runtime.auto import AutoLoop
from xpress_runtime.backends.ort_cpu import OrtCpuBackend
from xpress_runtime.backlog import Backlog
from xpress_runtime.drafters import AutoregressiveDrafter, BlockDrafter, Drafter, LookupDrafter
from xpress_runtime.drafters.block import slots_filled
from xpress_runtime.errors import OptionError
from xpress_runtime.generation import GenerationConfig
from xpress_runtime.loop import GREEDY, SpeculativeLoop
from xpress_runtime.plan import Plan
from xpress_runtime.session import Session
from xpress_runtime.stats import GenerationStats

CASE = CONFORMANCE / "qwen3-b4"
BLOCK_SIZE = 4
CAPACITY = 100
PROMPTS = [[5, 9, 2], [7], [1, 2, 3, 4, 1, 2, 3, 4, 1, 2], [11, 12, 13, 14, 15, 16, 17]]
DRAFTERS: list[dict[str, Any]] = [
    {},
    {"num_passes": 0},
    {"num_passes": 1, "shortlist": 8},
    {"draft_steps": 2},
    {"draft_steps": 3, "num_passes": 0},
    {"drafter": "autoregressive"},
    {"drafter": "lookup"},
]
MODES = [*DRAFTERS, *({**drafter, "speculation": "auto"} for drafter in DRAFTERS)]


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A conformance case with sampling, two shortlists, and the target's first two layers as a draft model."""
    output = tmp_path_factory.mktemp("drafted") / "bundle"
    options = {"num_passes": (3, 1), "shortlists": (0, 8), "capacity": CAPACITY, "prefill_chunk": 6}
    return build(CASE / "target", CASE / "xpress", output, sampling=True, draft_layers=(0, 1), **options)


@pytest.fixture(scope="module")
def session(drafted: Built) -> Iterator[Session]:
    with Session(drafted.bundle, OrtCpuBackend(threads=1)) as session:
        yield session


def tokens(session: Session, prompt: Sequence[int], max_new_tokens: int = 40, **fields: Any) -> tuple[int, ...]:
    return session.generate(list(prompt), GenerationConfig(max_new_tokens, ignore_stop=True, **fields)).tokens


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_greedy_output_is_plain_decodings(session: Session, mode: dict[str, Any]) -> None:
    for prompt in PROMPTS:
        assert tokens(session, prompt, **mode) == tokens(session, prompt, speculation="off")


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_output_ends_where_it_should(session: Session, mode: dict[str, Any]) -> None:
    prompt = PROMPTS[0]
    for max_new_tokens in (1, 2, BLOCK_SIZE, BLOCK_SIZE + 1, 1000):
        result = session.generate(prompt, GenerationConfig(max_new_tokens, ignore_stop=True, **mode))
        assert len(result.tokens) == min(max_new_tokens, CAPACITY - len(prompt))
        assert sum(result.stats.kept_lengths) == len(result.tokens) - 1
        assert len(result.stats.proposals) == result.stats.rounds
        assert all(
            accepted <= proposed + 1 for accepted, proposed in zip(result.stats.acceptance_lengths, result.stats.proposals, strict=True)
        )


def test_drafters_accept_some_drafts_and_not_all(session: Session) -> None:
    expected = json.loads((CASE / "expected.json").read_text(encoding="utf-8"))
    for mode in DRAFTERS:
        results = [session.generate(each["prompt"], GenerationConfig(40, ignore_stop=True, **mode)) for each in expected["prompts"]]
        rate = sum(result.stats.accepted for result in results) / sum(result.stats.proposed for result in results)
        assert 0.02 < rate < 0.98, mode


def test_statistics_say_what_drafted(session: Session) -> None:
    for mode, expected in (
        ({}, ("on", "block", 3, 0, 1)),
        ({"num_passes": 1, "shortlist": 8}, ("on", "block", 1, 8, 1)),
        # Three slots are filled in three steps, whatever more is asked for.
        ({"draft_steps": 10, "num_passes": 0}, ("on", "block", 0, 0, 3)),
        ({"drafter": "lookup", "speculation": "auto"}, ("auto", "lookup", None, None, None)),
        ({"speculation": "off"}, ("off", None, None, None, None)),
    ):
        stats = session.generate([5], GenerationConfig(5, **mode)).stats
        assert (stats.speculation, stats.drafter, stats.num_passes, stats.shortlist, stats.draft_steps) == expected


def test_steps_that_fill_nothing_are_left_out() -> None:
    assert slots_filled(7, 1) == (7,)
    assert slots_filled(7, 2) == (4, 7)
    assert slots_filled(15, 10) == (2, 3, 5, 6, 8, 9, 11, 12, 14, 15)
    assert slots_filled(7, 7) == slots_filled(7, 10) == slots_filled(7, 1000) == (1, 2, 3, 4, 5, 6, 7)


class ScriptedPolicy:
    """Drafts or not, and how wide, as a list says, over and over."""

    def __init__(self, widths: Sequence[int | None]) -> None:
        self._widths = widths
        self._rounds = -1

    def new_request(self) -> None:
        self._rounds = -1

    def begin(self) -> bool:
        self._rounds += 1
        return self._widths[self._rounds % len(self._widths)] is not None

    def width(self, confidence: Sequence[float] | None) -> int:
        assert confidence is not None and all(0 <= value <= 1.0001 for value in confidence)
        width = self._widths[self._rounds % len(self._widths)]
        assert width is not None
        return width

    def record_plain(self, seconds: float) -> None:
        assert seconds > 0

    def record_round(self, *_arguments: Any) -> None: ...


def _drafter(kind: str, plan: Plan, backlog: Backlog | None = None) -> Drafter:
    if kind == "lookup":
        return LookupDrafter(plan)
    if kind == "autoregressive":
        return AutoregressiveDrafter(plan)
    return BlockDrafter(plan, 3, draft_steps=2 if kind == "steps" else 1, backlog=backlog)


# So many plain steps that the backlog runs over (a chunk of 6 tokens, a block of 4).
SCRIPTS = [[4], [None, 4], [2, 1, 3, 4], [None] * 3 + [3], [None] * 11 + [4, None, 2]]


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
@pytest.mark.parametrize("kind", ["block", "steps", "autoregressive", "lookup"])
def test_after_plain_steps_a_drafter_drafts_as_if_it_had_been_awake(drafted: Built, kind: str, script: list[int | None]) -> None:
    """Each block is the one that a drafter gives for the same text as a prompt."""
    plan, fresh = Plan(drafted.bundle, OrtCpuBackend(threads=1)), Plan(drafted.bundle, OrtCpuBackend(threads=1))
    backlog = plan.part(Backlog) if kind in ("block", "steps") else None
    loop = AutoLoop(plan, _drafter(kind, plan, backlog), GREEDY, backlog, ScriptedPolicy(script))  # type: ignore[arg-type]
    reference = SpeculativeLoop(fresh, _drafter(kind, fresh))
    stats = GenerationStats(0, BLOCK_SIZE - 1, 3)
    text = [*PROMPTS[2], loop.start(0, PROMPTS[2], stats)]
    num_blocks = 0
    for _ in range(24):
        before = list(text)
        committed = loop.round(stats)
        text += committed.tokens[0, : committed.num_emitted[0]].tolist()
        if script[loop.policy._rounds % len(script)] is None:  # type: ignore[attr-defined]
            assert committed.width == committed.num_emitted[0] == 1
            continue
        block = plan.buffers.verify_ids.read()[0].tolist()
        assert reference.start(0, before[:-1], stats) == before[-1]
        reference.round(stats)
        assert block == fresh.buffers.verify_ids.read()[0].tolist()
        num_blocks += 1
    assert num_blocks == sum(script[index % len(script)] is not None for index in range(24))


def test_repetition_penalty_is_transformers(session: Session, drafted: Built) -> None:
    from transformers import AutoModelForCausalLM
    from transformers import GenerationConfig as TheirConfig

    model: Any = AutoModelForCausalLM.from_pretrained(drafted.target.location.path, dtype=torch.float32)
    for rate in (1.3, 0.8):
        config = TheirConfig(do_sample=False, max_new_tokens=30, repetition_penalty=rate, eos_token_id=None, pad_token_id=0)
        for prompt in PROMPTS:
            ids = torch.tensor([prompt])
            expected = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[0, len(prompt) :].tolist()
            for mode in ({"speculation": "off"}, {}, {"drafter": "lookup"}, {"speculation": "auto"}):
                assert list(tokens(session, prompt, 30, repetition_penalty=rate, **mode)) == expected
        assert expected != list(tokens(session, PROMPTS[-1], 30))


@pytest.mark.parametrize("mode", [*DRAFTERS, {"speculation": "off"}], ids=str)
def test_a_seed_gives_the_same_text_again(session: Session, mode: dict[str, Any]) -> None:
    settings = {"temperature": 1.2, "top_p": 0.95, "top_k": 30, "presence_penalty": 0.3, **mode}
    first = session.generate([5, 9], GenerationConfig(30, ignore_stop=True, seed=11, **settings))
    assert first.stats.seed == 11
    assert tokens(session, [5, 9], 30, seed=11, **settings) == first.tokens
    assert len({tokens(session, [5, 9], 30, seed=seed, **settings) for seed in range(6)}) > 3


def test_without_a_seed_one_is_drawn_and_told(session: Session) -> None:
    results = [session.generate([5], GenerationConfig(20, temperature=1.0, ignore_stop=True)) for _ in range(3)]
    seeds = [result.stats.seed for result in results]
    assert len(set(seeds)) == 3
    assert tokens(session, [5], 20, temperature=1.0, seed=seeds[1]) == results[1].tokens


def test_the_coldest_temperature_is_greedy(session: Session) -> None:
    for mode in DRAFTERS:
        assert tokens(session, PROMPTS[2], temperature=1e-6, seed=1, **mode) == tokens(session, PROMPTS[2])


@pytest.mark.parametrize(
    "fields, complaint",
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": 1e-9}, "temperature is 1e-09, expected a number of 0 or from 1e-6"),
        ({"temperature": 1e6}, "temperature is 1000000.0"),
        ({"temperature": 10**400}, "expected a number of 0 or from 1e-6 to 100"),
        ({"top_k": 2**63}, "top_k is 9223372036854775808"),
        ({"temperature": "1"}, "temperature is '1'"),
        ({"top_p": 0}, "top_p is 0, expected a number over 0 and at most 1"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_k": 0}, "top_k is 0"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty is 1e-40"),
        ({"presence_penalty": 3}, "presence_penalty is 3"),
        ({"frequency_penalty": math.nan}, "frequency_penalty is nan"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"seed": True}, "seed is True"),
        ({"draft_steps": 0}, "draft_steps is 0"),
        ({"num_passes": 2}, "num_passes is 2, and the bundle was built for 0, 1, 3"),
        ({"shortlist": 7}, "shortlist is 7, and the bundle was built for 0, 8"),
        ({"shortlist": 8, "num_passes": 0}, "shortlist is 8, and without refinement passes"),
        ({"drafter": "oracle"}, "drafter is 'oracle'"),
        ({"drafter": "lookup", "num_passes": 1}, "num_passes is 1, and drafter lookup has none"),
        ({"drafter": "lookup", "speculation": "off"}, "drafter is lookup, and speculation is off"),
        ({"draft_steps": 2, "speculation": "off"}, "draft_steps is 2, and speculation is off"),
    ],
)
def test_settings_that_are_refused(session: Session, fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(OptionError) as caught:
        session.generate([5], GenerationConfig(4, **fields))
    assert complaint in str(caught.value)


def test_what_a_bundle_was_built_without(tiny: Built) -> None:
    with Session(tiny.bundle, OrtCpuBackend(threads=1)) as session:
        for settings in ({"temperature": 1.0}, {"repetition_penalty": 1.1}, {"temperature": 0.5, "speculation": "off"}):
            with pytest.raises(OptionError, match="built without sampling"):
                session.generate([5], GenerationConfig(4, **settings))
        with pytest.raises(OptionError, match="no autoregressive drafter"):
            session.generate([5], GenerationConfig(4, drafter="autoregressive"))
        assert session.generate([5], GenerationConfig(4)).tokens
