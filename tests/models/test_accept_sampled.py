"""Acceptance of drafts that were drawn, against rejection sampling token by token, and the cases in which its formulas have an edge."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.sampling import noise
from tests.sampling.continuations import noise_keys
from tests.sampling.goodness import fit
from tests.sampling.reference import softmax
from xpress_export.models.accept import Accept, AcceptedBlock, AcceptSampled, Sample
from xpress_export.models.noise import ACCEPTANCE_SLOT, FINAL_SLOT
from xpress_export.models.processors import REMOVED
from xpress_runtime.sampling import noise_key

BLOCK_SIZE, VOCAB_SIZE = 5, 7
MASK = 6
LAST_START = 50
NUM_PROPOSALS = BLOCK_SIZE - 1

ACCEPT = AcceptSampled(Accept(BLOCK_SIZE, MASK, LAST_START), VOCAB_SIZE)

Array = NDArray[np.float64]


@dataclass
class Row:
    """One sequence before a sampled round: its verified ids [W], the target's logits [W, V] and draft scores [P-1, Q], all random."""

    seed: int
    width: int = BLOCK_SIZE
    position: int = 20
    active: int = 1
    temperature: float = 0.7
    candidates: list[list[int]] | None = None
    predecessor: int = 3
    ids: list[int] = field(init=False)
    logits: Array = field(init=False)
    scores: Array = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        num_scored = VOCAB_SIZE if self.candidates is None else len(self.candidates[0])
        self.ids = rng.integers(0, VOCAB_SIZE, self.width).tolist()
        self.logits = rng.normal(size=(self.width, VOCAB_SIZE)).astype(np.float32).astype(np.float64)
        self.scores = rng.normal(size=(NUM_PROPOSALS, num_scored)).astype(np.float32).astype(np.float64)

    def q(self, slot: int) -> Array:
        """What the draft of ``slot`` (1 … P-1) was drawn from [V]."""
        drawn_from = softmax(self.scores[slot - 1])
        if self.candidates is None:
            return drawn_from
        spread = np.zeros(VOCAB_SIZE)
        spread[self.candidates[slot - 1]] = drawn_from
        return spread

    def p(self, index: int) -> Array:
        """The target's probabilities [V] behind verified slot ``index`` (0: the anchor)."""
        return softmax(self.logits[index] / self.temperature)


def run(rows: list[Row], keys: Tensor | None = None) -> AcceptedBlock:
    """With the rows' own seeds, or with ``keys`` [B, 4]."""
    inputs = {
        "verify_ids": torch.tensor([row.ids for row in rows]),
        "logits": torch.tensor(np.stack([row.logits for row in rows]), dtype=torch.float32),
        "draft_scores": torch.tensor(np.stack([row.scores for row in rows]), dtype=torch.float32),
        **{name: torch.tensor([getattr(row, name) for row in rows]) for name in ("position", "predecessor", "active")},
        "noise_key": torch.tensor([noise_key(row.seed) for row in rows]) if keys is None else keys,
        "inverse_temperature": torch.tensor([1 / row.temperature if row.temperature else 1.0 for row in rows]),
        "sampled": torch.tensor([int(row.temperature > 0) for row in rows]),
    }
    if rows[0].candidates is not None:
        inputs["candidates"] = torch.tensor([row.candidates for row in rows])
    block: AcceptedBlock = ACCEPT(**inputs)
    return block


def many(row: Row, num_samples: int) -> AcceptedBlock:
    """The same round with the seeds 0, 1, 2, …"""
    return run([row] * num_samples, torch.from_numpy(noise_keys(num_samples)))


def emitted(row: Row) -> list[int]:
    """Rejection sampling, one token after the other."""
    key, tokens = noise_key(row.seed), []
    for slot in range(1, row.width):
        draft, p, q = row.ids[slot], row.p(slot - 1), row.q(slot)
        uniform = (noise.coefficients(key, row.position, ACCEPTANCE_SLOT + slot)[0] + 0.5) / noise.PRIME
        if q[draft] == 0 or uniform >= p[draft] / q[draft]:
            rest = np.maximum(p - q, 0)
            return [*tokens, race(row, rest if rest.sum() else p)]
        tokens.append(draft)
    return [*tokens, race(row, row.p(row.width - 1))]


def race(row: Row, weights: Array) -> int:
    """A draw from weights [V]: each token arrives after Exponential(weight) time, and the first one wins."""
    polynomial = noise.coefficients(noise_key(row.seed), row.position, FINAL_SLOT)
    times = np.array([noise.exponential(noise.value(polynomial, token)) for token in range(VOCAB_SIZE)])
    return int((weights / times).argmax())


