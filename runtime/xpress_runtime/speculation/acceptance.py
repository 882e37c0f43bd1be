"""How likely a proposal is to be accepted, given that those before it were: learned from outcomes, forgotten as texts change.

A logistic model: logit of slot k = bias of slot k + slope · evidence of slot k. The biases share much of their prior variance, neighbours
more of it, so what one slot shows moves the others, also those that were not verified for a while. *Evidence* is the logit of the refined
distribution's largest probability, less a typical one; 0 where nothing was seen, and the biases then are the whole model.

Only slots that were verified and reached are outcomes. Which slots are verified depends on history and evidence alone, so this selection
does not bias the model. Outcomes that surprise it make it uncertain, and an uncertain model learns fast. Knows nothing of costs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xpress_runtime.speculation.belief import DriftingBelief, Vector

# Prior of a session: evidence at face value (acceptance = largest probability), _TYPICAL where it is not seen.
_TYPICAL = 0.6
# Standard deviations of what all biases share, of each one's own part, and of the slope; slots over which own parts are alike.
_SHARED, _OWN, _SLOPE, _ALIKE = 1.2, 1.0, 0.5, 3.0
# Shares of the uncertainty that return: with every round, for every nat of surprise in excess of _SURPRISE, with a new request.
_PER_ROUND, _PER_NAT, _PER_REQUEST = 0.0005, 0.15, 0.1
# Surprise: negated log likelihood less its expectation, summed as long as it stays above 0, older rounds fading.
_SURPRISE, _FADING = 3.0, 0.9
# Beyond this a logit says nothing more, and would take long to come back.
_MAX_LOGIT = 5.0
# Rounds whose evidence is remembered, and what each weighs against the next younger one.
_NUM_RECENT, _AGEING = 24, 0.95


class AcceptanceModel:
    """For the ``num_proposals`` slots after the anchor."""

    def __init__(self, num_proposals: int) -> None:
        self._num_proposals = num_proposals
        slots = np.arange(num_proposals)
        stationary = np.zeros((num_proposals + 1, num_proposals + 1))
        stationary[:-1, :-1] = _SHARED**2 + _OWN**2 * np.exp(-np.abs(slots[:, None] - slots) / _ALIKE)
        stationary[-1, -1] = _SLOPE**2
        # The biases [num_proposals], then the slope.
        self._belief = DriftingBelief(np.append(np.full(num_proposals, _logit(_TYPICAL)), 1.0), stationary)
        self._earlier_requests: Vector | None = None
        self._has_outcomes = False
        self._surprise = 0.0
        self._recent = np.zeros((_NUM_RECENT, num_proposals))
        self._num_recent = 0

    def new_request(self) -> None:
        """Start from what requests were like so far, and be ready to learn that this one differs."""
        if not self._has_outcomes:
            return
        if self._earlier_requests is None:
            self._earlier_requests = self._belief.mean.copy()
        self._earlier_requests += 0.5 * (self._belief.mean - self._earlier_requests)
        self._belief.mean[:] = self._earlier_requests
        self._has_outcomes = False
        self._belief.relax(_PER_REQUEST)
        self._surprise = 0.0

    def evidence(self, confidence: Sequence[float] | None) -> Vector:
        """[num_proposals] of the largest probabilities [num_proposals]; one that is not a number counts as not seen."""
        if confidence is None:
            return np.zeros(self._num_proposals)
        values = np.asarray(confidence, np.float64)
        values = np.where(np.isfinite(values), np.clip(values, 1e-3, 1 - 1e-3), _TYPICAL)
        return np.clip(np.log(values / (1.0 - values)), -_MAX_LOGIT, _MAX_LOGIT) - _logit(_TYPICAL)

    def predict(self, evidence: Vector) -> Vector:
        """Acceptance of each slot, given that those before it were accepted; ``evidence`` and result [..., num_proposals]."""
        return _probability(self._belief.mean[:-1] + self._belief.mean[-1] * evidence)

    def recent(self) -> tuple[Vector, Vector]:
        """Evidence of recent rounds [n, num_proposals], n ≥ 1, and their weights [n], which sum to 1."""
        num_rounds = max(self._num_recent, 1)
        weights = _AGEING ** np.arange(num_rounds)
        return self._recent[:num_rounds], weights / weights.sum()

    def observe(self, evidence: Vector, width: int, accepted: int, *, seen: bool) -> None:
        """A round verified ``width`` slots and accepted the first ``accepted`` proposals; ``seen``: there was evidence."""
        if seen:
            self._recent[1:] = self._recent[:-1].copy()
            self._recent[0] = evidence
            self._num_recent = min(self._num_recent + 1, _NUM_RECENT)
        num_outcomes = min(accepted + 1, width - 1)
        outcomes = np.arange(num_outcomes) < accepted
        self._has_outcomes = self._has_outcomes or num_outcomes > 0

        expected = self.predict(evidence)[:num_outcomes]
        of_accepted, of_rejected = -np.log(expected), -np.log(1.0 - expected)
        expectation = expected * of_accepted + (1.0 - expected) * of_rejected
        surprise = float((np.where(outcomes, of_accepted, of_rejected) - expectation).sum())
        self._surprise = max(_FADING * self._surprise + surprise, 0.0)
        self._belief.relax(min(_PER_ROUND + _PER_NAT * max(self._surprise - _SURPRISE, 0.0), 1.0))

        for slot in range(num_outcomes):
            # One after the other: after a surprise the next outcome meets a model that has moved already.
            features = np.zeros(self._num_proposals + 1)
            features[slot], features[-1] = 1.0, evidence[slot]
            probability = float(_probability(features @ self._belief.mean))
            self._belief.observe(features, outcomes[slot] - probability, probability * (1.0 - probability))
        biases = self._belief.mean[:-1]
        np.clip(biases, -_MAX_LOGIT, _MAX_LOGIT, out=biases)


def _logit(probability: float) -> float:
    return float(np.log(probability / (1.0 - probability)))


def _probability(logit: Vector) -> Vector:
    probability: Vector = 1.0 / (1.0 + np.exp(-np.clip(logit, -_MAX_LOGIT, _MAX_LOGIT)))
    return probability
