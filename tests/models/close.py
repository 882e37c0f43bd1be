"""How tests of numbers compare: the largest error, relative to the reference's largest magnitude (at least 1)."""

from __future__ import annotations

from typing import Any

import numpy as np


def assert_close(found: Any, reference: Any, tolerance: float) -> None:
    """Arrays or tensors of equal shape, finite, and nowhere further apart than ``tolerance`` times the reference's largest magnitude."""
    found, reference = np.asarray(found, np.float64), np.asarray(reference, np.float64)
    assert found.shape == reference.shape
    assert np.isfinite(found).all() and np.isfinite(reference).all()
    error = np.abs(found - reference).max() / max(1.0, np.abs(reference).max())
    assert error <= tolerance, f"error {error:.2e}, tolerance {tolerance:.0e}"