def greedily(row: Row) -> list[int]:
    best = row.logits.argmax(axis=1).tolist()
    accepted = 0
    while accepted + 1 < row.width and row.ids[accepted + 1] == best[accepted]:
        accepted += 1
    return [*row.ids[1 : accepted + 1], best[accepted]]


def assert_round(block: AcceptedBlock, index: int, row: Row) -> None:
    expected = [] if not row.active else emitted(row) if row.temperature else greedily(row)
    num_emitted = int(block.num_emitted[index])
    assert block.tokens[index].tolist()[:num_emitted] == expected
    assert int(block.accepted[index]) == max(num_emitted - 1, 0)
    anchor = expected[-1] if expected else row.ids[0]
    assert block.block_ids[index].tolist() == [anchor] + [MASK] * NUM_PROPOSALS
    assert int(block.anchor[index]) == anchor
    assert int(block.predecessor[index]) == ([row.ids[0], *expected][-2] if expected else row.predecessor)
    assert int(block.position[index]) == row.position + num_emitted
    assert int(block.context_position[index]) == row.position
    assert int(block.active[index]) == int(row.active and row.position + num_emitted <= LAST_START)


def agreeing(rows: list[Row]) -> list[Row]:
    """Drafts that both sides like, so that long prefixes are accepted."""
    for row in rows:
        for slot in range(1, row.width):
            row.ids[slot] = int((row.p(slot - 1) * row.q(slot)).argmax()) if row.temperature else int(row.logits[slot - 1].argmax())
    return rows


SOME = [[2, 5, 0], [1, 2, 3], [6, 0, 4], [3, 1, 5]]


@pytest.mark.parametrize("candidates", [None, SOME])
@pytest.mark.parametrize("width", range(2, BLOCK_SIZE + 1))
def test_equals_rejection_sampling_token_by_token(width: int, candidates: list[list[int]] | None) -> None:
    """Of rows of every temperature, 0 among them; running, frozen, and about to be frozen."""
    rows = [
        Row(
            seed,
            width,
            position=LAST_START - 3 if seed % 5 == 0 else 20 + seed,
            active=int(seed % 7 != 0),
            temperature=(0.0, 0.4, 1.0, 1.6)[seed % 4],
            candidates=candidates,
        )
        for seed in range(60)
    ]
    for batch in (rows, agreeing(rows)):
        block = run(batch)
        for index, row in enumerate(batch):
            assert_round(block, index, row)
    # The second batch reaches every number of accepted drafts.
    assert set(block.accepted.tolist()) == set(range(width))


def test_rows_are_independent() -> None:
    rows = agreeing([Row(seed, temperature=seed % 2) for seed in range(12)])
    together, alone = run(rows), [run([row]) for row in rows]
    for name in AcceptedBlock._fields:
        assert torch.equal(getattr(together, name), torch.cat([getattr(one, name) for one in alone])), name


def test_a_frozen_row_stays_as_it_is() -> None:
    row = agreeing([Row(1, active=0, position=33)])[0]
    block = run([row])
    assert block.num_emitted.tolist() == block.accepted.tolist() == block.active.tolist() == [0]
    assert (block.position.tolist(), block.anchor.tolist(), block.predecessor.tolist()) == ([33], [row.ids[0]], [row.predecessor])


# Edges.

NUM_SAMPLES = 20_000


def test_a_draft_that_could_not_be_drawn_is_rejected() -> None:
    """Whatever the target thinks of it: it is no candidate, or its score says probability 0."""
    row = Row(2, candidates=SOME)
    row.ids[1] = 4
    row.logits[0, 4] = 30
    assert many(row, 1000).accepted.max() == 0
    row = Row(2)
    row.ids[1] = 4
    row.logits[0, 4], row.scores[0, 4] = 30, REMOVED
    assert many(row, 1000).accepted.max() == 0


def test_a_draft_that_the_target_excludes_is_rejected() -> None:
    row = Row(3)
    row.ids[1] = 4
    row.logits[0, 4], row.scores[0, 4] = REMOVED, 5
    block = many(row, 1000)
    assert block.accepted.max() == 0
    assert not (block.tokens[:, 0] == 4).any()


def test_drafts_from_the_targets_own_distribution_are_all_accepted() -> None:
    row = Row(4)
    row.scores[:] = row.logits[:-1] / row.temperature
    assert (many(row, 1000).accepted == NUM_PROPOSALS).all()


