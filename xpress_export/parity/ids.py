"""Token ids that an error may change: which differences a near tie explains, and which slots of a block can be compared at all.

Knows logits and ids; knows nothing about graphs. What may differ is decided by the reference's logits and a bound for the error alone. For
ids that were drawn, logits are those over the temperature with the noise on them, of which the largest is the draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class IdComparison:
    """Rows by what became of their id, and how close their best two logits were.

    ``agreeing`` rows have the reference's id; in ``near_ties`` another one, whose logit in the reference is less than the best by at most
    twice the row's error; in ``different`` rows nothing explains the id. ``not_comparable`` rows had other inputs after a near tie in an
    earlier pass. ``equal_best``: rows whose two best logits are the same number; ``close_best``: whose margin in the reference is at most
    twice the row's error.
    """

    rows: int = 0
    agreeing: int = 0
    near_ties: int = 0
    different: int = 0
    not_comparable: int = 0
    equal_best: int = 0
    close_best: int = 0

    def __add__(self, other: IdComparison) -> IdComparison:
        return IdComparison(*(left + right for left, right in zip(asdict(self).values(), asdict(other).values(), strict=True)))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compare_ids(
    ids: NDArray[Any], found: NDArray[Any], reference: NDArray[Any], comparable: Bools | None = None, *, noise_error: float = 0.0
) -> IdComparison:
    """Compare ids [...], as places in the last axis of the logits [..., V] that they were chosen from; other places are different.

    ``noise_error``: by how much the noise on the logits may differ, where it does not show in ``found``.
    """
    if found.shape != reference.shape or ids.shape != reference.shape[:-1]:
        return IdComparison(rows=reference[..., 0].size, different=reference[..., 0].size)
    if comparable is None:
        comparable = np.ones(ids.shape, np.bool_)
    ids, found, reference = ids[comparable], found[comparable], reference[comparable]
    inside = (ids >= 0) & (ids < reference.shape[-1])
    chosen = np.take_along_axis(reference, np.where(inside, ids, 0)[..., None], -1)[..., 0]
    allowed = 2 * (np.abs(found.astype(np.float64) - reference).max(-1, initial=0.0) + noise_error)
    agreeing = inside & (ids == reference.argmax(-1))
    # An error that is no number explains nothing.
    near = inside & ~agreeing & np.isfinite(allowed) & (reference.max(-1, initial=-np.inf) - chosen <= allowed)
    return IdComparison(
        rows=comparable.size,
        agreeing=int(agreeing.sum()),
        near_ties=int(near.sum()),
        different=int((~agreeing & ~near).sum()),
        not_comparable=int((~comparable).sum()),
        equal_best=int((margins(found) == 0).sum()),
        close_best=int((margins(reference) <= allowed).sum()),
    )


def compare_choices(found: NDArray[Any], reference: NDArray[Any], sure: Bools) -> IdComparison:
    """Compare what was chosen [...], without logits: where the reference is ``sure`` [...], it must be the same."""
    if found.shape != reference.shape:
        return IdComparison(rows=reference.size, different=reference.size)
    agreeing = int((sure & (found == reference)).sum())
    num_sure = int(sure.sum())
    return IdComparison(rows=sure.size, agreeing=agreeing, different=num_sure - agreeing, not_comparable=sure.size - num_sure)


def margins(logits: NDArray[Any]) -> NDArray[Any]:
    """Difference between the two best of each row [..., V]; infinite where there is one only."""
    if logits.shape[-1] < 2:
        return np.full(logits.shape[:-1], np.inf)
    best = np.partition(logits, -2, axis=-1)[..., -2:]
    difference: NDArray[Any] = best[..., 1] - best[..., 0]
    return difference


def comparable_slots(passes: Sequence[NDArray[Any]], errors: Sequence[float]) -> Bools:
    """Which slots [B, P-1] of the last pass have the same inputs in every implementation that errs by at most this much in each pass.

    ``passes`` are the reference's logits [B, P-1, C] after each pass before the last, at least one. A slot reads the tokens that the pass
    before chose for the slots left of it; a token is sure where it was computed from sure tokens and its margin exceeds twice the error.
    """
    comparable = np.ones(passes[0].shape[:-1], np.bool_)
    for logits, error in zip(passes, errors, strict=True):
        sure = comparable & (margins(logits) > 2 * error)
        left = np.concatenate([np.ones_like(sure[:, :1]), sure[:, :-1]], axis=1)
        comparable = np.logical_and.accumulate(left, axis=1)
    return comparable
