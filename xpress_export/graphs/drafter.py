"""Graph ``drafter``: block embeddings [B, P, H], taps [B, S, T·H], context and block position [B], caches → hidden [B, P, H], caches."""

from __future__ import annotations

from xpress_export.graphs.spec import GraphSpec, TensorSpec, cache_dims, cache_specs
from xpress_export.models.drafter import Drafter


def drafter_graph(module: Drafter) -> GraphSpec:
    config = module.config
    backbone = config.backbone
    dtype = module.norm.weight.dtype
    dims = cache_dims(backbone.num_kv_heads, backbone.head_dim, module.num_positions, module.attention_form)
    return GraphSpec(
        name="drafter",
        module=module,
        inputs=(
            TensorSpec("embeddings", ("B", config.block_size, backbone.hidden_size), dtype),
            TensorSpec("taps", ("B", "S", len(config.tap_layers) * backbone.hidden_size), dtype),
            TensorSpec("context_position", ("B",)),
            TensorSpec("block_position", ("B",)),
            cache_specs("key_cache", backbone.num_layers, dims, dtype),
            cache_specs("value_cache", backbone.num_layers, dims, dtype),
        ),
        outputs=(
            TensorSpec("hidden", ("B", config.block_size, backbone.hidden_size), dtype),
            *cache_specs("key_cache_out", backbone.num_layers, dims, dtype),
            *cache_specs("value_cache_out", backbone.num_layers, dims, dtype),
        ),
    )
