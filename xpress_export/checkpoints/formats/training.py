"""A training checkpoint: a .pt file with the drafter's and the refiner's tensors, beside the config.json of the drafter it started from.

The file is data: nothing that it names is imported or called, but ``argparse.Namespace`` for the options of the training run.
"""

from __future__ import annotations

import argparse
import pickle
import re
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xpress_export.checkpoints.formats.description import DFLASH_ARCHITECTURE, XPRESS_ARCHITECTURE, DrafterDescription
from xpress_export.checkpoints.formats.serving import describe_serving
from xpress_export.checkpoints.locate import CONFIG_FILE, TRAINING_SUFFIXES, Location, one_line, shown
from xpress_export.checkpoints.tensors import INDEX_NAME, WEIGHTS_NAME, require_finite
from xpress_runtime.errors import CheckpointError, OptionError
from xpress_runtime.fields import Fields

DRAFT, REFINER = "draft_state_dict", "refiner_state_dict"
HEAD_PREFIX = "xpress_head."
# Data-parallel training puts this before every name.
PARALLEL_PREFIX = "module."
DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
DEFAULT_PASSES = 6

# What a damaged or hostile file makes torch's reader raise. It reads data only, so none of them comes from code of the file's.
READ_ERRORS = (
    *(pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError, KeyError, IndexError, TypeError, AttributeError),
    *(AssertionError, MemoryError, OverflowError, struct.error),
)
NAMED_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")


class TrainingSource:
    """Tensors of a training checkpoint, mapped from the file. Names: ``draft_state_dict.…`` and ``refiner_state_dict.…``."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        self.path = path
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.dtypes = {name: DTYPES[tensor.dtype] for name, tensor in tensors.items()}
        self._tensors = tensors

    @classmethod
    def from_file(cls, path: Path) -> TrainingSource:
        """Read the file's structure and check what it holds; values stay on disk. Raises CheckpointError."""
        content = _load(path)
        tensors: dict[str, Tensor] = {}
        for part in (DRAFT, REFINER):
            held = content.get(part) if isinstance(content, dict) else None
            if not isinstance(held, dict):
                found = ", ".join(shown(name, 40) for name in list(content)[:5]) if isinstance(content, dict) else type(content).__name__
                raise CheckpointError(
                    f"{path}: '{part}' is missing, expected a dict with {DRAFT} and {REFINER}; found {found or 'nothing'}"
                )
            tensors |= {f"{part}.{name}": tensor for name, tensor in _named_tensors(path, part, held).items()}
        return cls(path, tensors)

    def read(self, name: str) -> Tensor:
        return require_finite(self._tensors[name].to(torch.float32, copy=True), name, str(self.path))

    def stored(self, name: str) -> Tensor:
        """One tensor in its stored dtype, in the mapped file."""
        return self._tensors[name]


def training_file(location: Location) -> Path | None:
    """The .pt file that a location is or holds in the place of other weights; CheckpointError where there are several."""
    if location.is_training_file:
        return location.path
    if not location.path.is_dir() or any((location.path / name).exists() for name in (WEIGHTS_NAME, INDEX_NAME)):
        return None
    if any(location.path.glob("*.safetensors")):
        return None
    found = sorted(path for suffix in TRAINING_SUFFIXES for path in location.path.glob(f"*{suffix}"))
    if len(found) > 1:
        names = ", ".join(path.name for path in found[:3])
        raise CheckpointError(f"'{location.path}' holds several training checkpoints ({names}); name the one to use")
    return found[0] if found else None


def training_beside(folder: Path) -> Path | None:
    """A .pt file that looks like a training checkpoint, in a folder whose other weights are read in its place."""
    # What trainers leave of their own state.
    state = ("optimizer", "scheduler", "rng_state", "training_args")
    found = sorted(path for suffix in TRAINING_SUFFIXES for path in folder.glob(f"*{suffix}") if not path.name.startswith(state))
    return found[0] if found else None


def base_fields(path: Path, base_config: Path | None) -> Fields:
    """config.json of the drafter that training started from: beside the file, or ``base_config``, a file or a folder that has it."""
    if base_config is not None:
        place = base_config / CONFIG_FILE if base_config.is_dir() else base_config
        if not place.exists():
            raise OptionError(f"--base-config {base_config} does not exist or holds no {CONFIG_FILE}")
        return Fields.from_file(place, CheckpointError)
    beside = path.parent / CONFIG_FILE
    if not beside.exists():
        raise CheckpointError(
            f"{path} does not say its sizes: put the base drafter's {CONFIG_FILE} beside it, or name that file in "
            "'xpress-export convert --base-config'"
        )
    return Fields.from_file(beside, CheckpointError)


