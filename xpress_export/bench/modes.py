"""The groups of the experiment as configurations of one bundle.

Modes whose configurations coincide are one mode that belongs to several groups, so nothing is measured twice. Knows what a bundle holds and
nothing about sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from xpress_runtime.errors import OptionError
from xpress_runtime.generation import MAX_DRAFT_STEPS, GenerationConfig
from xpress_runtime.manifest import Manifest

# Each group and what it answers, in the order in which modes are shown.
GROUPS = {
    "A": "plain decoding, the baseline",
    "B": "an autoregressive drafter",
    "L": "prompt lookup, a drafter without weights",
    "C": "the block drafter with many denoising steps, no refiner",
    "D": "the block drafter with one step, and the refiner",
    "auto": "speculation as far as it pays",
    "ablation": "denoising steps × refiner on and off",
    "sweep": "every built number of refinement passes",
}
# Groups of a single mode, which a threshold can be about.
SINGLE_GROUPS = ("B", "L", "C", "D", "auto")
PLAIN = "plain"
DEFAULT_STEPS = (1, 5, 10)
DEFAULT_MANY_STEPS = 10


@dataclass(frozen=True)
class Mode:
    """One configuration. ``name`` is for programs, ``label`` for people; both are unique among the modes of a run."""

    name: str
    label: str
    groups: tuple[str, ...]
    config: GenerationConfig

    @property
    def title(self) -> str:
        """The label after the letters of its groups, as ``A: plain``."""
        letters = "".join(group for group in self.groups if len(group) == 1)
        return f"{letters}: {self.label}" if letters else self.label


@dataclass(frozen=True)
class ModePlan:
    """The modes to measure, plain first, and for each group that had to be changed or left out a sentence about it."""

    modes: tuple[Mode, ...]
    notes: tuple[str, ...]

    def of_group(self, group: str) -> list[Mode]:
        return [mode for mode in self.modes if group in mode.groups]


def plan_modes(
    manifest: Manifest,
    base: GenerationConfig,
    *,
    groups: Sequence[str] = tuple(GROUPS),
    steps: Sequence[int] = DEFAULT_STEPS,
    many_steps: int = DEFAULT_MANY_STEPS,
    num_passes: int | None = None,
    shortlist: int | None = None,
) -> ModePlan:
    """What the groups mean for a bundle. ``base`` holds limits and sampling, the same for all.

    ``steps`` are those of the ablation, ``many_steps`` those of group C; ``num_passes`` and ``shortlist`` those of every refined mode, None
    for the bundle's default. Plain decoding is always among the modes: the others are measured against it. Raises OptionError.
    """
    for group in groups:
        if group not in GROUPS:
            raise OptionError(f"group {group!r} does not exist; choose among {', '.join(GROUPS)}")
    for option, number in (("--many-steps", many_steps), *(("--steps", step) for step in steps)):
        if not 1 <= number <= MAX_DRAFT_STEPS:
            raise OptionError(f"{option} is {number}, expected numbers of denoising steps from 1 to {MAX_DRAFT_STEPS}")
    planner = _Planner(manifest, base, manifest.num_passes[0] if num_passes is None else num_passes, shortlist)
    for group in GROUPS:
        if group in groups or group == "A":
            planner.add_group(group, steps, many_steps)
    return ModePlan(tuple(planner.modes.values()), tuple(dict.fromkeys(planner.notes)))


class _Planner:
    """Collects modes; ``passes`` is the refiner's number of passes where it is on."""

    def __init__(self, manifest: Manifest, base: GenerationConfig, passes: int, shortlist: int | None) -> None:
        self._manifest = manifest
        self._base = base
        self._passes = passes
        self._shortlist = shortlist
        self._has_refiner = any(manifest.num_passes)
        self.modes: dict[str, Mode] = {}
        self.notes: list[str] = []

    def add_group(self, group: str, steps: Sequence[int], many_steps: int) -> None:
        if group == "A":
            self._add(group, PLAIN, "plain", replace(self._base, speculation="off"))
        elif group == "B" and self._manifest.draft_model is None:
            self.notes.append(
                "Group B is left out: the bundle has no autoregressive drafter (build one in with --draft-model or --draft-layers)."
            )
        elif group == "B":
            self._add(group, "autoregressive", "autoregressive drafter", replace(self._base, drafter="autoregressive"))
        elif group == "L":
            self._add(group, "lookup", "prompt lookup", replace(self._base, drafter="lookup"))
        elif group == "C":
            self._add_block(group, many_steps, 0)
        elif group == "D" and self._refines(group):
            self._add_block(group, 1, self._passes)
        elif group == "ablation":
            refined = (0, self._passes) if self._refines("the refined half of the ablation") else (0,)
            for step in dict.fromkeys(steps):
                for passes in refined:
                    self._add_block(group, step, passes)
        elif group == "sweep":
            for passes in sorted(self._manifest.num_passes):
                self._add_block(group, 1, passes)
        elif group == "auto":
            config = replace(self._base, speculation="auto", num_passes=self._passes, shortlist=self._shortlist_of(self._passes))
            self._add(group, "auto", "auto", config)

    def _refines(self, what: str) -> bool:
        if self._has_refiner and self._passes == 0:
            raise OptionError("--num-passes is 0, which is no refinement: group D, and half of the ablation, need passes; leave it out")
        if not self._has_refiner:
            subject = f"Group {what}" if len(what) == 1 else what.capitalize()
            self.notes.append(f"{subject} is left out: the bundle has no refiner.")
        return self._has_refiner

    def _add_block(self, group: str, steps: int, passes: int) -> None:
        """A mode of the block drafter. More steps than there are slots to fill change nothing, so they count as that many."""
        num_proposals = self._manifest.drafter.num_proposals
        if steps > num_proposals:
            self.notes.append(f"A block has {num_proposals} slots to fill, so {steps} denoising steps are {num_proposals}.")
            steps = num_proposals
        refiner = f"K={passes}" if passes else "no refiner"
        label = f"{steps} step{'s' if steps > 1 else ''}, {refiner}"
        config = replace(self._base, draft_steps=steps, num_passes=passes, shortlist=self._shortlist_of(passes))
        self._add(group, f"steps{steps}-k{passes}", label, config)

    def _shortlist_of(self, passes: int) -> int | None:
        return self._shortlist if passes else None

    def _add(self, group: str, name: str, label: str, config: GenerationConfig) -> None:
        known = self.modes.get(name)
        self.modes[name] = Mode(name, label, (group,), config) if known is None else replace(known, groups=(*known.groups, group))
