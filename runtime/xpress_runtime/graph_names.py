"""Names of a set's graphs, so that build and runtime call them the same.

A refiner exists once for each number of passes and shortlist that was built, and where sampling is built in two forms, greedy and sampled.
Without passes there is nothing to correct, so K = 0 has no shortlist.
"""

from __future__ import annotations

from collections.abc import Sequence

SAMPLED = "-sampled"

_SMALL = ("accept", "denoise", "lookup", "confidence", "store-taps")
_SMALL_SAMPLED = ("sample", "accept-sampled", "accept-candidates", "filter-top-k", "filter-top-p", "penalise", "count")
_LARGE = ("embed", "head", "drafter", "target")
# The head of a block whose logits are not the target's head's.
BASE_HEAD = "base-head"
# What a regular expression takes for the name of a graph.
GRAPH_NAME = "|".join(
    (*_SMALL, *_SMALL_SAMPLED, *_LARGE, BASE_HEAD, r"refiner-k\d+(-c\d+)?(-sampled)?", "draft-(start|step|step-sampled|embed|head|decoder)")
)


def refiner_name(num_passes: int, shortlist: int, *, sampled: bool = False) -> str:
    """``refiner-k2`` over the whole vocabulary, ``refiner-k2-c256`` over the best 256 candidates; sampled forms end with ``-sampled``."""
    candidates = f"-c{shortlist}" if num_passes and shortlist else ""
    return f"refiner-k{num_passes}{candidates}{SAMPLED if sampled else ''}"


def refiner_variants(num_passes: Sequence[int], shortlists: Sequence[int]) -> list[tuple[int, int]]:
    """Every built pair of passes and shortlist, the default first."""
    return [(passes, shortlist) for passes in num_passes for shortlist in (shortlists if passes else (0,))]


def graph_names(
    num_passes: Sequence[int],
    shortlists: Sequence[int],
    *,
    sampling: bool,
    draft_model_shares_tables: bool | None,
    base_head: bool = False,
) -> tuple[str, ...]:
    """Every graph of a set, small ones first. ``draft_model_shares_tables`` is None where there is no autoregressive drafter."""
    forms = (False, True) if sampling else (False,)
    refiners = [refiner_name(*variant, sampled=sampled) for sampled in forms for variant in refiner_variants(num_passes, shortlists)]
    draft_model: list[str] = []
    if draft_model_shares_tables is not None:
        draft_model = ["draft-start", *(f"draft-step{SAMPLED if sampled else ''}" for sampled in forms)]
        draft_model += ["draft-decoder"] if draft_model_shares_tables else ["draft-embed", "draft-head", "draft-decoder"]
    own_head = (BASE_HEAD,) if base_head else ()
    return (*_SMALL, *(_SMALL_SAMPLED if sampling else ()), *refiners, *draft_model, *own_head, *_LARGE)
