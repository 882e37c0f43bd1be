"""Named tensors of a checkpoint, read one at a time as fp32: from safetensors, or from a GGUF file that transformers dequantises.

It knows files, dtypes and damage; it does not know which tensors a model should have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from xpress_export.checkpoints.gguf_header import GgufHeader
from xpress_export.checkpoints.locate import one_line, shown
from xpress_runtime.errors import CheckpointError, MissingExtraError
from xpress_runtime.fields import Fields

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
FLOAT_DTYPES = ("F32", "F16", "BF16")
INTEGER_DTYPES = ("I64", "I32", "BOOL")
READ_BYTES = 1 << 22


class Shaped(Protocol):
    """Names and shapes of tensors."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...


class TensorSource(Shaped, Protocol):
    """A checkpoint's tensors by published name."""

    def read(self, name: str) -> Tensor:
        """A private fp32 copy of one tensor; every value is finite."""
        ...

    def sha256(self) -> str:
        """Identity of the content."""
        ...


class StoredTensors(Shaped, Protocol):
    """Tensors that can be had as they are stored, too."""

    @property
    def dtypes(self) -> Mapping[str, str]:
        """Each tensor's dtype by the name that safetensors gives it."""
        ...

    def read(self, name: str) -> Tensor:
        """As :meth:`TensorSource.read`."""
        ...

    def stored(self, name: str) -> Tensor:
        """One tensor in its stored dtype. It may lie in a mapped file: copy what must outlive that."""
        ...


