"""Names of graph sets: a precision and an attention form, such as ``fp32-length``."""

from __future__ import annotations

from enum import Enum


class AttentionForm(Enum):
    """How attention over a static cache is bounded: by valid lengths (ONNX Runtime CPU) or by an explicit mask (everywhere else)."""

    LENGTH = "length"
    MASK = "mask"
