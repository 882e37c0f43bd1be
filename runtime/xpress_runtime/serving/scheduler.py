"""Who gets a slot, and which rounds run next: requests join and leave between rounds, and prompts are read chunk by chunk in between.

One tick is at most one prompt chunk, one drafted round and one plain round, so that no running text waits longer than that. Rows draft
together only in the same way: at most one block variant is in flight that its requests insist on; another one waits its turn until those
have ended. Rows of speculation "auto" draft while that pays for as many as there are, and are decoded plainly otherwise. Work of one
thread; knows nothing of threads.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from xpress_runtime.errors import XpressError
from xpress_runtime.generation import GenerationConfig, Piece
from xpress_runtime.plan import Plan
from xpress_runtime.prefill import PromptReader
from xpress_runtime.serving.observers import Observers, RoundReport
from xpress_runtime.serving.requests import Origin, Request, Step, StepToken
from xpress_runtime.serving.rounds import RowRound, RowRounds, Variant
from xpress_runtime.serving.taps import Rows, num_computed
from xpress_runtime.speculation.shared import SharedPolicy
from xpress_runtime.stats import Stage

logger = logging.getLogger("xpress_runtime.serving")

_REPEATS = 3


@dataclass
class Slot:
    """A request in a row of the caches. ``reader`` until its prompt is read; ``variant`` None: it never drafts."""

    request: Request
    variant: Variant | None
    reader: PromptReader | None
    prefill_seconds: float = 0.0

    @property
    def insists(self) -> bool:
        """Whether it drafts in every round."""
        return self.request.config.speculation == "on"


class Scheduler:
    """``next_request`` looks at whose turn it is, or takes it out of the queue; ``variant_of`` says how a request drafts."""

    def __init__(
        self,
        plan: Plan,
        default: Variant,
        next_request: Callable[[Callable[[Request], bool]], Request | None],
        variant_of: Callable[[GenerationConfig], Variant],
        observers: Observers,
    ) -> None:
        self.slots: list[Slot | None] = [None] * plan.num_rows
        self._plan = plan
        self._default = default
        self._rounds = RowRounds(plan, default)
        self._next_request = next_request
        self._variant_of = variant_of
        self._observers = observers
        self._policy = self._measured_policy()

    @property
    def busy(self) -> bool:
        return any(slot is not None for slot in self.slots)

    def tick(self) -> None:
        """Let go of what is not wanted, take in at most one request, read at most one chunk, run at most one round of each kind."""
        self._release_unwanted()
        self._admit()
        self._read_chunk()
        drafted, variant = self._drafting_rows()
        plain = self._running() & ~drafted
        if drafted.any():
            assert variant is not None
            started = time.perf_counter()
            outcome = self._rounds.drafted(drafted, variant)
            kept = self._deliver(outcome, drafted, time.perf_counter() - started, variant.num_passes)
            if variant == self._default:
                self._policy.record_drafted(num_computed(drafted), sum(outcome.committed.stage_seconds), kept)
        if plain.any():
            started = time.perf_counter()
            outcome = self._rounds.plain(plain)
            self._deliver(outcome, plain, time.perf_counter() - started, 0)
            self._policy.record_plain(num_computed(plain), sum(outcome.committed.stage_seconds))

    def abandon(self, end: Callable[[Request], None]) -> None:
        """Nothing runs any more; ``end`` says how each request ends."""
        for row, slot in enumerate(self.slots):
            if slot is not None:
                self.slots[row] = None
                end(slot.request)
                self._observers.finished(slot.request)

    def close(self) -> None:
        """Let go of the memory; nothing can be asked of it afterwards but who is there."""
        self._plan.close()
        del self._plan, self._rounds

    def explain(self) -> str:
        """One line for logs: what drafting pays."""
        return self._policy.explain()

    # Who is there.

    def _release_unwanted(self) -> None:
        for row, slot in enumerate(self.slots):
            if slot is not None and slot.request.is_unwanted():
                self._free(row)
                slot.request.end_unwanted()
                self._observers.finished(slot.request)

    def _admit(self) -> None:
        # One prompt is read at a time, so one request is taken in at a time.
        if None not in self.slots or any(slot is not None and slot.reader is not None for slot in self.slots):
            return
        request = self._next_request(self._fits)
        if request is None:
            return
        row = self.slots.index(None)
        config = request.config
        variant = None if config.speculation == "off" else self._variant_of(config)
        request.begin()
        try:
            self._rounds.prepare(config, variant)
        except XpressError as problem:
            # A graph that only this request needs cannot be loaded: the bundle was replaced or damaged since it was opened.
            request.end("failed", problem)
            self._observers.finished(request)
            return
        self.slots[row] = Slot(request, variant, self._rounds.reader(row, request.prompt, drafted=variant is not None))

    def _fits(self, request: Request) -> bool:
        """Whether a request may draft beside those that run."""
        config = request.config
        return config.speculation != "on" or self._insisted() in (None, self._variant_of(config))

    def _insisted(self) -> Variant | None:
        """The variant in which some row drafts in every round."""
        return next((slot.variant for slot in self.slots if slot is not None and slot.insists), None)

    def _running(self) -> Rows:
        return np.array([slot is not None and slot.reader is None for slot in self.slots], np.bool_)

    def _drafting_rows(self) -> tuple[Rows, Variant | None]:
        """Who drafts in this tick, and how: those who insist, and of the others those who draft alike, where it pays."""
        running = self._running()
        variants = [slot.variant if slot is not None and alive else None for slot, alive in zip(self.slots, running, strict=True)]
        insisting = np.array([bool(alive and slot and slot.insists) for slot, alive in zip(self.slots, running, strict=True)], np.bool_)
        variant = self._insisted() if insisting.any() else next((found for found in variants if found is not None), None)
        alike = np.array([found is not None and found == variant for found in variants], np.bool_)
        if alike.any() and self._policy.drafts(num_computed(alike)):
            return alike, variant
        return insisting, variant

    # What they get.

    def _read_chunk(self) -> None:
        for row, slot in enumerate(self.slots):
            if slot is None or slot.reader is None:
                continue
            started = time.perf_counter()
            done = slot.reader.read_chunk()
            first = self._rounds.start(row, slot.request.prompt, slot.request.config) if done else None
            slot.prefill_seconds += time.perf_counter() - started
            if first is None:
                self._plan.hold(row)
                return
            slot.reader = None
            stats = slot.request.stats
            stats.prefill_seconds = stats.stage_seconds[Stage.PREFILL] = slot.prefill_seconds
            piece = slot.request.progress.push([first])
            self._push(row, slot, Step((StepToken(first, piece.text, "target"),), 0, 0, {Stage.PREFILL: slot.prefill_seconds}))
            return

    def _deliver(self, outcome: RowRound, rows: Rows, elapsed: float, num_passes: int) -> list[int]:
        """Give each row its tokens; how many each got, before a text's end cut them."""
        committed = outcome.committed
        stages = (Stage.DRAFT, Stage.REFINE, Stage.VERIFY)
        seconds = dict(zip(stages, committed.stage_seconds, strict=True))
        proposed = committed.width - 1
        lengths, accepted_by_row, kept_by_row = [], [], []
        for row in map(int, np.flatnonzero(rows)):
            slot = self.slots[row]
            assert slot is not None
            num_emitted, accepted = int(committed.num_emitted[row]), int(committed.accepted[row])
            emitted = committed.tokens[row, :num_emitted].tolist()
            origins = _origins(outcome, row, accepted, num_passes)
            tokens = []
            for token, origin in zip(emitted, origins, strict=True):
                piece: Piece = slot.request.progress.push([token])
                tokens.append(StepToken(token, piece.text, origin))
                if slot.request.finish_reason is not None:
                    break
            stats = slot.request.stats
            stats.record_round(proposed, num_emitted, len(tokens), elapsed)
            for stage, spent in seconds.items():
                stats.stage_seconds[stage] += spent
            lengths.append(num_emitted)
            accepted_by_row.append(min(accepted, len(tokens)))
            kept_by_row.append(len(tokens))
            self._push(row, slot, Step(tuple(tokens), proposed, min(accepted, len(tokens)), seconds))
        report = RoundReport(len(lengths), proposed, tuple(accepted_by_row), tuple(kept_by_row), seconds)
        self._observers.round(report)
        return lengths

    def _push(self, row: int, slot: Slot, step: Step) -> None:
        request = slot.request
        ended = request.finish_reason is not None
        if ended:
            self._free(row)
        request.push(step)
        if ended:
            request.end("finished")
            self._observers.finished(request)

    def _free(self, row: int) -> None:
        self.slots[row] = None
        self._rounds.stop(row)

    # What a round costs.

    def _measured_policy(self) -> SharedPolicy:
        """Costs of a round of one row and of all, on rows that hold nothing."""
        plan = self._plan
        self._rounds.load()
        # A short text's caches, where they have no fixed length.
        plan.begin_prompt_chunk(0, 0, 1)
        plan.stop(0)
        nobody = np.zeros(plan.num_rows, np.bool_)
        plain, drafted = {}, {}
        for count in sorted({1, plan.num_rows}):
            rows = np.arange(plan.num_rows) < count
            plain[count] = _median(partial(self._rounds.plain, rows, nobody))
            drafted[count] = _median(partial(self._rounds.drafted, rows, self._default, nobody))
        policy = SharedPolicy(plan.num_rows, plain, drafted)
        logger.info("measured: %s", policy.explain())
        return policy


def _origins(outcome: RowRound, row: int, accepted: int, num_passes: int) -> list[Origin]:
    """Where each emitted token of a row came from: its accepted drafts, and then one token of the target."""
    if outcome.drafts is None or not outcome.committed.num_emitted[row]:
        return ["target"] * int(outcome.committed.num_emitted[row])
    before, after = (drafts[row, :accepted] for drafts in outcome.drafts)
    kept: list[Origin] = ["drafter" if not num_passes or same else "refiner" for same in before == after]
    return [*kept, "target"]


def _median(run: Callable[[], RowRound]) -> float:
    run()
    return statistics.median(sum(run().committed.stage_seconds) for _ in range(_REPEATS))
