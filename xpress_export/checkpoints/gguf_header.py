"""What a GGUF file says about itself, and whether transformers' reading of it is the whole truth.

transformers drops metadata and tensors that it does not know and fills in tensors that are missing, all without an error. So everything
that it would drop or make up is refused here, before it loads the file. This module knows nothing about values of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xpress_export.checkpoints.locate import one_line, shown
from xpress_runtime.errors import CheckpointError, MissingExtraError

REQUIRED = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count", "attention.layer_norm_rms_epsilon")

LAYER_TENSORS = (
    *("attn_norm.weight", "attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_output.weight"),
    *("ffn_norm.weight", "ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"),
)
# What each architecture has in a layer beside those. A Mistral's is "llama": no converter writes one of its own.
ARCHITECTURES: Mapping[str, tuple[str, ...]] = {
    "llama": (),
    "qwen2": ("attn_q.bias", "attn_k.bias", "attn_v.bias"),
    "qwen3": ("attn_q_norm.weight", "attn_k_norm.weight"),
}


class GgufHeader:
    """Scalar metadata and tensor names of a GGUF file."""

    def __init__(self, path: Path, values: Mapping[str, Any], tensor_names: frozenset[str]) -> None:
        self.path = path
        self.values = values
        self.tensor_names = tensor_names

    @classmethod
    def from_file(cls, path: Path) -> GgufHeader:
        try:
            from gguf import GGUFReader
        except ImportError:
            raise MissingExtraError("gguf", "export") from None
        try:
            reader = GGUFReader(path)
            # Arrays (the token lists) are not needed and slow to convert.
            values = {name: field.contents() for name, field in reader.fields.items() if len(field.types) == 1}
            names = frozenset(tensor.name for tensor in reader.tensors)
        except (OSError, ValueError, KeyError, IndexError, TypeError, UnicodeDecodeError, MemoryError, OverflowError) as problem:
            raise CheckpointError(f"{path} is damaged or not a GGUF file ({one_line(problem)}); fetch it again") from None
        return cls(path, values, names)

    @property
    def architecture(self) -> str:
        return str(self.values.get("general.architecture"))

    @property
    def licence(self) -> str | None:
        value = self.values.get("general.license")
        return value if isinstance(value, str) and value else None

    def value(self, name: str) -> Any:
        """Metadata of the architecture, such as ``rope.freq_base``."""
        return self.values.get(f"{self.architecture}.{name}")

    def refuse_unsupported(self) -> None:
        """Raise at the first thing that transformers would drop or make up."""
        if self.architecture not in ARCHITECTURES:
            raise CheckpointError(
                f"{self.path}: architecture '{shown(self.architecture)}' is not read from GGUF, expected {', '.join(ARCHITECTURES)}; "
                "give safetensors if its family is supported"
            )
        for name in REQUIRED:
            if self.value(name) is None:
                raise CheckpointError(f"{self.path}: metadata '{self.architecture}.{name}' is missing")
        for name, neutral in (
            ("expert_count", (0,)),
            ("attention.sliding_window", (0,)),
            ("rope.scaling.type", ("none",)),
            ("rope.scaling.factor", (0, 1)),
            ("rope.scale_linear", (0, 1)),
            ("logit_scale", (0, 1)),
        ):
            value = self.value(name)
            if value is not None and value not in neutral:
                raise CheckpointError(f"{self.path}: {self.architecture}.{name} is {shown(value)}, not read from GGUF; give safetensors")
        self._check_tensor_names()

    def check_head_dim(self, head_dim: int | None) -> None:
        """transformers does not read the head dim of some architectures, but assumes it."""
        for name in ("attention.key_length", "attention.value_length"):
            value = self.value(name)
            if value is not None and head_dim is not None and value != head_dim:
                raise CheckpointError(f"{self.path}: {self.architecture}.{name} is {value}, but transformers would assume {head_dim}")

    def _check_tensor_names(self) -> None:
        if "rope_freqs.weight" in self.tensor_names:
            raise CheckpointError(f"{self.path}: rope_freqs.weight (scaled rotary frequencies) is not read from GGUF; give safetensors")
        num_layers = self.value("block_count")
        if not isinstance(num_layers, int) or not 1 <= num_layers <= 1024:
            raise CheckpointError(f"{self.path}: {self.architecture}.block_count is {num_layers!r}, expected 1 to 1024")
        expected = {"token_embd.weight", "output_norm.weight"}
        for layer in range(num_layers):
            expected |= {f"blk.{layer}.{name}" for name in LAYER_TENSORS + ARCHITECTURES[self.architecture]}
        if missing := sorted(expected - self.tensor_names):
            raise CheckpointError(f"{self.path}: tensor '{missing[0]}' is missing, {self.architecture} has it; fetch the file again")
        if extra := sorted(self.tensor_names - expected - {"output.weight"}):
            raise CheckpointError(f"{self.path}: tensor '{shown(extra[0])}' is not part of a {self.architecture} that is supported")
