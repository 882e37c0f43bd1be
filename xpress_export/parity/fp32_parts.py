"""What half-precision graphs compute in fp32, and why: data that the parity report and the README quote.

Everything else in such a graph, tables of the rotary embedding included, is in its half precision.
"""

from __future__ import annotations

Parts = tuple[tuple[str, str], ...]

_NORMS = ("statistics of the norms", "a sum of squares leaves the range of fp16 as soon as one value exceeds 255")
_SOFTMAX = (
    "softmax of attention",
    "exponentials and their sum need the range; TensorRT's fused attention has no setting for it and decides itself",
)
_LOGITS = ("product that gives the logits", "half-precision logits near 20 stand on a grid of 1/64 in fp16 and 1/8 in bf16, and tie")
_ALL: Parts = (("all of it", "it has no weights and works on logits, which are fp32 in every set"),)

# For each graph the parts that are fp32 and the reason; graphs that compute with integers or only move values have none.
FP32_PARTS: dict[str, Parts] = {
    "embed": (),
    "target": (_NORMS, _SOFTMAX),
    "head": (_LOGITS,),
    "drafter": (
        ("fc and hidden_norm, weights included", "taps of real models exceed 20,000, and a sum over all of them the range of fp16"),
        _NORMS,
        _SOFTMAX,
    ),
    "denoise": (("confidence of each slot", "it ranks probabilities of fp32 logits"),),
    "store-taps": (),
    "accept": (),
    "draft-start": (),
    "draft-embed": (),
    "draft-decoder": (_NORMS, _SOFTMAX),
    "draft-head": (_LOGITS,),
    "base-head": (_LOGITS,),
    **dict.fromkeys(("lookup", "confidence", "sample", "accept-sampled", "accept-candidates", "penalise", "count"), _ALL),
    **dict.fromkeys(("filter-top-k", "filter-top-p", "draft-step", "draft-step-sampled"), _ALL),
}

# Graphs of a refiner share one entry.
_REFINER: Parts = (
    ("base and refined logits, and their sum", "as in the head; the bias that is added to the base logits is a half-precision product"),
)


def fp32_parts(graph: str) -> list[str]:
    """The fp32 parts of a graph by its name; the refiner of 0 passes ranks fp32 logits and computes nothing else."""
    return [part for part, _reason in (_REFINER if graph.startswith("refiner-") else FP32_PARTS[graph])]


def is_fp32(graph: str) -> bool:
    """Whether a graph of a half-precision set computes in fp32 alone."""
    return not graph.startswith("refiner-") and FP32_PARTS[graph] == _ALL