class SafetensorsSource:
    """``model.safetensors``, or the shards that ``model.safetensors.index.json`` names, all inside one folder."""

    def __init__(self, files: Mapping[str, Path], shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str]) -> None:
        self.shapes = shapes
        self.dtypes = dtypes
        self._files = files
        self._sha256: str | None = None

    @classmethod
    def from_folder(cls, folder: Path, integers: Collection[str] = ()) -> SafetensorsSource:
        """Read every header and check the index against the shards; no tensor is read yet.

        ``integers`` are names of tensors that hold ids or flags; every other tensor holds weights.
        """
        files: dict[str, Path] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        dtypes: dict[str, str] = {}
        for path in _weight_files(folder):
            for name, shape, dtype in _read_header(path):
                if name in files:
                    raise CheckpointError(f"tensor '{shown(name)}' is in two shards, {files[name].name} and {path.name} of {folder}")
                if name in integers:
                    if dtype not in INTEGER_DTYPES:
                        raise CheckpointError(f"{path}: tensor '{name}' has dtype {dtype}, expected {', '.join(INTEGER_DTYPES)}")
                elif dtype not in FLOAT_DTYPES:
                    raise CheckpointError(
                        f"{path}: tensor '{shown(name)}' has dtype {dtype}, expected {', '.join(FLOAT_DTYPES)}; "
                        "quantised checkpoints are not read, give the original"
                    )
                files[name], shapes[name], dtypes[name] = path, shape, dtype
        if (folder / INDEX_NAME).exists():
            _check_index(folder, files)
        return cls(files, shapes, dtypes)

    def read(self, name: str) -> Tensor:
        tensor = self.stored(name)
        # A copy even where the dtype fits: what lies behind a mapped file may change or vanish while a build runs.
        wide = tensor.to(torch.float32, copy=True)
        return require_finite(wide, name, str(self._files[name]))

    def sha256(self) -> str:
        """Over names, dtypes, shapes and values: the same for one file and for shards."""
        if self._sha256 is None:
            self._sha256 = stored_sha256(self, {name: name for name in self.shapes})
        return self._sha256

    def stored(self, name: str) -> Tensor:
        from safetensors import SafetensorError, safe_open

        path = self._files[name]
        try:
            with safe_open(path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
        except (SafetensorError, OSError, ValueError) as problem:
            raise _damaged(path, problem) from None
        return tensor


class GgufSource:
    """A GGUF file, dequantised by transformers. The whole model is in memory: transformers has no lazier way."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], licence: str | None) -> None:
        self.path = path
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.config = config
        self.licence = licence
        self._tensors = tensors
        self._sha256: str | None = None

    @classmethod
    def from_file(cls, path: Path) -> GgufSource:
        header = GgufHeader.from_file(path)
        header.refuse_unsupported()
        from transformers import AutoModelForCausalLM

        try:
            model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        except ImportError as problem:
            raise MissingExtraError(problem.name or "gguf", "export") from None
        except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, NotImplementedError, RuntimeError) as problem:
            raise CheckpointError(f"{path} cannot be read as GGUF: {one_line(problem)}; fetch it again") from None
        config = model.config.to_dict()
        header.check_head_dim(config.get("head_dim"))
        # Says how the file was quantised; what we hold is dequantised.
        config.pop("quantization_config", None)
        tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        if config.get("tie_word_embeddings"):
            tensors.pop("lm_head.weight", None)
        return cls(path, tensors, config, header.licence)

    def read(self, name: str) -> Tensor:
        return require_finite(self._tensors[name].to(torch.float32, copy=True), name, str(self.path))

    def sha256(self) -> str:
        """Over the file as it is."""
        if self._sha256 is None:
            digest = hashlib.sha256()
            with self.path.open("rb") as file:
                while chunk := file.read(READ_BYTES):
                    digest.update(chunk)
            self._sha256 = digest.hexdigest()
        return self._sha256


def stored_sha256(source: StoredTensors, names: Mapping[str, str]) -> str:
    """sha256 over some tensors of a source, named by the keys of ``names``; the values are their names there."""
    digest = hashlib.sha256()
    for name, stored_as in sorted(names.items()):
        digest.update(f"{name}\0{source.dtypes[stored_as]}\0{source.shapes[stored_as]}\0".encode())
        digest.update(source.stored(stored_as).contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def require_finite(tensor: Tensor, name: str, origin: str) -> Tensor:
    """The tensor itself; a NaN or an infinity is an error. Minimum and maximum carry both, without a second tensor in memory."""
    if tensor.numel():
        low, high = torch.aminmax(tensor)
        if not torch.isfinite(low) or not torch.isfinite(high):
            raise CheckpointError(f"{origin}: tensor '{name}' holds values that are not finite; the file is damaged, fetch it again")
    return tensor


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / WEIGHTS_NAME, folder / INDEX_NAME
    if index.exists():
        if single.exists():
            raise CheckpointError(f"{folder} holds both {WEIGHTS_NAME} and {INDEX_NAME}; remove the one that is stale")
        return _shards(folder)
    if single.exists():
        return [single]
    others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.safetensors", "*.gguf") for path in folder.glob(pattern))
    if others:
        raise CheckpointError(
            f"{folder} has {others[0]} but no {WEIGHTS_NAME}; only safetensors are read, under that name or with {INDEX_NAME}"
        )
    raise CheckpointError(f"{folder} holds no weights; expected {WEIGHTS_NAME} or {INDEX_NAME} with its shards")


def _shards(folder: Path) -> list[Path]:
    weight_map = Fields.from_file(folder / INDEX_NAME, CheckpointError).nested("weight_map")
    shards: dict[str, Path] = {}
    for name in weight_map:
        if not name.isprintable():
            raise CheckpointError(f"{folder / INDEX_NAME}: '{shown(name)}' is no name of a tensor; fetch it again")
        shard = weight_map.text(name)
        # Shards lie beside their index. (Not decided by resolving: files of the hub's cache are links to elsewhere.)
        if shard in ("", "..") or Path(shard).name != shard or "\\" in shard or not shard.isprintable():
            raise CheckpointError(f"{folder / INDEX_NAME}: shard '{shown(shard)}' of tensor '{shown(name)}' is no file name here")
        if not shard.endswith(".safetensors"):
            raise CheckpointError(f"{folder / INDEX_NAME}: shard '{shown(shard)}' of tensor '{shown(name)}' is no safetensors file")
        if shard not in shards:
            path = folder / shard
            if not path.is_file():
                raise CheckpointError(f"{folder}: shard {shard} of tensor '{shown(name)}' is missing; fetch it again")
            shards[shard] = path
    if not shards:
        raise CheckpointError(f"{folder / INDEX_NAME}: weight_map is empty")
    return list(shards.values())


def _check_index(folder: Path, files: Mapping[str, Path]) -> None:
    weight_map = Fields.from_file(folder / INDEX_NAME, CheckpointError).nested("weight_map")
    for name in weight_map:
        shard = weight_map.text(name)
        if name not in files or files[name].name != shard:
            held = f"it is in {files[name].name}" if name in files else "no shard has it"
            raise CheckpointError(f"{folder / INDEX_NAME}: tensor '{shown(name)}' is not in its shard {shard}; {held}")
    for name, path in files.items():
        if name not in weight_map.values:
            raise CheckpointError(f"{folder / INDEX_NAME}: tensor '{shown(name)}' of {path.name} is not in the index")


def _read_header(path: Path) -> list[tuple[str, tuple[int, ...], str]]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise CheckpointError(f"{path} is no file; expected safetensors")
    try:
        with safe_open(path, framework="pt") as file:
            slices = [(name, file.get_slice(name)) for name in file.keys()]  # noqa: SIM118 - safe_open is no mapping
            return [(name, tuple(piece.get_shape()), piece.get_dtype()) for name, piece in slices]
    except (SafetensorError, OSError, ValueError) as problem:
        raise _damaged(path, problem) from None


def _damaged(path: Path, problem: Exception) -> CheckpointError:
    return CheckpointError(f"{path} is damaged or not a safetensors file ({one_line(problem)}); fetch it again")