def test_where_q_covers_all_of_p_the_rest_is_p() -> None:
    """The draft was none of the candidates, and they have the target's very probabilities: nothing of p is left."""
    row = Row(5, candidates=[[0, 1, 2, 3, 5, 6]] * NUM_PROPOSALS)
    row.ids[1] = 4
    row.logits[0, 4] = REMOVED
    row.scores[0] = row.logits[0, row.candidates[0]] / row.temperature if row.candidates else 0
    block = many(row, NUM_SAMPLES)
    assert block.accepted.max() == 0
    assert fit(np.bincount(block.tokens[:, 0], minlength=VOCAB_SIZE), row.p(0)).holds


def test_a_rejection_is_followed_by_what_q_lacks() -> None:
    row = Row(6)
    row.ids[1] = int((row.q(1) - row.p(0)).argmax())
    block = many(row, NUM_SAMPLES)
    rejected = block.accepted == 0
    share, exact = float(rejected.float().mean()), 1 - row.p(0)[row.ids[1]] / row.q(1)[row.ids[1]]
    assert abs(share - exact) < 4 * (exact * (1 - exact) / NUM_SAMPLES) ** 0.5
    rest = np.maximum(row.p(0) - row.q(1), 0)
    assert (rest == 0).sum() > 1
    assert fit(np.bincount(block.tokens[rejected, 0], minlength=VOCAB_SIZE), rest / rest.sum()).holds


@pytest.mark.parametrize("width", [2, BLOCK_SIZE])
def test_the_token_behind_the_last_accepted_draft_is_the_targets(width: int) -> None:
    """With fewer slots than were drafted, too: what the next slot was drawn from takes nothing away."""
    row = Row(7, width)
    row.scores[: width - 1] = row.logits[:-1] / row.temperature
    block = many(row, NUM_SAMPLES)
    assert (block.accepted == width - 1).all()
    assert fit(np.bincount(block.tokens[:, -1], minlength=VOCAB_SIZE), row.p(width - 1)).holds


def test_slots_that_are_not_verified_do_not_matter() -> None:
    rows = agreeing([Row(seed, width=3) for seed in range(40)])
    before = run(rows)
    for row in rows:
        row.scores[2:] = row.scores[2:, ::-1] * 7
    for one, other in zip(before, run(rows), strict=True):
        assert torch.equal(one, other)


def test_candidates_that_are_the_whole_vocabulary_change_nothing() -> None:
    """In any order."""
    rows = agreeing([Row(seed, temperature=(0.0, 0.8)[seed % 2]) for seed in range(40)])
    full = run(rows)
    order = [[3, 0, 6, 1, 5, 2, 4], [6, 5, 4, 3, 2, 1, 0], [1, 2, 3, 4, 5, 6, 0], [0, 1, 2, 3, 4, 5, 6]]
    for row in rows:
        row.candidates = order
        row.scores = np.take_along_axis(row.scores, np.array(order), axis=1)
    assert len(set(full.accepted.tolist())) > 2
    for one, other in zip(full, run(rows), strict=True):
        assert torch.equal(one, other)


# Without drafts.


@pytest.mark.parametrize("temperature", [0.5, 1.5])
def test_sample_draws_from_the_softmax(temperature: float) -> None:
    row = Row(8, temperature=temperature)
    keys = torch.from_numpy(noise_keys(NUM_SAMPLES))
    ones = torch.ones(NUM_SAMPLES)
    logits = torch.tensor(row.logits[:1], dtype=torch.float32).expand(NUM_SAMPLES, 1, -1)
    tokens = Sample(VOCAB_SIZE)(logits, 20 * ones.long(), keys, ones / temperature, ones.long())
    assert tokens.shape == (NUM_SAMPLES, 1)
    assert fit(np.bincount(tokens[:, 0], minlength=VOCAB_SIZE), row.p(0)).holds
    greedy = Sample(VOCAB_SIZE)(logits, 20 * ones.long(), keys, ones, 0 * ones.long())
    assert (greedy == int(row.logits[0].argmax())).all()


def test_sample_takes_the_winner_of_the_race_that_follows_a_block() -> None:
    for seed in range(30):
        row = Row(seed)
        inputs = torch.tensor(row.logits[:1, None], dtype=torch.float32), torch.tensor([row.position]), torch.tensor([noise_key(seed)])
        token = Sample(VOCAB_SIZE)(*inputs, torch.tensor([1 / row.temperature]), torch.tensor([1]))
        assert int(token) == race(row, row.p(0))
