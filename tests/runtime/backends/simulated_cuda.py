"""A GPU that is slow in the most awkward ways a real one may be.

Device memory is host memory at real addresses. What is queued runs later: when the host waits for it, or when the schedule lets it, which
may run one stream far ahead of the other as long as events allow it. Pinned memory changes when its copy runs. What CUDA forbids raises
:class:`Violation`. Every call is in ``log``.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from xpress_runtime.backends.cuda import CopyKind, CudaError, DeviceInfo

SCHEDULES = ("eager", "lazy", "compute first", "copies first", "random")
# Fresh memory is never zero.
_RUBBISH = 0xA5


class Violation(AssertionError):
    """A call that CUDA forbids, or whose result would depend on luck."""


@dataclass
class Operation:
    """Something in a stream. ``ticket`` counts the records of ``event``, so that a wait knows which of them it waits for."""

    kind: str
    action: Callable[[], None] = lambda: None
    event: int = 0
    ticket: int = 0
    label: str = ""


@dataclass
class Event:
    requested: int = 0
    done: int = 0
    time: float = 0.0


class SimulatedCuda:
    """:class:`xpress_runtime.backends.cuda.Cuda` without a GPU. ``fail``: a function name and at which of its calls it fails."""

    def __init__(
        self,
        schedule: str = "random",
        seed: int = 0,
        *,
        total_bytes: int = 1 << 30,
        compute_capability: str = "8.9",
        fail: tuple[str, int] | None = None,
    ) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.ran: list[str] = []
        self.memory_at: dict[int, np.ndarray[Any, Any]] = {}
        self.pinned_at: dict[int, np.ndarray[Any, Any]] = {}
        self.streams: dict[int, deque[Operation]] = {}
        self.events: dict[int, Event] = {}
        self.graphs: dict[int, list[Operation]] = {}
        self.capturing: int | None = None
        self._capture: list[Operation] = []
        self._schedule = schedule
        self._random = random.Random(seed)
        self._total_bytes = total_bytes
        self._capability = compute_capability
        self._fail = fail
        self._num_calls: dict[str, int] = {}
        self._next_handle = 100
        self._time = 0.0

    # What a test asks.

    @property
    def compute(self) -> int:
        return min(self.streams)

    @property
    def copies(self) -> int:
        return max(self.streams)

    def leaked(self) -> dict[str, int]:
        """What is not freed, by kind."""
        owned = {"memory": self.memory_at, "pinned": self.pinned_at, "streams": self.streams, "events": self.events, "graphs": self.graphs}
        return {kind: len(held) for kind, held in owned.items() if held}

    def calls(self, name: str) -> list[tuple[Any, ...]]:
        return [entry[1:] for entry in self.log if entry[0] == name]

    # The protocol.

    def device(self) -> DeviceInfo:
        return DeviceInfo("Simulated GPU", self._capability, "13.0")

    def memory(self) -> tuple[int, int]:
        self._called("memory")
        return self._total_bytes - sum(block.size for block in self.memory_at.values()), self._total_bytes

    def allocate(self, num_bytes: int) -> int:
        self._called("allocate", num_bytes, allowed_in_capture=False)
        if num_bytes > self.memory()[0]:
            raise CudaError("out of memory", "cudaErrorMemoryAllocation")
        return _allocate(self.memory_at, num_bytes)

    def free(self, address: int) -> None:
        self._called("free", address, allowed_in_capture=False)
        if any(self.streams.values()):
            self._finish()
        del self.memory_at[address]

    def allocate_host(self, num_bytes: int) -> int:
        self._called("allocate_host", num_bytes, allowed_in_capture=False)
        return _allocate(self.pinned_at, num_bytes)

    def free_host(self, address: int) -> None:
        self._called("free_host", address, allowed_in_capture=False)
        del self.pinned_at[address]

    def fill_zero(self, address: int, num_bytes: int, stream: int) -> None:
        self._called("fill_zero", address, num_bytes, stream)
        self._within(self.memory_at, address, num_bytes)
        self.enqueue(stream, "fill", lambda: _fill(address, 0, num_bytes))

    def copy(self, destination: int, source: int, num_bytes: int, kind: CopyKind, stream: int) -> None:
        self._called("copy", destination, source, num_bytes, kind, stream)
        if kind is not CopyKind.TO_DEVICE:
            self._within(self.memory_at, source, num_bytes)
        if kind is not CopyKind.TO_HOST:
            self._within(self.memory_at, destination, num_bytes)
        move = lambda: _move(destination, source, num_bytes)  # noqa: E731
        if kind is CopyKind.TO_DEVICE:
            # The backend stages everything in pinned memory, which is read when the copy runs.
            self._within(self.pinned_at, source, num_bytes)
            self.enqueue(stream, "upload", move)
        elif kind is CopyKind.TO_HOST and not self._is_pinned(destination, num_bytes):
            # A copy to pageable memory waits.
            if self.capturing == stream:
                raise Violation("a copy to pageable memory inside a capture")
            self.log.append(("synchronise", stream))
            self.enqueue(stream, "download", move)
            self._drain(stream)
        else:
            self.enqueue(stream, "copy", move)

    def create_stream(self) -> int:
        self._called("create_stream")
        return self._handle(self.streams, deque())

    def destroy_stream(self, stream: int) -> None:
        self._called("destroy_stream", stream)
        if self.streams.pop(stream):
            raise Violation("a stream is destroyed with work in it")

    def create_event(self) -> int:
        self._called("create_event")
        return self._handle(self.events, Event())

    def destroy_event(self, event: int) -> None:
        self._called("destroy_event", event)
        del self.events[event]

    def record(self, event: int, stream: int, *, external: bool = False) -> None:
        self._called("record", event, stream, external)
        if external != (self.capturing == stream):
            raise Violation(f"record with external={external} on a stream that is {'' if self.capturing == stream else 'not '}captured")
        if external:
            self._capture.append(Operation("record", event=event))
        else:
            self._record(event, stream)

    def wait(self, stream: int, event: int) -> None:
        self._called("wait", stream, event)
        if self.capturing is not None:
            raise Violation("a wait inside a capture would become part of the graph, or draw another stream into it")
        if self.events[event].requested:
            self.streams[stream].append(Operation("wait", event=event, ticket=self.events[event].requested))

    def synchronise_stream(self, stream: int) -> None:
        self._called("synchronise", stream, allowed_in_capture=False)
        self._drain(stream)

    def synchronise_event(self, event: int) -> None:
        self._called("synchronise_event", event, allowed_in_capture=False)
        self._force(event, self.events[event].requested)

    def elapsed_seconds(self, start: int, end: int) -> float:
        self._called("elapsed_seconds", start, end)
        for event in (self.events[start], self.events[end]):
            if event.done != event.requested or not event.requested:
                raise Violation("the time of an event that has not happened")
        return self.events[end].time - self.events[start].time

    def begin_capture(self, stream: int) -> None:
        self._called("begin_capture", stream)
        if self.capturing is not None:
            raise Violation("a capture inside a capture")
        self.capturing, self._capture = stream, []

    def end_capture(self, stream: int) -> int:
        if self.capturing != stream:
            raise Violation("the stream is not being captured")
        # It ends, well or not.
        self.capturing = None
        self._called("end_capture", stream)
        return self._handle(self.graphs, self._capture)

    def abandon_capture(self, stream: int) -> None:
        self._called("abandon_capture", stream)
        self.capturing, self._capture = None, []

    def launch(self, graph: int, stream: int) -> None:
        self._called("launch", graph, stream, allowed_in_capture=False)
        for operation in self.graphs[graph]:
            if operation.kind == "record":
                self._record(operation.event, stream)
            else:
                self.streams[stream].append(operation)

    def destroy_graph(self, graph: int) -> None:
        self._called("destroy_graph", graph)
        del self.graphs[graph]

    # For simulated engines.

    def enqueue(self, stream: int, label: str, action: Callable[[], None]) -> None:
        """Work of an engine, a copy or a fill."""
        operation = Operation("run", action, label=label)
        if self.capturing == stream:
            self._capture.append(operation)
        else:
            self.streams[stream].append(operation)

    def check_device_address(self, address: int, num_bytes: int) -> None:
        self._within(self.memory_at, address, num_bytes)

    # Scheduling.

    def _called(self, name: str, *arguments: Any, allowed_in_capture: bool = True) -> None:
        self.log.append((name, *arguments))
        if self.capturing is not None and not allowed_in_capture:
            raise Violation(f"{name} inside a capture")
        self._num_calls[name] = self._num_calls.get(name, 0) + 1
        if self._fail == (name, self._num_calls[name]):
            raise CudaError(f"{name} fails on purpose", "cudaErrorUnknown")
        self._let_run()

    def _let_run(self) -> None:
        """What a GPU does while the host is busy elsewhere."""
        if self._schedule == "random":
            for _ in range(self._random.randrange(4)):
                if self.streams:
                    self._step(self._random.choice(list(self.streams)))
        ahead = {"eager": [*self.streams, *self.streams], "compute first": list(self.streams)[:1], "copies first": list(self.streams)[1:]}
        for stream in ahead.get(self._schedule, []):
            while self._step(stream):
                pass

    def _step(self, stream: int) -> bool:
        """Run the next operation of a stream if it may run."""
        queue = self.streams[stream]
        if not queue or (queue[0].kind == "wait" and self.events[queue[0].event].done < queue[0].ticket):
            return False
        operation = queue.popleft()
        self._time += 1e-3
        if operation.kind == "record":
            event = self.events[operation.event]
            event.done, event.time = operation.ticket, self._time
        operation.action()
        self.ran.append(operation.label)
        return True

    def _drain(self, stream: int) -> None:
        while self.streams[stream]:
            self._advance(stream)

    def _advance(self, stream: int) -> None:
        """Run the next operation of a stream, and first what it waits for."""
        if not self._step(stream):
            head = self.streams[stream][0]
            self._force(head.event, head.ticket)

    def _force(self, event: int, ticket: int) -> None:
        while self.events[event].done < ticket:
            (stream,) = (
                stream
                for stream, queue in self.streams.items()
                if any(operation.kind == "record" and (operation.event, operation.ticket) == (event, ticket) for operation in queue)
            )
            self._advance(stream)

    def _finish(self) -> None:
        for stream in self.streams:
            self._drain(stream)

    def _record(self, event: int, stream: int) -> None:
        self.events[event].requested += 1
        self.streams[stream].append(Operation("record", event=event, ticket=self.events[event].requested))

    def _handle(self, table: dict[int, Any], value: Any) -> int:
        self._next_handle += 1
        table[self._next_handle] = value
        return self._next_handle

    def _is_pinned(self, address: int, num_bytes: int) -> bool:
        return any(start <= address and address + num_bytes <= start + block.size for start, block in self.pinned_at.items())

    def _within(self, table: dict[int, np.ndarray[Any, Any]], address: int, num_bytes: int) -> None:
        if not any(start <= address and address + num_bytes <= start + block.size for start, block in table.items()):
            raise Violation(f"{num_bytes} bytes at {address:#x} are not in memory that was allocated")


def _allocate(table: dict[int, np.ndarray[Any, Any]], num_bytes: int) -> int:
    memory = np.full(num_bytes + 256, _RUBBISH, np.uint8)
    skip = -memory.ctypes.data % 256
    block = memory[skip : skip + num_bytes]
    table[block.ctypes.data] = block
    return block.ctypes.data


def _move(destination: int, source: int, num_bytes: int) -> None:
    ctypes.memmove(destination, source, num_bytes)


def _fill(address: int, value: int, num_bytes: int) -> None:
    ctypes.memset(address, value, num_bytes)
