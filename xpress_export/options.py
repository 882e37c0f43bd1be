"""What a build may choose, checked against the checkpoints before any work."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from xpress_export.checkpoints import DrafterCheckpoint, TargetCheckpoint
from xpress_export.checkpoints.base_head import needs_base_head
from xpress_runtime.errors import OptionError
from xpress_runtime.sets import Precision

logger = logging.getLogger(__name__)

DEFAULT_CAPACITY = 2048
DEFAULT_PREFILL_CHUNK = 128
MAX_BATCH = 1024


@dataclass(frozen=True)
class BuildOptions:
    """Resolved options.

    ``num_passes``: the default first, 0 always among them. ``shortlists``: candidates per slot, the default first, 0 is the whole
    vocabulary. ``cache_rows``: capacity and the longest overhang. ``sampling``: whether graphs for sampling are among them.
    ``base_head``: whether the block's logits come from a graph of their own, which follows from the checkpoints.
    """

    num_passes: tuple[int, ...]
    shortlists: tuple[int, ...]
    capacity: int
    batch: int
    prefill_chunk: int
    cache_rows: int
    sampling: bool
    base_head: bool


def resolve_options(
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    *,
    num_passes: Sequence[int] | None = None,
    shortlists: Sequence[int] | None = None,
    capacity: int | None = None,
    batch: int | None = None,
    prefill_chunk: int | None = None,
    sampling: bool = True,
) -> BuildOptions:
    """Fill in what was not given from the checkpoints and refuse what they cannot do (OptionError)."""
    max_positions = target.config.max_positions
    if capacity is None:
        capacity = min(DEFAULT_CAPACITY, max_positions)
    if not 2 <= capacity <= max_positions:
        raise OptionError(f"--capacity is {capacity}, expected 2 to {max_positions}, the positions of {target.location.source}")
    if capacity > (trained := drafter.config.backbone.max_positions):
        logger.warning(
            "capacity %d is longer than what drafter '%s' was trained for (%d): texts beyond that stay exact, and may be drafted badly",
            capacity,
            drafter.location.source,
            trained,
        )
    batch = 1 if batch is None else batch
    if not 1 <= batch <= MAX_BATCH:
        raise OptionError(f"--batch is {batch}, expected 1 to {MAX_BATCH}")
    block_size = drafter.config.block_size
    chunk = min(prefill_chunk or DEFAULT_PREFILL_CHUNK, capacity)
    return BuildOptions(
        num_passes=_passes(drafter, num_passes),
        shortlists=_shortlists(drafter, shortlists),
        capacity=capacity,
        batch=batch,
        prefill_chunk=chunk,
        cache_rows=cache_rows(capacity, chunk, block_size),
        sampling=sampling,
        base_head=needs_base_head(target, drafter),
    )


def resolve_precisions(target: TargetCheckpoint, wanted: Sequence[Precision], *, with_half: bool) -> tuple[Precision, ...]:
    """The precisions to build, each once; none wanted: fp32 and, ``with_half``, the half precision that suits the target.

    OptionError where the target cannot be computed in one that is wanted.
    """
    reason = target.beyond_fp16
    if not wanted:
        half = Precision.FP16 if reason is None else Precision.BF16
        return (Precision.FP32, half) if with_half else (Precision.FP32,)
    if reason is not None and Precision.FP16 in wanted:
        raise OptionError(f"--precision fp16 is too narrow for {target.model_type} ({target.location.source}): {reason}; use bf16")
    return tuple(dict.fromkeys(wanted))


def check_engine_support(target: TargetCheckpoint) -> None:
    """OptionError where the target's graphs cannot become engines; asked before any work."""
    if target.config.attention_cap is not None:
        raise OptionError(
            f"no engine can be built of {target.location.source}: {target.model_type} bounds its attention scores "
            "(attn_logit_softcapping), which TensorRT's attention does not; leave out --engine"
        )


def cache_rows(capacity: int, prefill_chunk: int, block_size: int) -> int:
    """Rows of every cache: the capacity and the longest overhang.

    From a position below the capacity a prefill chunk or two rounds may be written, and the drafter's block behind them. A multiple of 16,
    so that the caches of every sequence of a batch begin at an address that TensorRT takes.
    """
    return -(-(capacity + max(prefill_chunk, 2 * block_size) + block_size) // 16) * 16


def _shortlists(drafter: DrafterCheckpoint, wanted: Sequence[int] | None) -> tuple[int, ...]:
    vocab_size = drafter.config.draft_vocab_size
    sizes = tuple(wanted) if wanted else (drafter.refiner.shortlist if drafter.refiner else 0,)
    for size in sizes:
        if not 0 <= size <= vocab_size:
            raise OptionError(f"--shortlist is {size}, expected 0 (the whole vocabulary) to {vocab_size}")
    # The whole vocabulary needs no candidates.
    return tuple(dict.fromkeys(0 if size == vocab_size else size for size in sizes))


def _passes(drafter: DrafterCheckpoint, wanted: Sequence[int] | None) -> tuple[int, ...]:
    most = drafter.config.block_size - 1
    if drafter.head is None:
        if wanted and any(wanted):
            raise OptionError(f"--num-passes {max(wanted)} needs a refiner, and {drafter.location.source} is a bare drafter; leave it out")
        return (0,)
    default = drafter.refiner.num_passes if drafter.refiner else most
    passes = tuple(dict.fromkeys(wanted if wanted else (default,)))
    for count in passes:
        if not 0 <= count <= most:
            raise OptionError(
                f"--num-passes is {count}, expected 0 to {most}: "
                f"one less than the block size {drafter.config.block_size} of {drafter.location.source}"
            )
        if drafter.head == "markov" and count not in (0, most):
            raise OptionError(
                f"--num-passes is {count}, expected 0 or {most}: "
                f"the Markov head of {drafter.location.source} works through a block slot by slot"
            )
    return passes if 0 in passes else (*passes, 0)
