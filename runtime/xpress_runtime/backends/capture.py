"""Rounds as CUDA graphs: the first ones of a kind run step by step, then one is captured, and from there on the graph is launched.

Knows that rounds with the same key queue the same work on the compute stream; knows nothing about what that work is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Protocol

from xpress_runtime.backends.device import Device, DeviceReport
from xpress_runtime.errors import XpressError

logger = logging.getLogger("xpress_runtime.backends")

# The first run of a program may allocate, compile and pick kernels, none of which a capture allows. Two, since the second round in flight
# meets the caches that the first one left.
WARM_UP_ROUNDS = 2


class Capturable(Protocol):
    """Something that a round enqueues."""

    def capturable(self, stream: int) -> bool:
        """Whether its next run on the stream can be captured."""


@dataclass
class _Kind:
    """Rounds of one key: how many ran step by step, and once captured the graph and what it marks."""

    num_stepped: int = 0
    graph: int | None = None
    marks: dict[DeviceReport, int] = field(default_factory=dict)
    # A capture failed, or a program cannot be captured.
    stepwise: bool = False


class RoundGraphs:
    """The graphs of a backend's rounds. ``captured`` is called after each capture, when the graph has been launched for the first time."""

    def __init__(self, device: Device, captured: Callable[[], None] = lambda: None) -> None:
        self._device = device
        self._captured = captured
        self._kinds: dict[Hashable, _Kind] = {}
        # What the round that is being queued has enqueued so far.
        self._enqueued: set[Capturable] = set()

    def note(self, program: Capturable) -> None:
        """A program tells that it was enqueued."""
        self._enqueued.add(program)

    def run(self, key: Hashable, queue: Callable[[], None]) -> None:
        """Queue a round: what ``queue`` queues, or the graph of it."""
        kind = self._kinds.setdefault(key, _Kind())
        if kind.graph is not None:
            self._launch(kind, kind.graph)
        elif kind.stepwise or kind.num_stepped < WARM_UP_ROUNDS:
            self._step(kind, queue)
        elif self._capture(kind, queue) and kind.graph is not None:
            self._launch(kind, kind.graph)
            self._captured()
        else:
            kind.stepwise = True
            queue()

    def _step(self, kind: _Kind, queue: Callable[[], None]) -> None:
        self._enqueued.clear()
        queue()
        kind.num_stepped += 1
        if kind.num_stepped == WARM_UP_ROUNDS and not all(program.capturable(self._device.compute) for program in self._enqueued):
            logger.warning("an engine says that it cannot be captured: rounds run engine by engine, which costs host time")
            kind.stepwise = True

    def _capture(self, kind: _Kind, queue: Callable[[], None]) -> bool:
        device = self._device
        device.marked.clear()
        device.capturing = True
        try:
            device.cuda.begin_capture(device.compute)
            queue()
        except XpressError as problem:
            device.cuda.abandon_capture(device.compute)
            logger.warning("a round cannot be captured (%s): rounds run engine by engine, which costs host time", problem)
            return False
        except BaseException:
            device.cuda.abandon_capture(device.compute)
            raise
        finally:
            device.capturing = False
        try:
            graph = device.cuda.end_capture(device.compute)
        except XpressError as problem:
            logger.warning("a round cannot be captured (%s): rounds run engine by engine, which costs host time", problem)
            return False
        device.own(lambda: device.cuda.destroy_graph(graph))
        kind.graph, kind.marks = graph, dict(device.marked)
        return True

    def _launch(self, kind: _Kind, graph: int) -> None:
        for report, num_marks in kind.marks.items():
            report.expect(num_marks)
        self._device.cuda.launch(graph, self._device.compute)
