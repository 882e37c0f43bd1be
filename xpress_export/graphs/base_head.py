"""Graph ``base-head``: hidden [B, S, H] and the rows wanted [B, R] → base logits [B, R, V] fp32 and token [B, R] (argmax).

A set has it only where the block's logits differ from what graph ``head`` gives.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from xpress_export.graphs.head import head_graph
from xpress_export.graphs.spec import GraphSpec, TensorSpec
from xpress_export.models.base_head import BaseHead


def base_head_graph(module: BaseHead, vocab_size: int) -> GraphSpec:
    spec = head_graph(module.head)
    logits = TensorSpec("logits", ("B", "R", vocab_size), torch.float32)
    return replace(spec, name="base-head", module=module, outputs=(logits, *spec.outputs[1:]))
