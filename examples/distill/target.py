"""The target of a run: found and checked as ``xpress-export build`` does, its tokenizer as the runtime has it, its model in transformers.

Knows nothing of prompts, features or drafters.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from examples.distill.settings import TargetSettings
from xpress_export.checkpoints import TargetCheckpoint, open_target
from xpress_export.checkpoints.tokenizer_files import write_tokenizer
from xpress_export.demo.target import fetch_demo_target
from xpress_runtime.errors import CheckpointError
from xpress_runtime.tokenizer import TextTokenizer

DEMO = "demo"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Target:
    """A checked checkpoint and what is read from it on demand."""

    def __init__(self, settings: TargetSettings) -> None:
        reference = str(fetch_demo_target()) if settings.checkpoint == DEMO else settings.checkpoint
        self.checkpoint: TargetCheckpoint = open_target(reference, settings.revision)
        self.name = settings.checkpoint

    @property
    def title(self) -> str:
        """The checkpoint's name without where it lies."""
        return self.checkpoint.location.path.stem if self.checkpoint.location.is_gguf else Path(self.name).name or self.name

    @property
    def identity(self) -> str:
        """sha256 of config and weights."""
        return self.checkpoint.identity()

    @property
    def stop_token_ids(self) -> list[int]:
        return list(self.checkpoint.eos_token_ids)

    def write_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer's files as a bundle has them. Raises CheckpointError where there is none."""
        if write_tokenizer(self.checkpoint.location.path, folder) is None:
            raise CheckpointError(f"{self.name} has no tokenizer, so no prompt can be turned into tokens for it")

    def tokenizer(self) -> TextTokenizer:
        """The tokenizer as the runtime will have it. Raises CheckpointError where it does not fit the checkpoint."""
        # A folder of its own: several processes may be doing this.
        with TemporaryDirectory() as folder:
            self.write_tokenizer(Path(folder))
            tokenizer = TextTokenizer.open(Path(folder))
        rows = self.checkpoint.config.vocab_size
        if tokenizer.vocab_size > rows:
            raise CheckpointError(
                f"{self.name}: the tokenizer has {tokenizer.vocab_size} tokens, and embedding and head have {rows} rows; "
                "take the tokenizer that belongs to this checkpoint"
            )
        return tokenizer

    def special_token_ids(self) -> dict[str, int]:
        """Ids of the tokenizer's special tokens by their names, such as "pad_token"."""
        tokenizer = self.tokenizer()
        found = {name: tokenizer.token_id(token) for name, token in tokenizer.special_tokens.items()}
        return {name: token for name, token in found.items() if token is not None}

    def model(self, precision: str, device: torch.device) -> Any:
        """The causal LM in transformers, ready to be called."""
        from transformers import AutoModelForCausalLM, GgufConfig

        location = self.checkpoint.location
        where: dict[str, Any] = {}
        if location.is_gguf:
            # Dense: packed weights compute in fp32 whatever the precision.
            where = {"gguf_file": location.path.name, "quantization_config": GgufConfig(dequantize=True)}
        model: Any = AutoModelForCausalLM.from_pretrained(
            location.folder, dtype=DTYPES[precision], attn_implementation="sdpa", trust_remote_code=False, local_files_only=True, **where
        )
        return model.to(device).eval()
