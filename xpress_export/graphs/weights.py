"""One weights file for all graphs of a set: each tensor is written once, whichever graphs use it."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np
import onnx_ir as ir

WEIGHTS_FILE = "weights.bin"
# Whole pages, so that a runtime can map every tensor of some size on its own.
_ALIGNMENT = 4096
# Smaller tensors (norm weights, constants) stay inside their graph.
_MIN_EXTERNAL_BYTES = 16 * 1024


class WeightStore:
    """Appends tensors to ``<folder>/weights.bin`` and hands out ONNX external-data references to them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BinaryIO = (folder / WEIGHTS_FILE).open("xb")
        self._offsets: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()

    def externalize(self, model: ir.Model) -> None:
        """Move the model's large initializers into the file; the model then refers to them."""
        for value in model.graph.initializers.values():
            tensor = value.const_value
            if tensor is None or tensor.nbytes < _MIN_EXTERNAL_BYTES:
                continue
            value.const_value = ir.ExternalTensor(
                WEIGHTS_FILE,
                self._append(_raw(tensor)),
                tensor.nbytes,
                ir.DataType(tensor.dtype),
                shape=ir.Shape(tensor.numpy().shape),
                name=value.name or "",
                base_dir=self._folder,
            )
        self._file.flush()

    def _append(self, content: memoryview) -> int:
        digest = hashlib.sha256(content).hexdigest()
        if digest not in self._offsets:
            offset = self._file.tell()
            self._file.write(content)
            self._file.write(b"\0" * (-len(content) % _ALIGNMENT))
            self._offsets[digest] = offset
        return self._offsets[digest]


def _raw(tensor: ir.TensorProtocol) -> memoryview:
    """A tensor's bytes where they lie: a copy of a vocabulary's table would be the largest thing in memory. ONNX has them little-endian."""
    if sys.byteorder != "little":
        return memoryview(tensor.tobytes())
    return np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8).data
