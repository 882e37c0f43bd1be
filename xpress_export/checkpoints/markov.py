"""A Markov head in a drafter's folder: two tables, and where the config says so their rank. Knows nothing about the drafter's backbone."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from xpress_export.checkpoints.decoder_config import refuse_unless
from xpress_export.checkpoints.formats.description import MARKOV_ARCHITECTURES
from xpress_export.checkpoints.packing import Packed, plain
from xpress_export.models.markov import MarkovConfig
from xpress_runtime.errors import CheckpointError
from xpress_runtime.fields import Fields

MARKOV_FIELDS = frozenset(("markov_rank", "markov_head_type"))
TABLES = ("markov_w1.weight", "markov_w2.weight")
# The head is published with and without a name of its own.
PREFIXES = ("", "markov_head.")
MAX_RANK = 2**16


def read_markov(fields: Fields, architecture: str, vocab_size: int, block_size: int) -> MarkovConfig | None:
    """The head that a config.json states; None where it states none, or rank 0."""
    refuse_unless(fields, "markov_head_type", ("vanilla",))
    if architecture not in MARKOV_ARCHITECTURES:
        rank = fields.integer("markov_rank", 0, MAX_RANK) if "markov_rank" in fields else 0
        return MarkovConfig(vocab_size, rank, block_size) if rank else None
    if "sample_from_anchor" not in fields:
        raise CheckpointError(
            f"{fields.origin}: architecture {architecture} drafts its first token in the anchor's slot, which is not supported; "
            "if this drafter does not, field 'sample_from_anchor' must say false"
        )
    return MarkovConfig(vocab_size, fields.integer("markov_rank", 1, MAX_RANK), block_size)


def markov_of_tensors(shapes: Mapping[str, tuple[int, ...]], vocab_size: int, block_size: int) -> MarkovConfig | None:
    """The head of a folder whose config.json does not speak of it, or None."""
    prefix = markov_prefix(shapes)
    if any(len(shapes.get(prefix + table, ())) != 2 for table in TABLES):
        return None
    return MarkovConfig(vocab_size, shapes[prefix + TABLES[0]][1], block_size)


def markov_plan(config: MarkovConfig) -> dict[str, Packed]:
    """The head's parameters out of the published tensors, named without a prefix."""
    return {ours: plain(table, config.vocab_size, config.rank) for ours, table in zip(("w1", "w2"), TABLES, strict=True)}


def markov_prefix(published: Collection[str]) -> str:
    """The prefix that any of the tables has among the names of a checkpoint's tensors."""
    return next((prefix for prefix in PREFIXES if any(prefix + table in published for table in TABLES)), "")
