"""Noise against Python's own integers and double precision, and whether it looks like noise: uniform, and the same nowhere twice."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from tests.sampling import noise as reference
from tests.sampling.goodness import fit
from xpress_export.models.noise import ACCEPTANCE_SLOT, FINAL_SLOT, PRIME, BlockNoise, TokenNoise, permuted, uniform_of
from xpress_runtime.sampling import noise_key

VOCAB_SIZE = 61
NOISE = TokenNoise(VOCAB_SIZE)
# Of the noise itself. Behind the seam between series and logarithm, the latter reads 24 digits of a number near 1.
TOLERANCE = 5e-5

numbers = st.integers(0, PRIME - 1)
keys = st.lists(numbers, min_size=4, max_size=4)


def keys_of(seeds: range) -> Tensor:
    return torch.tensor([noise_key(seed) for seed in seeds])


def values(seeds: range, position: int, slots: list[int]) -> NDArray[np.float64]:
    """Exponential noise [seeds, slots, V] as numbers between 0 and 1 that are uniform if it is right."""
    noise = NOISE.exponential(NOISE.coefficients(keys_of(seeds), torch.full((len(seeds),), position), torch.tensor(slots)))
    return -np.expm1(-noise.double().numpy())


def assert_close_to(found: Tensor, exact: NDArray[np.float64]) -> None:
    """Numbers just below 1 are 2^-24 apart in fp32, and the logarithm is steep there."""
    assert (np.abs(found.double().numpy() - exact) <= TOLERANCE * exact + 2**-23 * np.exp(exact)).all()


# Exact.


def test_the_prime_is_one_and_cubing_permutes_what_is_below_it() -> None:
    assert all(PRIME % divisor for divisor in range(2, int(PRIME**0.5) + 1))
    assert (PRIME - 1) % 3


@settings(max_examples=100, deadline=None)
@given(st.lists(numbers, min_size=1, max_size=4), keys)
def test_permutation_equals_pythons_integers(inputs: list[int], key: list[int]) -> None:
    found = permuted(torch.tensor([inputs]), torch.tensor([key]))[0]
    assert [tuple(row) for row in found.tolist()] == [reference.permuted(value, key) for value in inputs]


@pytest.mark.parametrize("key", [[0] * 4, [PRIME - 1] * 4, [PRIME - 1, 0, 1, PRIME // 2]])
def test_permutation_of_the_largest_numbers(key: list[int]) -> None:
    """Where a product would pass 2^63, if any did."""
    inputs = [0, 1, PRIME - 2, PRIME - 1]
    found = permuted(torch.tensor([inputs]), torch.tensor([key]))[0]
    assert [tuple(row) for row in found.tolist()] == [reference.permuted(value, key) for value in inputs]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**63 - 1), st.integers(0, 100_000), st.integers(1, 255))
def test_coefficients_and_noise_equal_pythons_integers(seed: int, position: int, slot: int) -> None:
    key = noise_key(seed)
    slots = [FINAL_SLOT, slot, ACCEPTANCE_SLOT + slot]
    coefficients = NOISE.coefficients(torch.tensor([key]), torch.tensor([position]), torch.tensor(slots))
    expected = [reference.coefficients(key, position, each) for each in slots]
    assert [tuple(row) for row in coefficients[0].tolist()] == expected
    exact = [[reference.exponential(reference.value(row, token)) for token in range(VOCAB_SIZE)] for row in expected]
    assert_close_to(NOISE.exponential(coefficients)[0], np.array(exact))
    np.testing.assert_allclose(uniform_of(coefficients)[0], [(row[0] + 0.5) / PRIME for row in expected], rtol=1e-6)


def test_noise_of_the_largest_coefficients() -> None:
    coefficients = torch.full((1, 1, 4), PRIME - 1)
    exact = [reference.exponential(reference.value([PRIME - 1] * 4, token)) for token in range(VOCAB_SIZE)]
    assert_close_to(NOISE.exponential(coefficients)[0, 0], np.array(exact))


def test_noise_key_of_a_seed_is_four_numbers_below_the_prime() -> None:
    made = [tuple(noise_key(seed)) for seed in (0, 1, 2, 2**63 - 1)]
    assert len(set(made)) == 4
    assert all(len(key) == 4 and 0 <= number < PRIME for key in made for number in key)


# Every value that there is.


@pytest.mark.parametrize("value", [0, 1, 2, 1000, PRIME // 1024, PRIME // 1024 + 1, PRIME // 2, PRIME - 1000, PRIME - 2, PRIME - 1])
def test_noise_is_finite_and_accurate_from_end_to_end(value: int) -> None:
    """A constant polynomial is its own value at every token. Small noise wins a race, so it is exact to its own size."""
    coefficients = torch.tensor([[[value, 0, 0, 0]]])
    exponential, gumbel = NOISE.exponential(coefficients), NOISE.gumbel(coefficients)
    assert torch.isfinite(exponential).all() and torch.isfinite(gumbel).all() and (exponential > 0).all()
    exact = np.full((1, 1, VOCAB_SIZE), reference.exponential(value))
    assert_close_to(exponential, exact)
    np.testing.assert_allclose(gumbel, -exponential.double().log(), rtol=1e-6, atol=1e-6)
    assert 0 < float(uniform_of(coefficients)) < 1


def test_noise_grows_with_its_value() -> None:
    """Across the seam between the series and the logarithm as well: nearly equal values keep their order, or become equal."""
    seam = PRIME // 1024
    around = torch.cat([torch.arange(0, 4000), torch.arange(seam - 4000, seam + 4000), torch.arange(PRIME - 4000, PRIME)])
    coefficients = torch.zeros(1, len(around), 4, dtype=torch.int64)
    coefficients[..., 0] = around
    noise = NOISE.exponential(coefficients)[0, :, 0]
    assert (noise.diff() >= -1e-7 * noise[1:]).all()


@settings(max_examples=100, deadline=None)
@given(keys, st.integers(0, PRIME // 512 - 1))
def test_noise_is_finite_for_any_key(key: list[int], position: int) -> None:
    gumbel = NOISE.gumbel(NOISE.coefficients(torch.tensor([key]), torch.tensor([position]), torch.arange(4)))
    assert torch.isfinite(gumbel).all()


# Like noise.

NUM_SEEDS = 40_000
NUM_BINS = 8


def uniforms() -> dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Pairs of numbers that must be uniform and know nothing of each other."""
    here, there = range(NUM_SEEDS), range(1, NUM_SEEDS + 1)
    block = values(here, 40, [1, 2])
    acceptance = uniform_of(NOISE.coefficients(keys_of(here), torch.full((NUM_SEEDS,), 40), torch.tensor([ACCEPTANCE_SLOT + 1])))
    return {
        "neighbouring tokens": (block[:, 0, 5], block[:, 0, 6]),
        "distant tokens": (block[:, 0, 0], block[:, 0, 60]),
        "slots": (block[:, 0, 5], block[:, 1, 5]),
        "positions": (block[:, 0, 5], values(here, 41, [1])[:, 0, 5]),
        "seeds": (block[:, 0, 5], values(there, 40, [1])[:, 0, 5]),
        "draft and what follows it": (block[:, 0, 5], values(here, 40, [FINAL_SLOT])[:, 0, 5]),
        "draft and its acceptance": (block[:, 0, 5], acceptance[:, 0].double().numpy()),
        "acceptance and what follows": (values(here, 40, [FINAL_SLOT])[:, 0, 5], acceptance[:, 0].double().numpy()),
    }


