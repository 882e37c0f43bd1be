"""The decoder of an autoregressive drafter: one like the target's, with caches of its own, that nothing taps."""

from __future__ import annotations

from torch import Tensor, nn

from xpress_export.models.decoder import Decoder, DecoderConfig
from xpress_runtime.sets import AttentionForm


class DraftDecoder(nn.Module):
    """Embeddings [B, S, H] at position [B] on caches [B, kv heads, N, D] → hidden [B, S, H] after the final norm, updated caches."""

    def __init__(self, config: DecoderConfig, num_positions: int, attention_form: AttentionForm) -> None:
        super().__init__()
        # The last layer's tap is the hidden state itself: it costs nothing and is dropped.
        self.decoder = Decoder(config, (config.num_layers - 1,), num_positions, attention_form)

    def forward(
        self, embeddings: Tensor, position: Tensor, key_caches: list[Tensor], value_caches: list[Tensor]
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        hidden, _taps, keys, values = self.decoder(embeddings, position, key_caches, value_caches)
        return hidden, keys, values
