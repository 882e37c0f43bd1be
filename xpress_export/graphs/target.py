"""Graph ``target``: embeddings [B, S, H], position [B], caches → hidden [B, S, H], taps [B, S, T·H], caches.

One graph serves prefill, verification and single-token decoding.
"""

from __future__ import annotations

from xpress_export.graphs.spec import GraphSpec, TensorSpec, cache_dims, cache_specs
from xpress_export.models.decoder import Decoder


def target_graph(module: Decoder) -> GraphSpec:
    config = module.config
    dtype = module.norm.weight.dtype
    dims = cache_dims(config.num_kv_heads, config.head_dim, module.num_positions, module.attention_form)
    return GraphSpec(
        name="target",
        module=module,
        inputs=(
            TensorSpec("embeddings", ("B", "S", config.hidden_size), dtype),
            TensorSpec("position", ("B",)),
            cache_specs("key_cache", config.num_layers, dims, dtype),
            cache_specs("value_cache", config.num_layers, dims, dtype),
        ),
        outputs=(
            TensorSpec("hidden", ("B", "S", config.hidden_size), dtype),
            TensorSpec("taps", ("B", "S", len(module.tap_layers) * config.hidden_size), dtype),
            *cache_specs("key_cache_out", config.num_layers, dims, dtype),
            *cache_specs("value_cache_out", config.num_layers, dims, dtype),
        ),
    )
