"""Those who are told what a session does. One that fails is told nothing more, and the session goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from xpress_runtime.serving.requests import Request
from xpress_runtime.stats import Stage

logger = logging.getLogger("xpress_runtime.serving")


@dataclass(frozen=True)
class RoundReport:
    """A round: its rows, proposals of each, and per row accepted drafts and kept tokens (fewer where a text ended); seconds by stage."""

    rows: int
    proposed: int
    accepted: tuple[int, ...]
    kept: tuple[int, ...]
    seconds: dict[Stage, float]

    @property
    def speculative(self) -> bool:
        return self.proposed > 0


class Observer(Protocol):
    """Is told what happens, on the session's thread, and returns at once."""

    def round(self, report: RoundReport) -> None: ...

    def finished(self, request: Request) -> None: ...


class Observers:
    """All of one session."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = list(observers)

    def add(self, observer: Observer) -> None:
        self._observers.append(observer)

    def round(self, report: RoundReport) -> None:
        """A round took place."""
        for observer in list(self._observers):
            self._tell(observer, partial(observer.round, report))

    def finished(self, request: Request) -> None:
        """A request ended, in whatever way."""
        for observer in list(self._observers):
            self._tell(observer, partial(observer.finished, request))

    def _tell(self, observer: Observer, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            logger.exception("%s failed and is told nothing more", type(observer).__name__)
            self._observers.remove(observer)
