"""Rounds of some of a plan's rows: drafted ones of one block variant, and plain ones; rows that sit out stay as they are.

A greedy row gets exactly the tokens that the target alone would produce, whichever rounds it takes part in. Knows rows and their settings;
knows nothing about requests, queues or text. One round at a time: who takes part in the next one is decided when this one is read.

Sizes: B rows, P block size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xpress_runtime.drafters import BlockDrafter
from xpress_runtime.generation import GenerationConfig
from xpress_runtime.plan import Committed, Plan, Round
from xpress_runtime.prefill import PromptReader
from xpress_runtime.sampling import SamplingForm
from xpress_runtime.serving.taps import Rows, RowTaps, num_computed
from xpress_runtime.verification import SamplingMemory, Verification


@dataclass(frozen=True)
class Variant:
    """How a block is drafted."""

    num_passes: int
    shortlist: int
    draft_steps: int


@dataclass(frozen=True)
class RowRound:
    """What a round emitted (nothing in a row that sat out), and the drafts [B, P-1] before and after refinement; None without drafts."""

    committed: Committed
    drafts: tuple[NDArray[np.int64], NDArray[np.int64]] | None


class RowRounds:
    """Rounds over the rows of a plan. ``default``: the variant whose drafter also reads prompts; any of them would read the same."""

    def __init__(self, plan: Plan, default: Variant) -> None:
        self.plan = plan
        self._default = default
        self._configs: list[GenerationConfig | None] = [None] * plan.num_rows
        self._taps = plan.part(RowTaps)
        self._drafters: dict[tuple[Variant, bool], BlockDrafter] = {}
        self._verifications: dict[object, Verification] = {}
        self._reads = self._drafter(default, sampled=False)
        # Rows that were greedy until now must be so in the first sampled round.
        self._numbers = plan.part(SamplingMemory) if plan.bundle.manifest.sampling else None

    def load(self) -> None:
        """Load what the first rounds of each kind would load."""
        self._verification(SamplingForm(), None)
        if self._numbers is not None:
            self._verification(SamplingForm(sampled=True, penalised=True, top_k=True, top_p=True), None)

    def prepare(self, config: GenerationConfig, variant: Variant | None) -> None:
        """Load what a request's rounds take. Raises BundleError where a graph is not there."""
        form = SamplingForm.of([config])
        self._verification(form, None)
        # Nothing that is sampled drafts but on request.
        if variant is not None:
            self._verification(form, self._drafter(variant, sampled=form.sampled))

    def reader(self, row: int, prompt: Sequence[int], *, drafted: bool) -> PromptReader:
        """Reads a prompt into a row; ``drafted``: into the drafter's memory as well."""
        self.plan.stop(row)
        return PromptReader(self.plan, row, np.asarray(prompt, np.int64), self._reads if drafted else None)

    def start(self, row: int, prompt: Sequence[int], config: GenerationConfig) -> int:
        """The first token of a prompt whose last chunk was read just now; the row takes part in rounds from here on."""
        verification = self._verification(SamplingForm.of([config]), None)
        if self._numbers is not None:
            self._numbers.rows.write(row, config, prompt)
        verification.start(row, config, prompt)
        first = verification.first_token()
        self._configs[row] = config
        self.plan.start(row, first, prompt[-1], len(prompt))
        self._taps.start(row)
        return first

    def stop(self, row: int) -> None:
        """The row's text has ended."""
        self.plan.stop(row)
        self._taps.start(row)
        self._configs[row] = None

    def plain(self, rows: Rows, active: Rows | None = None) -> RowRound:
        """One token of the target for each of ``rows`` [B], or for those that are ``active`` while the others only compute."""
        self._take(rows, active)
        current = self.plan.begin_round(1)
        report = current.result.report
        report.begin()
        self._taps.before_verifying(None, self._reads)
        # Nothing is drafted or refined, but a full store may have been read.
        report.mark()
        report.mark()
        committed = self._verified(current, self._verification(self._form(rows), None))
        self._taps.after_round(committed.num_emitted * self._drafting(), None)
        return RowRound(committed, None)

    def drafted(self, rows: Rows, variant: Variant, active: Rows | None = None) -> RowRound:
        """A drafted and verified block for each of ``rows`` [B], or for those that are ``active`` while the others only compute."""
        form = self._form(rows)
        drafter = self._drafter(variant, sampled=form.sampled)
        self._take(rows, active)
        current = self.plan.begin_round(self.plan.block_size)
        report = current.result.report
        report.begin()
        self._taps.before_drafting(rows, drafter)
        drafter.draft()
        report.mark()
        drafter.refine()
        report.mark()
        self._taps.before_verifying(rows, drafter)
        committed = self._verified(current, self._verification(form, drafter))
        self._taps.after_round(committed.num_emitted, rows)
        before, after = self.plan.drafts()
        return RowRound(committed, (before, after))

    def _verified(self, current: Round, verification: Verification) -> Committed:
        verification.run(current)
        verification.commit()
        current.result.report.mark()
        current.result.report.send()
        return self.plan.collect(current)

    def _take(self, rows: Rows, active: Rows | None) -> None:
        self.plan.run_on_front(num_computed(rows))
        self.plan.buffers.active.write((rows if active is None else active).astype(np.int64))

    def _drafting(self) -> NDArray[np.int64]:
        """1 for each row that may draft later on, so that its taps are kept."""
        return np.array([config is not None and config.speculation != "off" for config in self._configs], np.int64)

    def _form(self, rows: Rows) -> SamplingForm:
        return SamplingForm.of(config for config, taken in zip(self._configs, rows, strict=True) if taken and config is not None)

    def _drafter(self, variant: Variant, *, sampled: bool) -> BlockDrafter:
        key = (variant, sampled)
        if key not in self._drafters:
            self._drafters[key] = BlockDrafter(self.plan, variant.num_passes, variant.shortlist, variant.draft_steps, sampled=sampled)
        return self._drafters[key]

    def _verification(self, form: SamplingForm, drafter: BlockDrafter | None) -> Verification:
        key = (form, None if drafter is None else drafter.key)
        if key not in self._verifications:
            drawn_from = None if drafter is None else drafter.drawn_from()
            self._verifications[key] = Verification(self.plan, form, drawn_from, key, self._taps)
        return self._verifications[key]