def describe_training(fields: Fields, source: TrainingSource) -> DrafterDescription:
    """The drafter of a training checkpoint; ``fields`` are the base drafter's, the refiner's sizes those of its tensors."""
    if fields.values.get("architectures") not in ([DFLASH_ARCHITECTURE], [XPRESS_ARCHITECTURE]):
        raise CheckpointError(
            f"{fields.origin} is not the config of a base drafter; its architecture must be {DFLASH_ARCHITECTURE} or {XPRESS_ARCHITECTURE}"
        )
    rank = _dimension(source, "w1.weight", 2, 1)
    sizes = {
        "xpress_rank": (rank, "w1.weight"),
        "xpress_mlp_hidden": (_dimension(source, "mlp.gate_proj.weight", 2, 0), "mlp.gate_proj.weight"),
        "xpress_block_size": (_dimension(source, "mix.L", 3, 2), "mix.L"),
    }
    values: dict[str, Any] = {**fields.values, "architectures": [XPRESS_ARCHITECTURE]}
    sources = {name: f"{CONFIG_FILE}: {name}" for name in fields}
    for name, (size, tensor) in sizes.items():
        for field in (name, "block_size") if name == "xpress_block_size" else (name,):
            if field in fields and fields.values[field] != size:
                raise CheckpointError(
                    f"{source.path}: tensor '{REFINER}.{tensor}' is made for {field} {size}, but {fields.origin} says "
                    f"{shown(fields.values[field])}"
                )
        values[name] = size
        sources[name] = f"the shape of {REFINER}.{tensor}"
    if "xpress_num_passes" not in fields:
        values["xpress_num_passes"] = max(1, min(DEFAULT_PASSES, values["xpress_block_size"] - 1))
        sources["xpress_num_passes"] = f"the default ({DEFAULT_PASSES}, or block_size - 1 if less)"
    values.setdefault("sample_from_anchor", False)
    sources.setdefault("sample_from_anchor", "the only form that is read")
    sources["architectures"] = f"{REFINER} is there"
    described = describe_serving(Fields(values, fields.origin, CheckpointError))
    return replace(described, format="training checkpoint", serving_config=values, sources=sources, published=_published)


def _published(name: str) -> str:
    return f"{REFINER}.{name.removeprefix(HEAD_PREFIX)}" if name.startswith(HEAD_PREFIX) else f"{DRAFT}.{name}"


def _dimension(source: TrainingSource, tensor: str, num_dims: int, axis: int) -> int:
    name = f"{REFINER}.{tensor}"
    shape = source.shapes.get(name)
    if shape is None:
        raise CheckpointError(f"{source.path}: tensor '{name}' is missing")
    if len(shape) != num_dims:
        raise CheckpointError(f"{source.path}: tensor '{name}' has shape {list(shape)}, expected {num_dims} dimensions")
    return shape[axis]


def _load(path: Path) -> Any:
    if not path.is_file() or (packed := _packed_entry(path)) is None:
        raise CheckpointError(f"{path} is damaged or not a file of torch.save in its zip format; fetch it again, or save it anew")
    if packed:
        # torch.save stores; what is compressed may unpack to any size.
        raise CheckpointError(f"{path} is no file of torch.save: its entry '{shown(packed)}' is compressed; save it anew")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            if unsafe := sorted(map(str, torch.serialization.get_unsafe_globals_in_checkpoint(path))):
                raise _needs_code(path, unsafe[0])
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except READ_ERRORS as problem:
        if named := NAMED_GLOBAL.search(str(problem)):
            raise _needs_code(path, named[1]) from None
        raise CheckpointError(f"{path} cannot be read as a training checkpoint: {one_line(problem)}; fetch it again") from None


def _packed_entry(path: Path) -> str | None:
    """The first entry that is compressed, empty where none is; None where the file is no zip archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            return next((entry.filename for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED), "")
    except (zipfile.BadZipFile, NotImplementedError, *READ_ERRORS):
        return None


def _needs_code(path: Path, name: str) -> CheckpointError:
    return CheckpointError(
        f"{path} holds a Python object ({shown(name)}), which could run code and is never loaded; save its tensors without it"
    )


def _named_tensors(path: Path, part: str, held: Mapping[Any, Any]) -> dict[str, Tensor]:
    """The tensors of one part, dense and on the CPU, without the prefix of data-parallel training."""
    tensors: dict[str, Tensor] = {}
    parallel = bool(held) and all(isinstance(name, str) and name.startswith(PARALLEL_PREFIX) for name in held)
    for name, tensor in held.items():
        named = f"{path}: {part} entry '{shown(name)}'"
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise CheckpointError(f"{named} is no tensor under a name but a {type(tensor).__name__}")
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.dtype not in DTYPES:
            raise CheckpointError(
                f"{named} is a {tensor.dtype} tensor ({tensor.layout}, {tensor.device.type}), expected a dense one of "
                f"{', '.join(DTYPES.values())}"
            )
        tensors[name.removeprefix(PARALLEL_PREFIX) if parallel else name] = tensor.detach().resolve_neg()
    return tensors