def test_noise_is_uniform_and_independent_over_seeds() -> None:
    for name, pair in uniforms().items():
        counts, _, _ = np.histogram2d(*pair, bins=NUM_BINS, range=[[0, 1], [0, 1]])
        result = fit(counts, np.full((NUM_BINS, NUM_BINS), NUM_BINS**-2.0))
        assert result.holds, (name, result)


def test_the_same_noise_in_two_places_is_seen() -> None:
    noise = values(range(2000), 40, [1])[:, 0, 5]
    counts, _, _ = np.histogram2d(noise, noise, bins=NUM_BINS, range=[[0, 1], [0, 1]])
    assert not fit(counts, np.full((NUM_BINS, NUM_BINS), NUM_BINS**-2.0)).holds


def test_noise_is_uniform_over_a_large_vocabulary() -> None:
    """One draw's noise, of a few requests, slots and positions: in fine bins, and so that neighbouring ids share no pattern."""
    noise = TokenNoise(150_000)
    coefficients = noise.coefficients(keys_of(range(2)), torch.tensor([3, 900]), torch.tensor([0, 1, 255]))
    for row in -np.expm1(-noise.exponential(coefficients).double().numpy().reshape(6, -1)):
        counts, _ = np.histogram(row, bins=500, range=(0, 1))
        assert fit(counts, np.full(500, 1 / 500)).holds
        pairs, _, _ = np.histogram2d(row[:-1], row[1:], bins=20, range=[[0, 1], [0, 1]])
        assert fit(pairs, np.full((20, 20), 1 / 400)).holds


