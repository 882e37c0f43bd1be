"""A drafter of any format → a folder in the serving format: config.json, safetensors, and conversion.json, which says what came from where.

Tensors keep their dtype and every bit; one shard of them is in memory at a time. What the converted drafter is worth is no question here.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from xpress_export.checkpoints.drafter import DrafterCheckpoint, open_drafter
from xpress_export.checkpoints.formats.description import IN_DRAFT, OWN_EMBEDDING, OWN_HEAD, TO_TARGET
from xpress_export.checkpoints.locate import CONFIG_FILE, one_line
from xpress_export.checkpoints.renamed import RenamedSource
from xpress_export.checkpoints.tensors import INDEX_NAME, require_finite
from xpress_export.models.refiner import AnchorPredecessor
from xpress_export.staging import Written, refuse_existing, staged_folder
from xpress_runtime.errors import CheckpointError, OptionError, OutputError
from xpress_runtime.version import VERSION

CONVERSION_FILE = "conversion.json"
MAX_SHARD_BYTES = 5_000_000_000
_SHARD_NAMES = "model{suffix}.safetensors"
_CARRIED = ("README*", "LICENSE*", "LICENCE*", "NOTICE*")
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "BOOL": 1}
CONVERTED = Written(
    re.compile(r"config\.json|conversion\.json|model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"),
    "a converted drafter",
    (CONVERSION_FILE, "carried_over"),
    marked=True,
)


@dataclass(frozen=True)
class Conversion:
    """What was written and where it came from: ``fields`` of config.json, ``tensors`` by their new names, and what was ``left_out``."""

    folder: Path
    source: str
    revision: str | None
    format: str
    identity: str
    fields: Mapping[str, str]
    tensors: Mapping[str, str]
    left_out: Mapping[str, str]
    carried: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """All but the folder, as conversion.json has it."""
        return {
            "converted_by": f"xpress-export {VERSION}",
            "source": self.source,
            "revision": self.revision,
            "format": self.format,
            "identity": self.identity,
            "fields": dict(self.fields),
            "tensors": dict(self.tensors),
            "left_out": dict(self.left_out),
            "carried_over": list(self.carried),
        }


def convert_drafter(
    drafter: DrafterCheckpoint,
    output: Path,
    *,
    num_passes: int | None = None,
    anchor_predecessor: AnchorPredecessor | None = None,
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Conversion:
    """Write ``drafter`` to the folder ``output``, complete or not at all, and check that it reads back as the same drafter.

    ``num_passes`` and ``anchor_predecessor`` replace what the checkpoint says. Raises OptionError, OutputError and CheckpointError.
    """
    config, fields, changed = _config(drafter, num_passes, anchor_predecessor)
    _refuse_output(drafter, output, overwrite=overwrite)
    tensors = drafter.tensors
    assert isinstance(tensors, RenamedSource), "a drafter known by its config alone has no tensors to convert"
    source = drafter.location.source if drafter.location.revision is not None else str(drafter.location.path.absolute())
    needed = sum(_num_bytes(tensors, name) for name in tensors.shapes)
    with staged_folder(output, needed_bytes=needed, replace=overwrite, written=CONVERTED) as staging:
        _write_json(staging / CONFIG_FILE, config)
        _write_tensors(tensors, staging, max_shard_bytes)
        carried = _carry_over(drafter.location.folder, staging)
        written = open_drafter(str(staging))
        identity = written.identity()
        same = (written.config, written.markov, written.refiner) == (drafter.config, drafter.markov, changed)
        if not same or written.tensors.sha256() != drafter.tensors.sha256():
            raise CheckpointError(f"{source} changed while it was converted; convert it again when nothing writes to it")
        conversion = Conversion(
            folder=output,
            source=source,
            revision=drafter.location.revision,
            format=drafter.format,
            identity=identity,
            fields=fields,
            tensors=tensors.published,
            left_out=_left_out(drafter),
            carried=carried,
        )
        _write_json(staging / CONVERSION_FILE, conversion.to_json())
    return conversion


def _refuse_output(drafter: DrafterCheckpoint, output: Path, *, overwrite: bool) -> None:
    """OutputError when ``output`` cannot become the converted folder: it is there already, or holds what no conversion wrote."""
    if output.exists() and output.resolve() in (drafter.location.folder.resolve(), drafter.location.path.resolve()):
        raise OutputError(f"{output} is the checkpoint itself; give another --output")
    refuse_existing(output, replace=overwrite, written=CONVERTED)


def _config(
    drafter: DrafterCheckpoint, num_passes: int | None, anchor_predecessor: AnchorPredecessor | None
) -> tuple[dict[str, Any], dict[str, str], object]:
    """config.json of the serving format, where each field came from, and the refiner that it describes."""
    config, fields = dict(drafter.description.serving_config), dict(drafter.description.sources)
    refiner = drafter.refiner
    # It names code beside the original, which is not carried over.
    config.pop("auto_map", None)
    fields.pop("auto_map", None)
    if refiner is None:
        for option, given in (("--num-passes", num_passes), ("--anchor-predecessor", anchor_predecessor)):
            if given is not None:
                raise OptionError(f"{option} is for drafters with a refiner, and '{drafter.location.source}' has none; leave it out")
    if refiner is not None and num_passes is not None:
        if not 1 <= num_passes < refiner.block_size:
            raise OptionError(f"--num-passes is {num_passes}, expected 1 to {refiner.block_size - 1} (block size - 1 settles every slot)")
        config["xpress_num_passes"], fields["xpress_num_passes"] = num_passes, "--num-passes"
        refiner = replace(refiner, num_passes=num_passes)
    if refiner is not None and anchor_predecessor is not None:
        _forget(config, "anchor_predecessor")
        config["anchor_predecessor"], fields["anchor_predecessor"] = anchor_predecessor, "--anchor-predecessor"
        refiner = replace(refiner, anchor_predecessor=anchor_predecessor)
    if OWN_HEAD in drafter.tensors.shapes and "draft_vocab_size" not in config:
        config["draft_vocab_size"], fields["draft_vocab_size"] = drafter.config.draft_vocab_size, f"{OWN_HEAD} is there"
    return config, fields, refiner


def _forget(config: dict[str, Any], name: str) -> None:
    """Remove a field that may stand in dflash_config, too."""
    config.pop(name, None)
    if isinstance(config.get("dflash_config"), Mapping):
        config["dflash_config"] = {other: value for other, value in config["dflash_config"].items() if other != name}


def _write_tensors(tensors: RenamedSource, folder: Path, max_shard_bytes: int) -> None:
    from huggingface_hub import split_state_dict_into_shards_factory
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    split = split_state_dict_into_shards_factory(
        {name: (name,) for name in tensors.shapes},
        get_storage_size=lambda held: _num_bytes(tensors, held[0]),
        filename_pattern=_SHARD_NAMES,
        max_shard_size=max_shard_bytes,
    )
    for file, names in split.filename_to_tensors.items():
        # Copies: tensors of a training checkpoint may share memory, and mapped ones are read here.
        held = {name: require_finite(tensors.stored(name).contiguous().clone(), name, file) for name in names}
        try:
            save_file(held, folder / file, metadata={"format": "pt"})
        except SafetensorError as problem:
            # What the system refuses arrives so, and not as an OSError.
            raise OutputError(f"{folder / file} cannot be written: {one_line(problem)}") from None
    if split.is_sharded:
        _write_json(folder / INDEX_NAME, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})


def _num_bytes(tensors: RenamedSource, name: str) -> int:
    size = _ITEM_BYTES[tensors.dtypes[name]]
    for length in tensors.shapes[name]:
        size *= length
    return size


def _carry_over(source: Path, folder: Path) -> tuple[str, ...]:
    """Copy what says who made the checkpoint and on which terms."""
    found = sorted({path.name: path for pattern in _CARRIED for path in source.glob(pattern) if path.is_file()}.items())
    for name, path in found:
        shutil.copyfile(path, folder / name)
    return tuple(name for name, _path in found)


def _left_out(drafter: DrafterCheckpoint) -> dict[str, str]:
    """Tensors that the serving format has no place for."""
    reasons = {
        OWN_EMBEDDING: "the target's own table; whether it equals that is checked where a target is given, and not after this conversion",
        IN_DRAFT: f"follows from {TO_TARGET}",
    }
    return {name: reasons.get(name, "read by no part of the drafter") for name in sorted(drafter.unused_tensors)}


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
