"""From published tensors to a module's parameters: which tensors make up a parameter, and how they lie in it.

It knows shapes and layouts and the names inside one decoder layer, which all published formats share; the rest of the names come with each
format (target.py, drafter.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from xpress_export.checkpoints.families import TensorLayout
from xpress_export.checkpoints.locate import shown
from xpress_export.checkpoints.tensors import Shaped, TensorSource
from xpress_export.models.decoder import DecoderConfig
from xpress_runtime.errors import CheckpointError

MAX_NAMES_SHOWN = 3


@dataclass(frozen=True)
class Published:
    """A tensor as the checkpoint names it, and the shape it must have."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Packed:
    """One parameter: its published parts side by side along the last axis, each transposed first where ``transposed``.

    Published matrices are [out, in]; ours are [in, out], so that a product is one MatMul with its weight as it lies on disk.
    """

    parts: tuple[Published, ...]
    transposed: bool = False
    # Added to what is published.
    offset: float = 0.0

    def read(self, source: TensorSource, dtype: torch.dtype = torch.float32) -> Tensor:
        """Fill the parameter part by part: beside it, at most one part is in memory, in fp32."""
        if len(self.parts) == 1 and not self.transposed:
            tensor = source.read(self.parts[0].name)
            return (tensor.add_(self.offset) if self.offset else tensor).to(dtype)
        widths = [part.shape[0] for part in self.parts]
        packed = torch.empty(*self.parts[0].shape[1:], sum(widths), dtype=dtype)
        start = 0
        for part, width in zip(self.parts, widths, strict=True):
            tensor = source.read(part.name)
            packed[..., start : start + width] = tensor.T if self.transposed else tensor
            start += width
        return packed


def plain(name: str, *shape: int, offset: float = 0.0) -> Packed:
    """One tensor as it is, or plus a number."""
    return Packed((Published(name, shape),), offset=offset)


def linear(ours: str, published: list[tuple[str, int]], in_features: int, *, bias: bool) -> dict[str, Packed]:
    """The parameters of one of our linear layers out of one or more published ones, given with their output widths."""
    weights = tuple(Published(f"{name}.weight", (width, in_features)) for name, width in published)
    plan = {f"{ours}.weight": Packed(weights, transposed=True)}
    if bias:
        plan[f"{ours}.bias"] = Packed(tuple(Published(f"{name}.bias", (width,)) for name, width in published))
    return plan


def layer_plan(ours: str, published: str, config: DecoderConfig, layout: TensorLayout, *, packed_qkv: bool) -> dict[str, Packed]:
    """One decoder layer. The target packs query, key and value; the drafter's queries read other rows than its keys, so they stay apart."""
    hidden, inner = config.hidden_size, config.intermediate_size

    def norm(name: str, theirs: str, size: int = hidden) -> dict[str, Packed]:
        return {f"{ours}.{name}.weight": plain(f"{published}.{theirs}.weight", size, offset=layout.norm_offset)}

    plan = norm("attention_norm", "input_layernorm")
    if layout.sandwich_norms:
        plan |= norm("attention_out_norm", "post_attention_layernorm")
        plan |= norm("mlp_norm", "pre_feedforward_layernorm") | norm("mlp_out_norm", "post_feedforward_layernorm")
    else:
        plan |= norm("mlp_norm", "post_attention_layernorm")
    query = (f"{published}.self_attn.q_proj", config.q_width)
    key_value = [(f"{published}.self_attn.k_proj", config.kv_width), (f"{published}.self_attn.v_proj", config.kv_width)]
    if packed_qkv:
        fused = [(f"{published}.self_attn.qkv_proj", config.q_width + 2 * config.kv_width)]
        plan |= linear(f"{ours}.attention.qkv", fused if layout.fused_projections else [query, *key_value], hidden, bias=config.qkv_bias)
    else:
        plan |= linear(f"{ours}.attention.query", [query], hidden, bias=config.qkv_bias)
        plan |= linear(f"{ours}.attention.key_value", key_value, hidden, bias=config.qkv_bias)
    plan |= linear(f"{ours}.attention.output", [(f"{published}.self_attn.o_proj", hidden)], config.q_width, bias=config.output_bias)
    if config.qk_norm:
        plan |= norm("attention.q_norm", "self_attn.q_norm", config.head_dim)
        plan |= norm("attention.k_norm", "self_attn.k_norm", config.head_dim)
    gate_up = [(f"{published}.mlp.gate_proj", inner), (f"{published}.mlp.up_proj", inner)]
    fused = [(f"{published}.mlp.gate_up_proj", 2 * inner)]
    plan |= linear(f"{ours}.mlp.gate_up", fused if layout.fused_projections else gate_up, hidden, bias=config.mlp_bias)
    plan |= linear(f"{ours}.mlp.down", [(f"{published}.mlp.down_proj", hidden)], inner, bias=config.mlp_bias)
    return plan


def read_plan(
    plan: Mapping[str, Packed], source: TensorSource, dtype: torch.dtype = torch.float32, fp32_parts: Collection[str] = ()
) -> dict[str, Tensor]:
    """Every parameter of a plan in ``dtype``, tensor by tensor; those of the modules named in ``fp32_parts`` stay fp32."""
    return {name: packed.read(source, torch.float32 if name.split(".")[0] in fp32_parts else dtype) for name, packed in plan.items()}


def expected_tensors(*plans: Mapping[str, Packed]) -> dict[str, tuple[int, ...]]:
    """Every published tensor that the plans read, with its shape."""
    return {part.name: part.shape for plan in plans for packed in plan.values() for part in packed.parts}


def check_tensors(source: Shaped, expected: Mapping[str, tuple[int, ...]], origin: str, allowed: Collection[str] = ()) -> None:
    """Names and shapes of all tensors against what the config asks for, before any of them is read.

    ``allowed`` are tensors that may be there although no module reads them.
    """
    if missing := [name for name in expected if name not in source.shapes]:
        raise CheckpointError(f"{origin}: {_named(missing)} missing, which config.json asks for")
    for name, shape in expected.items():
        if source.shapes[name] != shape:
            raise CheckpointError(f"{origin}: tensor '{name}' has shape {list(source.shapes[name])}, config.json asks for {list(shape)}")
    if extra := [name for name in source.shapes if name not in expected and name not in allowed]:
        raise CheckpointError(f"{origin}: {_named(extra)} not part of the model that config.json describes")


def _named(names: list[str]) -> str:
    listed = ", ".join(f"'{shown(name)}'" for name in names[:MAX_NAMES_SHOWN])
    more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
    return f"tensor {listed} is" if len(names) == 1 else f"tensors {listed}{more} are"
