"""The public face of the runtime: open a bundle, generate from prompts, chat messages or token ids, stream text.

A session owns one plan (its caches and buffers) and serves one generation at a time.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from xpress_runtime.backends import Backend, open_backend
from xpress_runtime.bundle import Bundle
from xpress_runtime.errors import OptionError
from xpress_runtime.generation import GenerationConfig, GenerationResult, Piece
from xpress_runtime.loop import Loop
from xpress_runtime.loops import Loops
from xpress_runtime.plan import Plan
from xpress_runtime.progress import RequestProgress
from xpress_runtime.prompts import Prompt, Prompts, seeded
from xpress_runtime.stats import GenerationStats, Stage

logger = logging.getLogger("xpress_runtime.session")

# Fewer rounds say nothing about a drafter.
_ROUNDS_TO_JUDGE = 8


@dataclass(frozen=True)
class WarningThresholds:
    """When a generation is worth a warning: acceptance rate below, or a mean round slower than this many milliseconds."""

    acceptance_rate: float = 0.02
    round_ms: float = 5000.0


class Session:
    """A bundle on a backend, which it closes with itself. Use :meth:`open`; a context manager."""

    def __init__(self, bundle: Bundle, backend: Backend, thresholds: WarningThresholds | None = None) -> None:
        self.bundle = bundle
        self.backend = backend
        self.thresholds = thresholds or WarningThresholds()
        self._prompts = Prompts(bundle)
        self.tokenizer = self._prompts.tokenizer
        try:
            self._plan: Plan | None = Plan(bundle, backend)
        except BaseException:
            backend.close()
            raise
        self._loops = Loops()
        # Counts generations: a stream that is no longer the latest one has lost its caches.
        self._generation = 0
        # One thread at a time works on the plan; generations of several threads wait for each other.
        self._lock = threading.RLock()

    @classmethod
    def open(
        cls,
        bundle: str | os.PathLike[str],
        backend: str = "auto",
        *,
        threads: int | None = None,
        verify: bool = True,
        thresholds: WarningThresholds | None = None,
        runtime_cache: str | os.PathLike[str] | None = None,
    ) -> Self:
        """Open a bundle folder on a backend.

        ``threads``: threads of one operator on the CPU, None for all usable cores. ``verify``: hash every file first. ``runtime_cache``: a
        folder where a backend that compiles kernels at run time keeps them. Raises BundleError, OptionError and EnvironmentProblem.
        """
        if threads is not None and threads < 1:
            raise OptionError(f"threads is {threads}, expected at least 1")
        opened = Bundle.open(bundle, verify=verify)
        cache = Path(runtime_cache) if runtime_cache is not None else None
        return cls(opened, open_backend(backend, threads=threads, bundle=opened, runtime_cache=cache), thresholds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Give the memory back; the session cannot be used afterwards."""
        with self._lock:
            if self._plan is not None:
                self._plan.close()
            self._plan = None
            self._loops = Loops()
            self.backend.close()

    def generate(
        self, prompt: Prompt, config: GenerationConfig | None = None, *, chat_variables: Mapping[str, Any] | None = None
    ) -> GenerationResult:
        """Generate to the end. ``prompt``: text, chat messages ({"role", "content"} each), or token ids.

        ``chat_variables`` go to the chat template, such as {"enable_thinking": False}. Calls from several threads run one after the other.
        Raises PromptError and OptionError.
        """
        with self._lock:
            stream = self.stream(prompt, config, chat_variables=chat_variables)
            for _ in stream:
                pass
            return stream.result

    def stream(
        self, prompt: Prompt, config: GenerationConfig | None = None, *, chat_variables: Mapping[str, Any] | None = None
    ) -> GenerationStream:
        """Generate piece by piece. Input is checked here, before the first piece is asked for; work begins with the first piece.

        A stream may be abandoned at any point; beginning another one on this session ends it.
        """
        config = seeded(config or GenerationConfig())
        tokens = self.encode(prompt, chat_variables=chat_variables)
        progress = self._prompts.progress(tokens, config)
        with self._lock:
            # First: making a loop may work on the caches, and an older stream must not go on from there.
            self._generation += 1
            loop = self._loops.loop(self.open_plan(), config)
            return GenerationStream(self, loop, tokens, config, progress, self._generation)

    def encode(self, prompt: Prompt, *, chat_variables: Mapping[str, Any] | None = None) -> list[int]:
        """A prompt as token ids, as the target's tokenizer and chat template make them. Raises PromptError."""
        return self._prompts.encode(prompt, chat_variables=chat_variables)

    @contextmanager
    def working_on(self, generation: int) -> Iterator[Plan]:
        """The plan for one step of a generation, to this thread alone; OptionError when the caches belong to another one by now."""
        with self._lock:
            plan = self.open_plan()
            if generation != self._generation:
                raise OptionError("this stream ended when another one began on its session; open a session for each that runs at a time")
            yield plan

    def open_plan(self) -> Plan:
        """The plan; OptionError once the session is closed."""
        if self._plan is None:
            raise OptionError("this session is closed; open another one")
        return self._plan


