"""Speculation that never loses: how far a round speculates, from measured costs and acceptance."""

from xpress_runtime.speculation.costs import StageCosts
from xpress_runtime.speculation.policy import PolicyCounts, SpeculationPolicy

__all__ = ["PolicyCounts", "SpeculationPolicy", "StageCosts"]
