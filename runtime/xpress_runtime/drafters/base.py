"""What the loop needs of a drafter: read the prompt, draft, refine, and keep up with what is emitted.

Everything queues work on the plan's rows; verify ids and what they were drawn from are where the drafter says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence

from xpress_runtime.backends.base import BoundProgram, Buffer
from xpress_runtime.graph_names import refiner_name
from xpress_runtime.plan import Plan, Round
from xpress_runtime.sampling import RowNumbers
from xpress_runtime.verification import DrawnFrom, SamplingMemory, drawn_inputs


class Drafter(ABC):
    """``name`` is that of :class:`GenerationConfig`; the other settings are None where a drafter has none. ``key`` tells drafters of a plan
    apart.
    """

    name: str
    num_passes: int | None = None
    shortlist: int | None = None
    draft_steps: int | None = None

    def __init__(self, plan: Plan, *, sampled: bool) -> None:
        self.plan = plan
        self.sampled = sampled

    @property
    def key(self) -> Hashable:
        return (self.name, self.num_passes, self.shortlist, self.draft_steps, self.sampled)

    @abstractmethod
    def drawn_from(self) -> DrawnFrom:
        """What the drafts of a round are drawn from."""

    @abstractmethod
    def read_chunk(self, row: int, width: int) -> None:
        """Take in the prompt chunk that the target has just run: plan's ids, prefill taps and chunk positions."""

    @abstractmethod
    def start(self, row: int, prompt: Sequence[int], anchor: int) -> None:
        """A row's first round is next."""

    @abstractmethod
    def draft(self) -> None:
        """Queue the drafting of a block for every row."""

    @abstractmethod
    def refine(self) -> None:
        """Queue what makes verify ids of what was drafted."""

    @abstractmethod
    def observe(self, current: Round) -> None:
        """A round's verification is queued; what it emits will be in its result."""

    @abstractmethod
    def catch_up(self, row: int, text: Sequence[int], num_missed: int) -> None:
        """Nothing was drafted for ``num_missed`` tokens, the last of ``text``, which is all of the row's; its last one is the anchor."""

    def confidence(self) -> Buffer:
        """Queue the largest probability of each slot's distribution, and say where it will be [B, P-1]."""
        return self.plan.part(_Confidence).run(self.key, self.drawn_from().scores)


class _Confidence:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        scores = plan.buffers.draft_scores
        self._confidence = plan.backend.allocate(scores.shape[:2], scores.dtype)
        plan.load("confidence")

    def run(self, key: Hashable, scores: Buffer) -> Buffer:
        bound = {"scores": scores, "confidence": self._confidence}
        self._plan.run(("confidence", key), lambda: (self._plan.program("confidence").bind(bound),))
        return self._confidence


def bind_refiner(plan: Plan, num_passes: int, shortlist: int, *, sampled: bool, hidden: Buffer, base_logits: Buffer) -> BoundProgram:
    """Drafted hidden states and base logits → verify ids and draft scores in the plan's buffers."""
    buffers = plan.buffers
    program = plan.program(refiner_name(num_passes, shortlist, sampled=sampled))
    drawn_from = drafted_scores(plan, num_passes, shortlist, sampled=sampled, base_logits=base_logits)
    previous = plan.bundle.manifest.drafter.anchor_predecessor == "previous"
    bound = {
        "hidden": hidden,
        "base_logits": base_logits,
        "anchor": buffers.anchor,
        "predecessor": buffers.predecessor if previous else buffers.anchor,
        "verify_ids": buffers.verify_ids,
    }
    if sampled:
        numbers: RowNumbers = plan.part(SamplingMemory).rows
        bound |= {"position": buffers.position, "draft_scores": drawn_from.scores, **drawn_inputs(numbers)}
    elif num_passes:
        bound["refined_logits"] = drawn_from.scores
    if drawn_from.candidates is not None:
        bound["candidates"] = drawn_from.candidates
    return program.bind(bound)


def drafted_scores(plan: Plan, num_passes: int, shortlist: int, *, sampled: bool, base_logits: Buffer) -> DrawnFrom:
    """Where a refiner leaves its scores. Greedy without passes it makes none: the base logits are what it chose from."""
    if not sampled and not num_passes:
        return DrawnFrom(base_logits, None)
    buffers, slots = plan.buffers, (plan.num_rows, plan.block_size - 1)
    if not num_passes or not shortlist:
        return DrawnFrom(buffers.draft_scores, None)
    return DrawnFrom(buffers.draft_scores.view(*slots, shortlist), buffers.candidates.view(*slots, shortlist))
