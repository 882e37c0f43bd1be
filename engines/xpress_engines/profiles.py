"""Profiles as data: the calls that the runtime makes, and the shapes that an engine must therefore take.

A profile set is a small TOML file with ``description``, ``prefill_chunk``, ``batch``, ``capacity`` and, if it shall differ from the kind's
default, ``layout``. Knows the calls; knows nothing about TensorRT.

Sizes: P block size; a call is (batch, tokens) and for the head also the wanted rows.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from xpress_runtime.engines import LAYOUTS, ShapeRange
from xpress_runtime.errors import OptionError
from xpress_runtime.fields import Fields

PRESETS = ("edge", "server")
MAX_BATCH = 1024
MAX_PREFILL_CHUNK = 8192
_PRESETS_FOLDER = Path(__file__).parent / "presets"
_FIELDS = ("description", "prefill_chunk", "batch", "capacity", "layout")
_MAX_FILE_BYTES = 64 * 1024

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


def graph_calls(graph: str, profile: ProfileSet, block_size: int) -> tuple[Sizes, ...]:
    """Every call of a graph as sizes of its dynamic dims: prefill, then draft, verify and single token; each once.

    Prefill takes one sequence at a time, and its call of the drafter needs a block of that one. Rounds take ``batch`` sequences, or one.
    """
    chunk = _tokens(1, profile.prefill_chunk)
    calls: list[Sizes] = []
    if graph in ("embed", "target", "drafter"):
        calls.append(chunk)
    elif graph == "head":
        calls.append({**chunk, "rows": 1})
    for batch in dict.fromkeys((profile.batch, 1)):
        block, single = _tokens(batch, block_size), _tokens(batch, 1)
        if graph in ("embed", "target"):
            calls += [block, single]
        elif graph == "drafter":
            calls.append(block)
        elif graph == "head":
            calls += [{**block, "rows": block_size - 1}, {**block, "rows": block_size}, {**single, "rows": 1}]
        elif graph == "accept":
            calls += [{"batch": batch, "verified": block_size}, {"batch": batch, "verified": 1}]
        else:
            assert graph.startswith("refiner-k"), f"no calls are known of graph {graph}"
            calls.append({"batch": batch})
    return tuple(call for index, call in enumerate(calls) if call not in calls[:index])


def _tokens(batch: int, tokens: int) -> Sizes:
    return {"batch": batch, "tokens": tokens}


def dim_ranges(graph: str, profile: ProfileSet, layout: str, block_size: int) -> tuple[Mapping[str, tuple[int, int, int]], ...]:
    """The optimization profiles of an engine as (min, opt, max) of each dynamic dim: one for each call, or one that spans them all.

    The spanning one is tuned for the largest call of a round, a whole block of every sequence.
    """
    calls = graph_calls(graph, profile, block_size)
    if layout == "pinned":
        return tuple({dim: (size, size, size) for dim, size in call.items()} for call in calls)
    round_call = {"batch": profile.batch, "tokens": block_size, "rows": block_size, "verified": block_size}
    return ({dim: (min(call[dim] for call in calls), round_call[dim], max(call[dim] for call in calls)) for dim in calls[0]},)


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
