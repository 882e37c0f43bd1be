"""transformers as the reference for the target: logits of a sequence, and greedy continuation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from xpress_export.checkpoints import Location


@dataclass(frozen=True)
class ReferenceRun:
    """Greedy tokens, and the logits [steps, V] that each was chosen from."""

    tokens: list[int]
    logits: NDArray[np.float32]


class TransformersReference:
    """A target in transformers, fp32 on the CPU, eager attention."""

    def __init__(self, location: Location, stop_token_ids: Sequence[int]) -> None:
        from transformers import AutoModelForCausalLM

        where: dict[str, Any] = {"gguf_file": location.path.name} if location.is_gguf else {}
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            location.folder, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False, local_files_only=True, **where
        )
        self._model.eval()  # type: ignore[no-untyped-call]
        self._stop_token_ids = list(stop_token_ids)

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits [S, V] of a sequence in one pass."""
        output: NDArray[np.float32] = self._model(torch.tensor([list(tokens)])).logits[0].float().numpy()
        return output

    @torch.inference_mode()
    def hidden_states(self, tokens: Sequence[int], layers: Sequence[int]) -> torch.Tensor:
        """Hidden states [S, len(layers) · H] after the 0-based ``layers`` of a sequence in one pass."""
        states = self._model(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states
        # The first entry is the embedding's output.
        return torch.cat([states[layer + 1][0] for layer in layers], dim=-1).float()

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> ReferenceRun:
        """Greedy continuation; ends with a stop token or at ``max_new_tokens``."""
        from transformers import GenerationConfig

        # A config of our own: a checkpoint's may ask for sampling or penalties.
        config = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=self._stop_token_ids or None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        ids = torch.tensor([list(prompt)])
        output = self._model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        logits = np.stack([step[0].float().numpy() for step in output.logits])
        return ReferenceRun(output.sequences[0, len(prompt) :].tolist(), logits)