class GenerationStream(Iterator[Piece]):
    """Pieces of one generation as they become final. ``result`` is there once it has ended."""

    def __init__(
        self,
        session: Session,
        loop: Loop,
        prompt: Sequence[int],
        config: GenerationConfig,
        progress: RequestProgress,
        generation: int,
    ) -> None:
        self.stats = statistics_of(loop, config, len(prompt))
        self._session = session
        self._loop = loop
        self._prompt = prompt
        self._config = config
        self._progress = progress
        self._generation = generation
        self._failed = False
        self._reported = False

    @property
    def result(self) -> GenerationResult:
        """The finished generation; OptionError while the stream has not ended."""
        if self._progress.finish_reason is None:
            raise OptionError("the stream has not ended; take its pieces first")
        return GenerationResult(self._progress.text, tuple(self._progress.tokens), self._progress.finish_reason, self.stats)

    @property
    def finished(self) -> bool:
        return self._progress.finish_reason is not None

    def __next__(self) -> Piece:
        if self.finished:
            # With the last piece delivered, so that a log does not stand in the middle of a text.
            if not self._reported:
                self._reported = True
                self._report()
            raise StopIteration
        if self._failed:
            raise OptionError("this stream was interrupted in the middle of a round; begin another one")
        with self._session.working_on(self._generation) as plan:
            try:
                piece = self._first() if not self._progress.tokens else self._round()
            except BaseException:
                # The caches may be a round ahead of the text.
                self._failed = True
                raise
            if self.finished:
                plan.stop(0)
        return piece

    def _first(self) -> Piece:
        return self._progress.push([self._loop.start(0, self._prompt, self.stats, self._config)])

    def _round(self) -> Piece:
        started = time.perf_counter()
        committed = self._loop.round(self.stats)
        num_emitted = int(committed.num_emitted[0])
        piece = self._progress.push(committed.tokens[0, :num_emitted].tolist())
        self.stats.record_round(committed.width - 1, num_emitted, len(piece.tokens), time.perf_counter() - started)
        return piece

    def _report(self) -> None:
        stats = self.stats
        if not stats.rounds:
            return
        tau, per_token = stats.mean_acceptance_length, stats.ms_per_token
        logger.info(
            "%d tokens in %d rounds, mean acceptance length %.2f, %.1f ms per token; "
            "prefill %.0f, draft %.0f, refine %.0f, verify %.0f, host %.0f ms",
            stats.output_tokens,
            stats.rounds,
            tau,
            per_token,
            1e3 * stats.prefill_seconds,
            *(1e3 * stats.stage_seconds[stage] for stage in (Stage.DRAFT, Stage.REFINE, Stage.VERIFY)),
            1e3 * stats.host_seconds,
        )
        if (explanation := self._loop.explanation) is not None:
            logger.info("speculation auto: %s", explanation)
        thresholds = self._session.thresholds
        poor = stats.acceptance_rate is not None and stats.acceptance_rate < thresholds.acceptance_rate
        # A few rounds say little, and "auto" notices by itself.
        if poor and stats.speculation == "on" and stats.rounds >= _ROUNDS_TO_JUDGE:
            logger.warning(
                "acceptance rate %.3f is below %.3f: the drafter hardly fits this text; try it with speculation off or auto",
                stats.acceptance_rate,
                thresholds.acceptance_rate,
            )
        round_ms = 1e3 * stats.decode_seconds / stats.rounds
        if round_ms > thresholds.round_ms:
            logger.warning("a round took %.0f ms on average, more than %.0f ms", round_ms, thresholds.round_ms)


def statistics_of(loop: Loop, config: GenerationConfig, prompt_tokens: int) -> GenerationStats:
    """Empty statistics of a generation: what it runs with."""
    drafter = loop.drafter
    return GenerationStats(
        prompt_tokens,
        loop.num_proposals,
        None if drafter is None else drafter.num_passes,
        speculation=config.speculation,
        drafter=None if drafter is None else drafter.name,
        shortlist=None if drafter is None else drafter.shortlist,
        draft_steps=None if drafter is None else drafter.draft_steps,
        seed=config.seed if config.temperature > 0 else None,
    )
