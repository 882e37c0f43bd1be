"""The processes of a run and what they compute on, as ``accelerate`` finds them: one, or as many as ``torchrun`` started."""

from __future__ import annotations

import torch
from accelerate import Accelerator, PartialState


def this_process() -> PartialState:
    """Which process this is, and of how many."""
    return PartialState(cpu=_on_cpu())


def accelerator() -> Accelerator:
    """The same for training."""
    return Accelerator(cpu=_on_cpu())


def _on_cpu() -> bool:
    # Without being told, accelerate takes several processes on CPUs for so many that know nothing of each other.
    return not torch.accelerator.is_available()
