"""Penalties and filters against the reference that sorts, one row and one position at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from tests.models.close import assert_close
from tests.sampling import reference
from xpress_export.models.processors import REMOVED, Count, Penalise, TopK, TopP
from xpress_runtime.generation import GenerationConfig

VOCAB_SIZE = 61
NUM_POSITIONS = 4
OFF = GenerationConfig(temperature=1.0)

TOP_K, TOP_P = TopK(), TopP()


def random_logits(*shape: int, spread: float = 3.0, seed: int = 0) -> Tensor:
    return spread * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def filtered(logits: Tensor, configs: Sequence[GenerationConfig]) -> Tensor:
    """Both filters in the order of a round, one config for each row of logits [B, W, V]."""
    inverse = column([1 / config.temperature for config in configs])
    top_k = torch.tensor([config.top_k or logits.shape[2] for config in configs])
    top_p, min_p = (column([getattr(config, name) for config in configs]) for name in ("top_p", "min_p"))
    result: Tensor = TOP_P(TOP_K(logits, inverse, top_k), inverse, top_p, min_p)
    return result


def assert_kept(logits: Tensor, configs: Sequence[GenerationConfig]) -> None:
    """What is kept is as it was, and it is what the reference keeps, with top_p to the 6 digits that fp32 sums have."""
    result = filtered(logits, configs)
    kept = result > REMOVED
    assert torch.equal(result[kept], logits[kept])
    assert (result[~kept] == REMOVED).all()
    for row, config in enumerate(configs):
        for position in range(logits.shape[1]):
            exact, found = logits[row, position].double().numpy(), kept[row, position].numpy()
            least, most = (reference.kept(exact, replace(config, top_p=min(config.top_p * scale, 1))) for scale in (1 - 1e-6, 1 + 1e-6))
            assert (least <= found).all() and (found <= most).all(), (config, position)


FILTERS = [
    OFF,
    *(replace(OFF, top_k=top_k) for top_k in (1, 2, 5, VOCAB_SIZE - 1, VOCAB_SIZE, 10 * VOCAB_SIZE)),
    *(replace(OFF, top_p=top_p) for top_p in (1e-6, 0.1, 0.5, 0.9, 0.999)),
    *(replace(OFF, min_p=min_p) for min_p in (1e-4, 0.05, 0.5, 1.0)),
    replace(OFF, top_k=12, top_p=0.9),
    replace(OFF, top_k=3, top_p=0.5, min_p=0.3),
    replace(OFF, top_p=0.95, min_p=0.1),
]


@pytest.mark.parametrize(("temperature", "spread"), [(0.3, 1.0), (1.0, 1.0), (1.0, 3.0), (2.0, 0.5), (2.0, 3.0)])
def test_filters_equal_the_reference(temperature: float, spread: float) -> None:
    configs = [replace(config, temperature=temperature) for config in FILTERS]
    for seed in range(5):
        assert_kept(random_logits(len(configs), NUM_POSITIONS, VOCAB_SIZE, spread=spread, seed=seed), configs)


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 5000])
def test_filters_of_other_vocabularies(vocab_size: int) -> None:
    assert_kept(random_logits(len(FILTERS), 2, vocab_size, seed=1), FILTERS)


@pytest.mark.parametrize("spread", [20.0, 400.0])
def test_tokens_far_below_the_best_weigh_nothing(spread: float) -> None:
    """Limits are looked for above exp(-30) of the best token: what is left below changes no probability."""
    configs = [replace(config, temperature=temperature) for config in FILTERS for temperature in (0.1, 1.0)]
    logits = random_logits(len(configs), 1, VOCAB_SIZE, spread=spread, seed=2)
    for found, given_logits, config in zip(filtered(logits, configs)[:, 0], logits[:, 0], configs, strict=True):
        exact = reference.distribution(given_logits.double().numpy(), config)
        assert_close(reference.softmax(found.double().numpy() / config.temperature), exact, 1e-9)


def test_settings_that_are_off_change_nothing() -> None:
    """To the last bit, and whatever the temperature; rounding must not cost the last of a sum its place."""
    for temperature in (1e-3, 1.0, 50.0):
        config = replace(OFF, temperature=temperature, top_k=VOCAB_SIZE, top_p=1.0, min_p=0.0)
        logits = random_logits(3, NUM_POSITIONS, VOCAB_SIZE, spread=8.0)
        assert torch.equal(filtered(logits, [config] * 3), logits)


@pytest.mark.parametrize("config", [replace(OFF, top_k=1), replace(OFF, top_p=1e-6), replace(OFF, min_p=1.0)])
def test_the_strictest_settings_leave_the_best_token(config: GenerationConfig) -> None:
    logits = random_logits(2, NUM_POSITIONS, VOCAB_SIZE)
    assert torch.equal((filtered(logits, [config] * 2) > REMOVED).nonzero()[:, 2], logits.argmax(dim=-1).flatten())


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (replace(OFF, top_k=1), 1),
        (replace(OFF, top_k=2), 4),
        (replace(OFF, top_k=4), 4),
        (replace(OFF, top_k=5), 5),
        (replace(OFF, top_p=0.4), 1),
        (replace(OFF, top_p=0.5), 4),
        (replace(OFF, min_p=0.36), 4),
    ],
)
def test_equal_tokens_stay_together(config: GenerationConfig, kept: int) -> None:
    """At a limit three equal ones, in any order of the ids: none of them may be preferred."""
    logits = torch.tensor([3.0, 2.0, 2.0, 2.0, 1.0])
    for order in ([0, 1, 2, 3, 4], [4, 3, 0, 1, 2], [1, 4, 2, 0, 3]):
        assert int((filtered(logits[order][None, None], [config]) > REMOVED).sum()) == kept


def test_all_equal_tokens_stay() -> None:
    logits = torch.full((1, 1, VOCAB_SIZE), 1.5)
    for config in FILTERS:
        assert torch.equal(filtered(logits, [config]), logits)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=8),
    st.floats(1e-6, 100),
    st.integers(1, 9),
    st.floats(1e-6, 1),
    st.floats(0, 1),
)
def test_the_best_token_is_never_removed_and_all_stays_finite(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.tensor(values, dtype=torch.float32)[None, None]
    result = filtered(logits, [GenerationConfig(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)])
    assert torch.isfinite(result).all()
    best = int(logits.argmax())
    assert int(result.argmax()) == best and result[0, 0, best] == logits[0, 0, best]


# Penalties.

RATES = [
    OFF,
    replace(OFF, repetition_penalty=1.3),
    replace(OFF, repetition_penalty=0.7),
    replace(OFF, presence_penalty=0.8),
    replace(OFF, presence_penalty=-0.5),
    replace(OFF, frequency_penalty=0.4),
    replace(OFF, repetition_penalty=1.2, presence_penalty=-0.3, frequency_penalty=0.6),
]


def numbers_of(configs: Sequence[GenerationConfig]) -> tuple[Tensor, ...]:
    return tuple(column([getattr(config, f"{name}_penalty") for config in configs]) for name in ("repetition", "presence", "frequency"))


def counted(texts: Sequence[Sequence[int]]) -> Tensor:
    """[B, V]: how often each token stands in a row's text."""
    return torch.stack([torch.bincount(torch.tensor(text, dtype=torch.int64), minlength=VOCAB_SIZE).float() for text in texts])


