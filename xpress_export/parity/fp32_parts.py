"""What half-precision graphs compute in fp32, and why: data that the parity report and the README quote.

Everything else in such a graph, tables of the rotary embedding included, is in its half precision.
"""

from __future__ import annotations

_NORMS = ("statistics of the norms", "a sum of squares leaves the range of fp16 as soon as one value exceeds 255")
_SOFTMAX = (
    "softmax of attention",
    "exponentials and their sum need the range; TensorRT's fused attention has no setting for it and decides itself",
)

# For each graph the parts that are fp32 and the reason. Graphs of a refiner share one entry.
FP32_PARTS: dict[str, tuple[tuple[str, str], ...]] = {
    "embed": (),
    "target": (_NORMS, _SOFTMAX),
    "head": (("product that gives the logits", "half-precision logits near 20 stand on a grid of 1/64 in fp16 and 1/8 in bf16, and tie"),),
    "drafter": (
        ("fc and hidden_norm, weights included", "taps of real models exceed 20,000, and a sum over all of them the range of fp16"),
        _NORMS,
        _SOFTMAX,
    ),
    "refiner": (
        (
            "base and refined logits, and their sum",
            "as in the head; the bias that is added to the base logits is a half-precision product",
        ),
    ),
    "accept": (),
}


def fp32_parts(graph: str) -> list[str]:
    """The fp32 parts of a graph by its name; the refiner of 0 passes ranks fp32 logits and computes nothing else."""
    return [part for part, _reason in FP32_PARTS[graph.partition("-")[0]]]
