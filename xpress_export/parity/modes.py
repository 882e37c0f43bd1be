"""The ways in which a bundle decodes greedily, all of which must give the same tokens. Needs no torch."""

from __future__ import annotations

from functools import partial

from xpress_runtime.generation import GenerationConfig
from xpress_runtime.manifest import Manifest

PLAIN = "plain"


def greedy_modes(manifest: Manifest, max_new_tokens: int, *, ignore_stop: bool = False) -> dict[str, GenerationConfig]:
    """Plain decoding, every built number of passes, a shortlist that is not the default, denoising steps, and the other drafters."""
    greedy = partial(GenerationConfig, max_new_tokens, ignore_stop=ignore_stop)
    configs = {PLAIN: greedy(speculation="off")}
    configs |= {f"K={passes}": greedy(num_passes=passes) for passes in manifest.num_passes}
    if most := max(manifest.num_passes):
        configs |= {f"K={most} C={shortlist}": greedy(num_passes=most, shortlist=shortlist) for shortlist in manifest.shortlists[1:2]}
    if manifest.drafter.num_proposals > 1:
        configs["2 draft steps"] = greedy(draft_steps=2)
    configs["lookup"] = greedy(drafter="lookup")
    if manifest.draft_model is not None:
        configs["autoregressive"] = greedy(drafter="autoregressive")
    return configs
