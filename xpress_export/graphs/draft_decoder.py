"""Graph ``draft-decoder``: embeddings [B, S, H], position [B], caches → hidden [B, S, H], caches.

The autoregressive drafter's: its prefill, the tokens that it missed, and its single steps.
"""

from __future__ import annotations

from xpress_export.graphs.spec import GraphSpec, TensorSpec, cache_dims, cache_specs
from xpress_export.models.draft_decoder import DraftDecoder


def draft_decoder_graph(module: DraftDecoder) -> GraphSpec:
    decoder = module.decoder
    config = decoder.config
    dtype = decoder.norm.weight.dtype
    hidden = ("B", "S", config.hidden_size)
    dims = cache_dims(config.num_kv_heads, config.head_dim, decoder.num_positions, decoder.attention_form)
    return GraphSpec(
        name="draft-decoder",
        module=module,
        inputs=(
            TensorSpec("embeddings", hidden, dtype),
            TensorSpec("position", ("B",)),
            cache_specs("key_cache", config.num_layers, dims, dtype),
            cache_specs("value_cache", config.num_layers, dims, dtype),
        ),
        outputs=(
            TensorSpec("hidden", hidden, dtype),
            *cache_specs("key_cache_out", config.num_layers, dims, dtype),
            *cache_specs("value_cache_out", config.num_layers, dims, dtype),
        ),
    )
