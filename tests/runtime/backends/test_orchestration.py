"""What the TensorRT backend queues, where and in which order: streams, events, addresses, captures; and that a fault in it would show."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.backends.simulated_cuda import SCHEDULES, SimulatedCuda, Violation
from tests.runtime.backends.simulated_engines import SimulatedLibrary
from tests.runtime.backends.test_simulated_gpu import cuda_of, simulated
from tests.scripted import continuation
from xpress_runtime.backends import capture
from xpress_runtime.backends.capture import WARM_UP_ROUNDS
from xpress_runtime.backends.cuda import CopyKind, CudaError
from xpress_runtime.backends.tensorrt import TensorRtBackend
from xpress_runtime.bundle import Bundle
from xpress_runtime.drafters import BlockDrafter
from xpress_runtime.errors import EnvironmentProblem, OptionError
from xpress_runtime.generation import GenerationConfig
from xpress_runtime.loop import SpeculativeLoop
from xpress_runtime.session import Session

SPECULATIVE_ROUND = ["embed", "drafter", "head", "refiner-k3", "embed", "target", "head", "accept"]
WAITS = {"synchronise", "synchronise_event"}


def opened(bundle: Bundle, backend: TensorRtBackend | None = None) -> tuple[Session, SimulatedCuda]:
    """A session whose log says where rounds begin and end."""
    backend = backend or simulated("lazy")
    session, cuda = Session(bundle, backend), cuda_of(backend)
    run_round = backend.run_round

    def logged(key: Hashable, queue: Callable[[], None]) -> None:
        cuda.log.append(("round begins", key))
        run_round(key, queue)
        cuda.log.append(("round ends", key))

    backend.run_round = logged  # type: ignore[method-assign]
    return session, cuda


def library_of(backend: TensorRtBackend) -> SimulatedLibrary:
    library = backend._library
    assert isinstance(library, SimulatedLibrary)
    return library


def rounds_of(log: list[tuple[Any, ...]]) -> list[list[tuple[Any, ...]]]:
    """The calls of every round."""
    starts = [index for index, entry in enumerate(log) if entry[0] == "round begins"]
    ends = [index for index, entry in enumerate(log) if entry[0] == "round ends"]
    return [log[start + 1 : end] for start, end in zip(starts, ends, strict=True)]


def test_a_round_is_captured_once_for_each_result_and_launched_from_then_on(scripted: Bundle) -> None:
    session, cuda = opened(scripted)
    for _ in range(2):
        assert list(session.generate([3], GenerationConfig(50, num_passes=3)).tokens) == continuation(3, 50)
    in_flight = session.backend.rounds_in_flight
    rounds = rounds_of(cuda.log)
    assert len(cuda.calls("begin_capture")) == len(cuda.graphs) == in_flight
    stepped = [any(entry[0] == "engine" for entry in calls) and not any(entry[0] == "launch" for entry in calls) for calls in rounds]
    assert stepped == [True] * (WARM_UP_ROUNDS * in_flight) + [False] * (len(rounds) - WARM_UP_ROUNDS * in_flight)
    # A launched round costs the host two calls: the wait for the buffers' last copies, and the launch.
    assert [entry[0] for entry in rounds[-1]] == ["wait", "launch"]
    session.generate([3], GenerationConfig(4, num_passes=0))
    assert len(cuda.graphs) == in_flight, "four rounds are warm-up"
    session.close()
    assert cuda.leaked() == {}


def test_the_order_within_a_round(scripted: Bundle) -> None:
    session, cuda = opened(scripted)
    session.generate([3], GenerationConfig(9, num_passes=3))
    first = rounds_of(cuda.log)[0]
    shown = []
    for name, *arguments in first:
        if name == "engine":
            graph, stream = arguments
            shown.append(graph)
            assert stream == cuda.compute
        elif name == "record":
            shown.append("mark")
        elif name == "copy":
            assert arguments[3:] == [CopyKind.ON_DEVICE, cuda.compute]
            shown.append("commit")
    drafted, refined = SPECULATIVE_ROUND[:3], SPECULATIVE_ROUND[3:4]
    assert shown == ["mark", *drafted, "mark", *refined, "mark", *SPECULATIVE_ROUND[4:], *["commit"] * 4, "mark"]
    # Then the results go out: the copy stream waits for the compute stream and for nothing else.
    end = next(index for index, entry in enumerate(cuda.log) if entry[0] == "round ends")
    sent = cuda.log[end + 1 : end + 7]
    assert [entry[0] for entry in sent] == ["record", "wait", "copy", "copy", "copy", "record"]
    assert sent[0][2] == cuda.compute and sent[1][1:] == (cuda.copies, sent[0][1])
    assert all(entry[4:] == (CopyKind.TO_HOST, cuda.copies) and entry[1] in cuda.pinned_at for entry in sent[2:5])
    assert sent[5][2] == cuda.copies
    session.close()


def test_marks_are_part_of_the_captured_graph(scripted: Bundle) -> None:
    session, cuda = opened(scripted)
    result = session.generate([3], GenerationConfig(50, num_passes=3))
    for graph in cuda.graphs.values():
        assert [operation.label for operation in graph if operation.label not in ("", "copy")] == SPECULATIVE_ROUND
        assert sum(operation.kind == "record" for operation in graph) == 4
    # The simulated clock counts operations: refinement is one engine and its mark, drafting three.
    seconds = [result.stats.stage_seconds[stage] for stage in SpeculativeLoop.stages]
    assert seconds[0] > seconds[1] > 0 and seconds[2] > seconds[1]
    session.close()


def test_memory_stays_where_it_is_and_caches_are_updated_in_place(scripted: Bundle) -> None:
    session, cuda = opened(scripted)
    session.generate(continuation(2, 9), GenerationConfig(50, num_passes=3))
    caches: dict[str, set[int]] = {}
    for graph, addresses in cuda.calls("context"):
        for name, address in addresses.items():
            if "_cache" in name:
                caches.setdefault(f"{graph}.{name.replace('_cache_out.', '_cache.')}", set()).add(address)
    assert caches and all(len(addresses) == 1 for addresses in caches.values())
    assert len({address for addresses in caches.values() for address in addresses}) == len(caches)
    begun = next(index for index, entry in enumerate(cuda.log) if entry[0] == "begin_capture")
    assert not [entry for entry in cuda.log[begun:] if entry[0] in ("allocate", "allocate_host", "create_event", "context")]
    session.close()


def check_no_wait_in_rounds(cuda: SimulatedCuda) -> None:
    for calls in rounds_of(cuda.log):
        assert not [entry for entry in calls if entry[0] in WAITS]


def test_no_round_waits_and_the_next_is_queued_before_one_is_read(scripted: Bundle) -> None:
    session, cuda = opened(scripted)
    session.generate([3], GenerationConfig(50, num_passes=3))
    check_no_wait_in_rounds(cuda)
    queued = read = 0
    for name, *_ in cuda.log:
        queued += name == "round ends"
        if name == "synchronise_event":
            read += 1
            assert queued == read + 1
    assert read > 8
    # Reading a round is the only wait of a generation but for the first token.
    assert len(cuda.calls("synchronise")) == 2, "one for the copy to pageable memory, one for all that was queued"
    session.close()


@pytest.mark.parametrize("behaviour", ["not_capturable", "fails_in_capture"])
def test_what_cannot_be_captured_runs_step_by_step_and_says_so(scripted: Bundle, caplog: pytest.LogCaptureFixture, behaviour: str) -> None:
    backend = simulated("random")
    setattr(library_of(backend), behaviour, "target")
    session, cuda = opened(scripted, backend)
    for _ in range(2):
        assert list(session.generate([3], GenerationConfig(40)).tokens) == continuation(3, 40)
    assert not cuda.graphs and cuda.capturing is None
    assert "captured" in caplog.text and len(caplog.records) == 2
    assert len(cuda.calls("begin_capture")) == len(cuda.calls("abandon_capture")) == (2 if behaviour == "fails_in_capture" else 0)
    session.close()


def test_a_capture_that_the_driver_refuses_is_no_failure(scripted: Bundle, caplog: pytest.LogCaptureFixture) -> None:
    session, cuda = opened(scripted, simulated("random", fail=("end_capture", 1)))
    assert list(session.generate([3], GenerationConfig(40)).tokens) == continuation(3, 40)
    assert "end_capture fails on purpose" in caplog.text
    assert len(cuda.graphs) == 1
    session.close()


def test_an_interrupt_in_the_middle_of_a_capture_leaves_the_session_usable(scripted: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    session, cuda = opened(scripted)
    refine = BlockDrafter.refine

    def interrupted(drafter: BlockDrafter) -> None:
        refine(drafter)
        if cuda.capturing is not None:
            raise KeyboardInterrupt

    stream = session.stream([3], GenerationConfig(50))
    with monkeypatch.context() as patch:
        patch.setattr(BlockDrafter, "refine", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(stream)
    with pytest.raises(OptionError, match="interrupted"):
        next(stream)
    assert cuda.capturing is None and not cuda.graphs
    assert list(session.generate([5], GenerationConfig(50)).tokens) == continuation(5, 50)
    assert len(cuda.graphs) == 2
    session.close()
    assert cuda.leaked() == {}


def test_two_plans_on_one_backend_do_not_replay_each_other(scripted: Bundle) -> None:
    backend = simulated("random")
    for start in (3, 12):
        session = Session(scripted, backend)
        assert list(session.generate([start], GenerationConfig(50)).tokens) == continuation(start, 50)
    backend.close()
    assert cuda_of(backend).leaked() == {}


@pytest.mark.parametrize("function", ["create_stream", "create_event", "allocate", "allocate_host", "fill_zero", "copy", "memory"])
def test_whatever_fails_while_opening_everything_is_freed(scripted: Bundle, function: str) -> None:
    num_failed = 0
    for call in (1, 2, 3, 5, 8, 13, 21, 34, 55, 89):
        cuda = SimulatedCuda("lazy", fail=(function, call))
        try:
            session = Session(scripted, TensorRtBackend("tensorrt-rtx", cuda, SimulatedLibrary(cuda)))
        except CudaError:
            num_failed += 1
            assert cuda.leaked() == {}, (function, call)
        else:
            session.close()
    assert num_failed


def test_an_engine_that_does_not_load_leaves_nothing_behind(scripted: Bundle) -> None:
    backend = simulated()
    library_of(backend).fails_to_load = "head"
    with pytest.raises(EnvironmentProblem, match="cannot load"):
        Session(scripted, backend)
    assert cuda_of(backend).leaked() == {} and library_of(backend).open_engines == 0


# A fault must show. Each of these is a mistake that works by luck on many a GPU.


def fails(bundle: Bundle, change: Callable[[Session], None] = lambda _: None) -> set[str]:
    """The schedules under which something is seen to be wrong."""
    failed = set()
    for schedule in SCHEDULES:
        session, cuda = opened(bundle, simulated(schedule))
        change(session)
        try:
            for prompt in ([3], continuation(4, 9)):
                stream = session.stream(prompt, GenerationConfig(45, num_passes=3))
                # Rounds that emit nothing would go on for ever.
                tokens = [token for piece in itertools.islice(stream, 40) for token in piece.tokens]
                assert tokens == continuation(prompt[-1], 45)
            check_no_wait_in_rounds(cuda)
        except (AssertionError, Violation):
            failed.add(schedule)
    return failed


def test_without_a_fault_nothing_is_wrong(scripted: Bundle) -> None:
    assert not fails(scripted)


def test_a_copy_stream_that_does_not_wait_is_seen(scripted: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = SimulatedCuda.wait
    monkeypatch.setattr(SimulatedCuda, "wait", lambda cuda, stream, event: None if stream == cuda.copies else wait(cuda, stream, event))
    assert {"lazy", "copies first"} <= fails(scripted)


def test_results_shared_by_two_rounds_are_seen(scripted: Bundle) -> None:
    def share(session: Session) -> None:
        buffers = session.open_plan().buffers
        first = buffers.results[0]
        shared = session.backend.report((first.accepted, first.tokens, first.num_emitted))
        buffers.results = (first, dataclasses.replace(first, report=shared))

    assert "compute first" in fails(scripted, share)


def test_one_report_for_two_rounds_is_seen(scripted: Bundle) -> None:
    def share(session: Session) -> None:
        buffers = session.open_plan().buffers
        buffers.results = (buffers.results[0], dataclasses.replace(buffers.results[1], report=buffers.results[0].report))

    assert fails(scripted, share) == set(SCHEDULES)


def test_a_wait_inside_a_round_is_seen(scripted: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    refine = BlockDrafter.refine

    def waiting(drafter: BlockDrafter) -> None:
        drafter.plan.backend.synchronise()
        refine(drafter)

    monkeypatch.setattr(BlockDrafter, "refine", waiting)
    assert fails(scripted) == set(SCHEDULES)


def test_reading_without_waiting_is_seen(scripted: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedCuda, "synchronise_event", lambda _cuda, _event: None)
    assert {"lazy", "compute first"} <= fails(scripted)


def test_an_engine_on_the_wrong_stream_is_seen(scripted: Bundle) -> None:
    def misplace(session: Session) -> None:
        backend = session.backend
        assert isinstance(backend, TensorRtBackend)
        bound = backend.bound

        def elsewhere(context: Any) -> Any:
            program = bound(context)
            if context.engine.graph == "accept":
                program._stream = backend.device.copies
            return program

        backend.bound = elsewhere  # type: ignore[method-assign]

    assert {"lazy", "copies first"} <= fails(scripted, misplace)


def test_a_capture_without_warm_up_is_seen(scripted: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "WARM_UP_ROUNDS", 0)
    assert fails(scripted) == set(SCHEDULES)


# The runtime cache.


def test_the_runtime_cache_is_kept_where_the_user_says(scripted: Bundle, tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"

    def run() -> SimulatedLibrary:
        cuda = SimulatedCuda("random")
        library = SimulatedLibrary(cuda)
        with Session(scripted, TensorRtBackend("tensorrt-rtx", cuda, library, folder)) as session:
            session.generate([3], GenerationConfig(50))
            assert {path.suffix for path in folder.iterdir()} == {".cache"}, "saved after the first capture"
        return library

    assert set(run().caches.values()) == {None}
    second = run()
    saved = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {name.rsplit("-", 1)[0] for name in saved} == {f"tensorrt-rtx-{graph}" for graph in second.engines}
    assert all(second.caches.values())


def test_a_runtime_cache_that_cannot_be_kept_is_a_warning(scripted: Bundle, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    cuda = SimulatedCuda("random")
    with Session(scripted, TensorRtBackend("tensorrt-rtx", cuda, SimulatedLibrary(cuda), tmp_path / "file")) as session:
        assert list(session.generate([3], GenerationConfig(50)).tokens) == continuation(3, 50)
    assert "cannot be written" in caplog.text


def test_a_runtime_cache_needs_something_to_cache() -> None:
    cuda = SimulatedCuda()
    with pytest.raises(OptionError, match="runtime cache is of no use to backend tensorrt,"):
        TensorRtBackend("tensorrt", cuda, SimulatedLibrary(cuda, compiles_at_run_time=False), Path("folder"))
