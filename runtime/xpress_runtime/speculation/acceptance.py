"""How likely a proposal is to be accepted, given that those before it were: learned from outcomes, forgotten as texts change.

A logistic model: logit of slot k = bias of slot k + slope × evidence of slot k. The biases share most of their prior variance and neighbours
more of it, so that what one slot shows moves the others, also those that were not verified for a while. ``evidence`` is the logit of the
refined distribution's largest probability, less a typical one; 0 where nothing was seen, and the biases then are the whole model. Only
slots that were verified and reached are outcomes: which slots are verified depends on history and evidence alone, so this selection leaves
the model unbiased. What surprises it makes it uncertain, and an uncertain model learns fast. Knows nothing of costs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xpress_runtime.speculation.belief import DriftingBelief, Vector

# Prior of a session: evidence at face value (acceptance = largest probability) where it is seen, else _TYPICAL.
_TYPICAL = 0.6
_SHARED, _SINGLE, _NEIGHBOURS, _SLOPE = 1.5, 0.6, 3.0, 0.5
# Uncertainty that returns with every round, and for every nat that a round surprises beyond what the model expects.
_RELAX, _RELAX_PER_NAT = 0.0005, 0.15
_EXPECTED_NATS = 3.0
_SDECAY=.9
_NEW=.1
_MAX_LOGIT = 5.0
# Rounds whose evidence is remembered, and what each weighs against the next younger one.
_NUM_RECENT, _AGEING = 24, 0.95


class AcceptanceModel:
    """For the ``num_proposals`` slots after the anchor."""

    def __init__(self, num_proposals: int) -> None:
        self._n = num_proposals
        typical = _logit(_TYPICAL)
        mean = np.append(np.full(num_proposals, typical), 1.0)
        distance = np.abs(np.subtract.outer(np.arange(num_proposals), np.arange(num_proposals)))
        stationary = np.zeros((num_proposals + 1, num_proposals + 1))
        stationary[:-1, :-1] = _SHARED**2 + _SINGLE**2 * np.exp(-distance / _NEIGHBOURS)
        stationary[-1, -1] = _SLOPE**2
        self._belief = DriftingBelief(mean, stationary)
        self._earlier_requests = mean.copy()
        self._recent = np.zeros((_NUM_RECENT, num_proposals))
        self._num_recent = 0
        self._surprise = 0.0

    def new_request(self) -> None:
        """Start from what requests were like so far, and be ready to learn that this one differs."""
        self._earlier_requests += 0.5 * (self._belief.mean - self._earlier_requests)
        self._belief.mean[:] = self._earlier_requests
        self._belief.relax(_NEW)

    def evidence(self, confidence: Sequence[float] | None) -> Vector:
        """[num_proposals] of the largest probabilities [num_proposals]; a probability that is not a number is one not seen."""
        if confidence is None:
            return np.zeros(self._n)
        values = np.asarray(confidence, np.float64)[: self._n]
        values = np.where(np.isfinite(values), np.clip(values, 0.0, 1.0), _TYPICAL)
        logits = np.log(values + 1e-3) - np.log(1.0 - values + 1e-3)
        return np.clip(logits, -_MAX_LOGIT, _MAX_LOGIT) - _logit(_TYPICAL)

    def predict(self, evidence: Vector) -> Vector:
        """Acceptance of each slot, given that those before it were accepted; ``evidence`` and result [..., num_proposals]."""
        mean = self._belief.mean
        return _probability(mean[:-1] + mean[-1] * evidence)

    def recent(self) -> tuple[Vector, Vector]:
        """Evidence of recent rounds [n, num_proposals], n ≥ 1, and their weights [n], which sum to 1."""
        n = max(self._num_recent, 1)
        weights = _AGEING ** np.arange(n)
        return self._recent[:n], weights / weights.sum()

    def observe(self, evidence: Vector, width: int, accepted: int, *, seen: bool) -> None:
        """A round verified ``width`` slots and accepted the first ``accepted`` proposals; ``seen``: its evidence was."""
        if seen:
            self._recent[1:] = self._recent[:-1].copy()
            self._recent[0] = evidence
            self._num_recent = min(self._num_recent + 1, _NUM_RECENT)
        num_outcomes = min(accepted + 1, width - 1)
        outcomes = np.arange(num_outcomes) < accepted
        expected = self.predict(evidence)[:num_outcomes]
        likelihood = np.where(outcomes, expected, 1.0 - expected)
        entropy = -(expected * np.log(expected) + (1.0 - expected) * np.log(1.0 - expected))
        surprise = float(-np.log(likelihood).sum() - entropy.sum())
        self._surprise = max(_SDECAY*self._surprise + surprise, 0.0)
        self._belief.relax(min(_RELAX + _RELAX_PER_NAT * max(self._surprise - _EXPECTED_NATS, 0.0), 1.0))
        for slot in range(num_outcomes):
            features = np.zeros(self._n + 1)
            features[slot], features[-1] = 1.0, evidence[slot]
            probability = float(_probability(features @ self._belief.mean))
            self._belief.observe(features, outcomes[slot] - probability, probability * (1.0 - probability))
        # Far into either tail a logit says nothing more, and would take long to come back.
        np.clip(self._belief.mean[:-1], -_MAX_LOGIT, _MAX_LOGIT, out=self._belief.mean[:-1])


def _logit(probability: float) -> float:
    return float(np.log(probability / (1.0 - probability)))


def _probability(logit: Vector) -> Vector:
    probability: Vector = 1.0 / (1.0 + np.exp(-np.clip(logit, -_MAX_LOGIT, _MAX_LOGIT)))
    return probability