def assert_penalised(found: NDArray[np.float32], logits: Tensor, prompt: list[int], output: list[int], config: GenerationConfig) -> None:
    assert_close(found, reference.penalised(logits.double().numpy(), prompt, output, config), 1e-6)


def test_every_position_is_penalised_for_its_own_prefix() -> None:
    """The prompt, the output before the anchor, the anchor and the drafts up to the position: also those that will not be accepted."""
    configs = [config for config in RATES for _ in range(2)]
    rng = np.random.default_rng(3)
    # Few different tokens, so that prompts, outputs and drafts share some.
    prompts, outputs, blocks = ([rng.integers(0, 12, size).tolist() for _ in configs] for size in (9, 6, NUM_POSITIONS))
    logits = random_logits(len(configs), NUM_POSITIONS, VOCAB_SIZE, seed=4)
    marks = (counted(prompts) > 0).float()
    found = Penalise()(logits, torch.tensor(blocks), counted(outputs), marks, *numbers_of(configs))
    for row, config in enumerate(configs):
        for position in range(NUM_POSITIONS):
            output = [*outputs[row], *blocks[row][: position + 1]]
            assert_penalised(found[row, position].numpy(), logits[row, position], prompts[row], output, config)
    # Drafts matter: a position that did not know of them would be another.
    alone = Penalise()(logits[:, -1:], torch.tensor(blocks)[:, :1], counted(outputs), marks, *numbers_of(configs))
    assert not torch.allclose(alone[2:], found[2:, -1:])


def test_penalties_that_are_off_change_nothing() -> None:
    logits = random_logits(1, NUM_POSITIONS, VOCAB_SIZE)
    ids = torch.tensor([[1, 2, 1, 1]])
    assert torch.equal(Penalise()(logits, ids, counted([[4, 4]]), counted([[5]]), *numbers_of([OFF])), logits)


def test_no_id_is_no_token() -> None:
    """What follows a prompt has no anchor before it."""
    logits, config = random_logits(1, 1, VOCAB_SIZE), RATES[-1]
    found = Penalise()(logits, torch.tensor([[-1]]), counted([[]]), counted([[3, 4]]), *numbers_of([config]))
    assert_penalised(found[0, 0].numpy(), logits[0, 0], [3, 4], [], config)
    assert torch.equal(Count()(counted([[7]]), torch.tensor([[-1]]), torch.tensor([1])), counted([[7]]))


@pytest.mark.parametrize("num_emitted", range(NUM_POSITIONS + 1))
def test_counts_follow_what_was_emitted(num_emitted: int) -> None:
    """Anchor and accepted drafts, one token less than a row's drafts where the last was rejected; nothing for a row that is frozen."""
    block = [5, 3, 5, 5]
    counts = Count()(counted([[5, 2], [9]]), torch.tensor([block, block]), torch.tensor([num_emitted, 0]))
    assert torch.equal(counts, counted([[5, 2, *block[:num_emitted]], [9]]))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.integers(0, 4)), min_size=1, max_size=6))
def test_counts_of_many_rounds_are_those_of_the_text(rounds: list[tuple[list[int], int]]) -> None:
    """Each round verifies its anchor and some drafts, and accepts some of them; the next anchor is whatever follows."""
    counts, text = counted([[]]), []
    for block, accepted in rounds:
        num_emitted = min(accepted + 1, len(block))
        counts = Count()(counts, torch.tensor([block]), torch.tensor([num_emitted]))
        text += block[:num_emitted]
    assert torch.equal(counts, counted([text]))
