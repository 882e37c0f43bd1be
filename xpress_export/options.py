"""What a build may choose, checked against the checkpoints before any work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xpress_export.checkpoints import DrafterCheckpoint, TargetCheckpoint
from xpress_runtime.errors import OptionError

DEFAULT_CAPACITY = 2048
DEFAULT_PREFILL_CHUNK = 128
MAX_BATCH = 1024


@dataclass(frozen=True)
class BuildOptions:
    """Resolved options. ``num_passes``: the default first, 0 always among them. ``cache_rows``: capacity and the longest overhang."""

    num_passes: tuple[int, ...]
    shortlist: int
    capacity: int
    batch: int
    prefill_chunk: int
    cache_rows: int


def resolve_options(
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    *,
    num_passes: Sequence[int] | None = None,
    shortlist: int | None = None,
    capacity: int | None = None,
    batch: int | None = None,
    prefill_chunk: int | None = None,
) -> BuildOptions:
    """Fill in what was not given from the checkpoints and refuse what they cannot do (OptionError)."""
    vocab_size, max_positions = target.config.vocab_size, target.config.max_positions
    if capacity is None:
        capacity = min(DEFAULT_CAPACITY, max_positions)
    if not 2 <= capacity <= max_positions:
        raise OptionError(f"--capacity is {capacity}, expected 2 to {max_positions}, the positions of {target.location.source}")
    batch = 1 if batch is None else batch
    if not 1 <= batch <= MAX_BATCH:
        raise OptionError(f"--batch is {batch}, expected 1 to {MAX_BATCH}")
    if shortlist is None:
        shortlist = drafter.refiner.shortlist if drafter.refiner else 0
    if not 0 <= shortlist <= vocab_size:
        raise OptionError(f"--shortlist is {shortlist}, expected 0 (the whole vocabulary) to {vocab_size}")
    block_size = drafter.config.block_size
    chunk = min(prefill_chunk or DEFAULT_PREFILL_CHUNK, capacity)
    return BuildOptions(
        num_passes=_passes(drafter, num_passes),
        # The whole vocabulary needs no candidates.
        shortlist=0 if shortlist == vocab_size else shortlist,
        capacity=capacity,
        batch=batch,
        prefill_chunk=chunk,
        cache_rows=cache_rows(capacity, chunk, block_size),
    )


def cache_rows(capacity: int, prefill_chunk: int, block_size: int) -> int:
    """Rows of every cache: the capacity and the longest overhang.

    From a position below the capacity a prefill chunk or two rounds may be written, and the drafter's block behind them. A multiple of 16,
    so that the caches of every sequence of a batch begin at an address that TensorRT takes.
    """
    return -(-(capacity + max(prefill_chunk, 2 * block_size) + block_size) // 16) * 16


def _passes(drafter: DrafterCheckpoint, wanted: Sequence[int] | None) -> tuple[int, ...]:
    if drafter.refiner is None:
        if wanted and any(wanted):
            raise OptionError(f"--num-passes {max(wanted)} needs a refiner, and {drafter.location.source} is a bare drafter; leave it out")
        return (0,)
    passes = tuple(dict.fromkeys(wanted if wanted else (drafter.refiner.num_passes,)))
    most = drafter.config.block_size - 1
    for count in passes:
        if not 0 <= count <= most:
            raise OptionError(
                f"--num-passes is {count}, expected 0 to {most}: "
                f"one less than the block size {drafter.config.block_size} of {drafter.location.source}"
            )
    return passes if 0 in passes else (*passes, 0)
