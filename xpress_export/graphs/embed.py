"""Graph ``embed``: ids [B, S] → embeddings [B, S, H]."""

from __future__ import annotations

from xpress_export.graphs.spec import GraphSpec, TensorSpec
from xpress_export.models.decoder import Embedding


def embed_graph(module: Embedding) -> GraphSpec:
    hidden_size = module.table.shape[1]
    return GraphSpec(
        name="embed",
        module=module,
        inputs=(TensorSpec("ids", ("B", "S")),),
        outputs=(TensorSpec("embeddings", ("B", "S", hidden_size), module.table.dtype),),
    )
