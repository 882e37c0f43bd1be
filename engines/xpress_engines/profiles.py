"""Profiles as data: the calls that the runtime makes, and the shapes that an engine must therefore take.

A profile set is a small TOML file with ``description``, ``prefill_chunk``, ``batch``, ``capacity`` and, if it shall differ from the kind's
default, ``layout``. Knows the calls; knows nothing about TensorRT.

A call is the sizes of a graph's dynamic dims: the batch, and where a graph has them tokens, wanted rows, verified slots and scored tokens.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from xpress_runtime.engines import LAYOUTS, ShapeRange
from xpress_runtime.errors import OptionError
from xpress_runtime.fields import Fields
from xpress_runtime.manifest import Manifest

PRESETS = ("edge", "server")
MAX_BATCH = 1024
MAX_PREFILL_CHUNK = 8192
_PRESETS_FOLDER = Path(__file__).parent / "presets"
_FIELDS = ("description", "prefill_chunk", "batch", "capacity", "layout")
_MAX_FILE_BYTES = 64 * 1024
# Graphs that are called with the batch alone, beside the refiners.
_OF_BATCH = ("denoise", "lookup", "sample", "draft-start", "draft-step", "draft-step-sampled")

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class ProfileSet:
    """What engines are built for. ``layout`` None: the default of the kind."""

    prefill_chunk: int
    batch: int
    capacity: int
    layout: str | None = None
    description: str = ""

    def overridden(self, *, batch: int | None = None, layout: str | None = None) -> ProfileSet:
        """The same with what was given in its place; OptionError."""
        if batch is not None and not 1 <= batch <= MAX_BATCH:
            raise OptionError(f"--batch is {batch}, expected 1 to {MAX_BATCH}")
        if layout is not None and layout not in LAYOUTS:
            raise OptionError(f"--layout is '{layout}', expected one of {', '.join(LAYOUTS)}")
        return replace(self, batch=self.batch if batch is None else batch, layout=self.layout if layout is None else layout)


def load_profile(name: str) -> ProfileSet:
    """A preset by name, or a file of one's own by path; OptionError names the field that is wrong."""
    path = _PRESETS_FOLDER / f"{name}.toml" if name in PRESETS else Path(name)
    try:
        if path.exists() and not path.is_file():
            raise OptionError(f"profile '{name}' is not a file, expected a TOML file or one of {', '.join(PRESETS)}")
        if path.exists() and path.stat().st_size > _MAX_FILE_BYTES:
            raise OptionError(f"profile {path} is larger than {_MAX_FILE_BYTES} bytes, which no profile is")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise OptionError(f"profile '{name}' is neither a preset ({', '.join(PRESETS)}) nor a file") from None
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise OptionError(f"profile {name} cannot be read: {reason}") from None
    try:
        fields = Fields(tomllib.loads(text), f"profile {name}", OptionError)
    except (ValueError, RecursionError) as problem:
        raise OptionError(f"profile {name} is not valid TOML: {problem}") from None
    return _read(fields)


def _read(fields: Fields) -> ProfileSet:
    for name in fields:
        if name not in _FIELDS:
            raise OptionError(f"{fields.origin}: field '{name[:40]}' is unknown, expected {', '.join(_FIELDS)}")
    return ProfileSet(
        prefill_chunk=fields.integer("prefill_chunk", 1, MAX_PREFILL_CHUNK),
        batch=fields.integer("batch", 1, MAX_BATCH),
        capacity=fields.integer("capacity", 2),
        layout=fields.choice("layout", LAYOUTS) if "layout" in fields else None,
        description=fields.text("description") if "description" in fields else "",
    )


@dataclass(frozen=True)
class BlockSizes:
    """What calls depend on beside the profile. ``draft_model_shares_tables``: None without an autoregressive drafter."""

    block_size: int
    vocab_size: int
    shortlists: tuple[int, ...] = (0,)
    draft_model_shares_tables: bool | None = None

    @classmethod
    def of(cls, manifest: Manifest) -> BlockSizes:
        """Those of a bundle."""
        shares_tables = None if manifest.draft_model is None else manifest.draft_model.shares_tables
        return cls(manifest.drafter.block_size, manifest.target.vocab_size, manifest.shortlists, shares_tables)


@dataclass(frozen=True)
class _Calls:
    """Those of the prompt, and those of rounds."""

    prompt: Sequence[Sizes]
    rounds: Sequence[Sizes]


def graph_calls(graph: str, profile: ProfileSet, sizes: BlockSizes) -> tuple[Sizes, ...]:
    """Every call of a graph as sizes of its dynamic dims: the prompt, then rounds; each once.

    The prompt takes one sequence at a time, and its call of the drafter needs a block of that one. Rounds take ``batch`` sequences, or one.
    """
    calls = _calls(graph, profile, sizes)
    every = [*calls.prompt, *calls.rounds]
    return tuple(call for index, call in enumerate(every) if call not in every[:index])


