"""A model in another precision. What a model must keep in fp32 it names itself, in ``fp32_parts``.

Inside the models two things are fp32 in every precision: the statistics of an RMS norm, and the product that gives logits.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from xpress_runtime.sets import Precision

DTYPES = {Precision.FP32: torch.float32, Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}

Model = TypeVar("Model", bound=nn.Module)


def in_precision(model: Model, precision: Precision) -> Model:
    """The same module with parameters and tables converted in place, but for the children that ``fp32_parts`` names."""
    kept = {name: getattr(model, name) for name in getattr(model, "fp32_parts", ())}
    for name in kept:
        # Taken out while the rest is converted: there and back would round them.
        setattr(model, name, None)
    model.to(DTYPES[precision])
    for name, part in kept.items():
        setattr(model, name, part)
    return model
