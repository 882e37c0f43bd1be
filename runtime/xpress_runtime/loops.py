"""From a request's settings to the loop that serves it: its drafter, among those that the bundle was built with, and how far it speculates.

Keeps what "auto" has learned between requests. Knows nothing about prompts or text.
"""

from __future__ import annotations

from collections.abc import Hashable

from xpress_runtime.auto import AutoLoop
from xpress_runtime.backlog import Backlog
from xpress_runtime.drafters import AutoregressiveDrafter, BlockDrafter, Drafter, LookupDrafter
from xpress_runtime.errors import OptionError
from xpress_runtime.generation import GenerationConfig
from xpress_runtime.loop import Loop, PlainLoop, SpeculativeLoop
from xpress_runtime.manifest import Manifest
from xpress_runtime.plan import Plan
from xpress_runtime.sampling import SamplingForm
from xpress_runtime.speculation import SpeculationPolicy


class Loops:
    """Makes the loops of one plan."""

    def __init__(self) -> None:
        self._policies: dict[Hashable, SpeculationPolicy] = {}

    def loop(self, plan: Plan, config: GenerationConfig) -> Loop:
        """The loop for one request; OptionError where the bundle was not built for its settings."""
        form = sampling_form(plan.bundle.manifest, config)
        if config.speculation == "off":
            return PlainLoop(plan, form)
        if config.speculation == "on":
            return SpeculativeLoop(plan, make_drafter(plan, config, sampled=form.sampled), form)
        backlog = plan.part(Backlog) if config.drafter == "block" else None
        drafter = make_drafter(plan, config, sampled=form.sampled, backlog=backlog)
        key = (drafter.key, form)
        loop = AutoLoop(plan, drafter, form, backlog, self._policies.get(key))
        self._policies[key] = loop.policy
        return loop


def sampling_form(manifest: Manifest, config: GenerationConfig) -> SamplingForm:
    """What the settings take to be sampled; OptionError where the bundle has none of it."""
    form = SamplingForm.of([config])
    if form.sampled and not manifest.sampling:
        raise OptionError("this bundle was built without sampling (--no-sampling), so it decodes greedily; build it again without that")
    return form


def make_drafter(plan: Plan, config: GenerationConfig, *, sampled: bool, backlog: Backlog | None = None) -> Drafter:
    """The drafter that the settings name."""
    if config.drafter == "lookup":
        return LookupDrafter(plan, sampled=sampled)
    if config.drafter == "autoregressive":
        return AutoregressiveDrafter(plan, sampled=sampled)
    num_passes, shortlist = chosen_variant(plan.bundle.manifest, config)
    return BlockDrafter(plan, num_passes, shortlist, config.draft_steps, sampled=sampled, backlog=backlog)


def chosen_variant(manifest: Manifest, config: GenerationConfig) -> tuple[int, int]:
    """Passes and shortlist that the settings name, or the bundle's defaults."""
    num_passes = manifest.num_passes[0] if config.num_passes is None else config.num_passes
    if num_passes not in manifest.num_passes:
        choices = ", ".join(str(passes) for passes in sorted(manifest.num_passes))
        raise OptionError(f"num_passes is {num_passes}, and the bundle was built for {choices}; choose one or build it again")
    if config.shortlist is None:
        return num_passes, manifest.shortlists[0] if num_passes else 0
    if config.shortlist not in manifest.shortlists:
        choices = ", ".join(str(size) for size in sorted(manifest.shortlists))
        raise OptionError(
            f"shortlist is {config.shortlist}, and the bundle was built for {choices} (0: the whole vocabulary); "
            "choose one or build it again"
        )
    if config.shortlist and not num_passes:
        raise OptionError(
            f"shortlist is {config.shortlist}, and without refinement passes there is nothing to score; leave one of them out"
        )
    return num_passes, config.shortlist