def _calls(graph: str, profile: ProfileSet, sizes: BlockSizes) -> _Calls:
    prompt = [_tokens(1, profile.prefill_chunk)]
    batches = tuple(dict.fromkeys((profile.batch, 1)))
    block = sizes.block_size
    # What scores are of: the vocabulary, or a shortlist's candidates.
    candidates = tuple(size for size in sizes.shortlists if size)

    def rounds(*wanted: Sizes) -> list[Sizes]:
        return [{"batch": batch, **call} for batch in batches for call in wanted]

    if graph in ("embed", "target"):
        # A draft model reads its first two tokens at once, through the target's table where it has none of its own.
        drafted = [{"tokens": 2}] if graph == "embed" and sizes.draft_model_shares_tables else []
        return _Calls(prompt, rounds({"tokens": block}, {"tokens": 1}, *drafted))
    if graph == "head":
        drafted = [{"tokens": 2, "rows": 1}] if sizes.draft_model_shares_tables else []
        in_round = rounds({"tokens": block, "rows": block - 1}, {"tokens": block, "rows": block}, {"tokens": 1, "rows": 1}, *drafted)
        return _Calls([{**prompt[0], "rows": 1}], in_round)
    if graph == "base-head":
        return _Calls([], rounds({"tokens": block, "rows": block - 1}))
    if graph == "drafter":
        # A backlog of taps is read in a block's width or in a chunk's.
        return _Calls(prompt, rounds({"tokens": block}))
    if graph in ("draft-embed", "draft-decoder"):
        return _Calls(prompt, rounds({"tokens": 2}, {"tokens": 1}))
    if graph == "draft-head":
        return _Calls([], rounds({"tokens": 2, "rows": 1}, {"tokens": 1, "rows": 1}))
    if graph in ("accept", "filter-top-k", "filter-top-p", "penalise", "count"):
        # The first token, behind the prompt, is chosen as in a plain step.
        return _Calls([], rounds({"verified": block}, {"verified": 1}))
    if graph == "accept-sampled":
        return _Calls([], rounds({"verified": block}))
    if graph == "accept-candidates":
        # Lookup has one candidate a slot.
        return _Calls([], rounds(*({"verified": block, "scored": scored} for scored in (*candidates, 1))))
    if graph == "store-taps":
        # A backlog is one sequence's.
        return _Calls([], [{"batch": 1, "verified": verified} for verified in (block, 1)])
    if graph == "confidence":
        # Speculation "auto", which asks how sure a drafter is, decides for one sequence.
        return _Calls([], [{"batch": 1, "scored": scored} for scored in (sizes.vocab_size, *candidates)])
    assert graph in _OF_BATCH or graph.startswith("refiner-k"), f"no calls are known of graph {graph}"
    return _Calls([], rounds({}))


def _tokens(batch: int, tokens: int) -> Sizes:
    return {"batch": batch, "tokens": tokens}


def dim_ranges(graph: str, profile: ProfileSet, layout: str, sizes: BlockSizes) -> tuple[Mapping[str, tuple[int, int, int]], ...]:
    """The optimization profiles of an engine as (min, opt, max) of each dynamic dim: one for each call, or one that spans them all.

    The spanning one is tuned for the largest call of a round, such as a whole block of every sequence.
    """
    calls = graph_calls(graph, profile, sizes)
    if layout == "pinned":
        return tuple({dim: (size, size, size) for dim, size in call.items()} for call in calls)
    in_rounds = _calls(graph, profile, sizes).rounds

    def spanned(dim: str) -> tuple[int, int, int]:
        every = [call[dim] for call in calls]
        return min(every), max(call[dim] for call in in_rounds), max(every)

    return ({dim: spanned(dim) for dim in calls[0]},)


def input_ranges(
    inputs: Mapping[str, Sequence[int | str]], ranges: Sequence[Mapping[str, tuple[int, int, int]]]
) -> tuple[dict[str, ShapeRange], ...]:
    """Ranges of dims → ranges of shapes, for every input that has a dynamic dim; ``inputs`` maps names to dims."""

    def shape(dims: Sequence[int | str], sizes: Mapping[str, tuple[int, int, int]], which: int) -> tuple[int, ...]:
        return tuple(dim if isinstance(dim, int) else sizes[dim][which] for dim in dims)

    return tuple(
        {
            name: ShapeRange(shape(dims, sizes, 0), shape(dims, sizes, 1), shape(dims, sizes, 2))
            for name, dims in inputs.items()
            if any(isinstance(dim, str) for dim in dims)
        }
        for sizes in ranges
    )
