"""Names of graph sets: a precision and an attention form, such as ``fp32-length``."""

from __future__ import annotations

from enum import Enum


class Precision(Enum):
    """Element type of weights, activations and caches. Logits are fp32 in every one."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"

    @property
    def element_bytes(self) -> int:
        return 4 if self is Precision.FP32 else 2


class AttentionForm(Enum):
    """How attention over a static cache is bounded: by valid lengths (ONNX Runtime CPU) or by an explicit mask (everywhere else)."""

    LENGTH = "length"
    MASK = "mask"


def set_name(precision: Precision, form: AttentionForm) -> str:
    """The name of a graph set, which is also its folder's."""
    return f"{precision.value}-{form.value}"