def test_every_token_wins_as_often() -> None:
    """The largest Gumbel noise of a vocabulary is at any token alike, and the smallest exponential one at the same."""
    coefficients = NOISE.coefficients(keys_of(range(NUM_SEEDS)), torch.full((NUM_SEEDS,), 11), torch.tensor([2]))
    winners = NOISE.gumbel(coefficients).argmax(dim=-1)[:, 0]
    assert torch.equal(winners, NOISE.exponential(coefficients).argmin(dim=-1)[:, 0])
    assert fit(np.bincount(winners, minlength=VOCAB_SIZE), np.full(VOCAB_SIZE, 1 / VOCAB_SIZE)).holds


@pytest.mark.parametrize("vocab_size", [7, 1000])
def test_the_smallest_noise_of_a_vocabulary_is_as_small_as_it_should_be(vocab_size: int) -> None:
    """A race among n tokens is won in Exponential(n) time, if the noise of many tokens is independent together."""
    noise = TokenNoise(vocab_size)
    num_seeds = 20_000
    coefficients = noise.coefficients(keys_of(range(num_seeds)), torch.full((num_seeds,), 5), torch.tensor([1]))
    smallest = torch.cat([noise.exponential(some).amin(dim=-1)[:, 0] for some in coefficients.split(2000)])
    counts, _ = np.histogram(-np.expm1(-vocab_size * smallest.double().numpy()), bins=50, range=(0, 1))
    assert fit(counts, np.full(50, 1 / 50)).holds


# For what it is.


def test_noise_is_keyed_by_the_request_and_never_by_the_row() -> None:
    keys, position, slots = keys_of(range(4)), torch.tensor([3, 3, 8, 9]), torch.arange(5)
    batch = NOISE.coefficients(keys, position, slots)
    assert torch.equal(NOISE.coefficients(keys.flip(0), position.flip(0), slots), batch.flip(0))
    for row in range(4):
        assert torch.equal(NOISE.coefficients(keys[row : row + 1], position[row : row + 1], slots)[0], batch[row])
    same = NOISE.coefficients(keys[:1].expand(3, -1), position[:1].expand(3), slots)
    assert torch.equal(same, same[:1].expand(3, -1, -1))


def test_no_two_of_a_texts_draws_share_coefficients() -> None:
    """Every slot's draft, acceptance and what follows, at every position: so also no two rounds of one text."""
    slots = torch.cat([torch.arange(0, 256), ACCEPTANCE_SLOT + torch.arange(1, 256)])
    position = torch.arange(40)
    coefficients = NOISE.coefficients(keys_of(range(1)).expand(40, -1), position, slots)[..., 0]
    assert coefficients.unique().numel() == coefficients.numel()


def test_noise_of_candidates_is_that_of_their_tokens() -> None:
    coefficients = NOISE.coefficients(keys_of(range(3)), torch.tensor([1, 2, 3]), torch.tensor([1, 2]))
    candidates = torch.randint(VOCAB_SIZE, (3, 2, 7), generator=torch.Generator().manual_seed(1))
    assert torch.equal(NOISE.exponential(coefficients, candidates), NOISE.exponential(coefficients).gather(2, candidates))
    assert torch.equal(NOISE.gumbel(coefficients, candidates), NOISE.gumbel(coefficients).gather(2, candidates))


def test_block_noise_is_frozen_and_leaves_greedy_rows_alone() -> None:
    sampled = torch.tensor([1, 0])
    block = BlockNoise(NOISE, keys_of(range(2)), torch.tensor([5, 5]), torch.tensor([2.0, 1.0]), sampled, block_size=4)
    scores = torch.randn(2, 3, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
    once = block.perturb(scores, slice(0, 3))
    assert torch.equal(block.perturb(scores, slice(0, 3)), once)
    assert torch.equal(once[1], scores[1])
    coefficients = NOISE.coefficients(keys_of(range(1)), torch.tensor([5]), torch.arange(1, 4))
    assert torch.equal(once[0], scores[0] * 2 + NOISE.gumbel(coefficients)[0])
    assert torch.equal(block.perturb(scores[:, 1:2], slice(1, 2)), once[:, 1:2])
