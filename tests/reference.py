"""Drafter, refiner and greedy round in plain PyTorch, written from the method's equations: no static cache, no packing, one row.

Independent of the package on purpose. Reads the serving format by itself and keeps every context row in a list.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


class ReferenceDrafter:
    """An xPress folder and its target's embedding table and head [V, H]."""

    def __init__(self, folder: Path, embedding: Tensor, head: Tensor) -> None:
        self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.weights = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
        self.embedding, self.head = embedding, head
        self.block_size: int = self.config["block_size"]
        self.mask: int = self.config["dflash_config"]["mask_token_id"]
        self.taps: list[int] = self.config["dflash_config"]["target_layer_ids"]

    def draft(self, context_taps: Tensor, anchor: int, predecessor: int, num_passes: int) -> list[int]:
        """Drafts of slots 1 … P-1. ``context_taps`` [length, T·H]: every verified row before the anchor."""
        hidden = self._backbone(context_taps, anchor)
        return self._refine(hidden, anchor, predecessor, num_passes)

    def _backbone(self, context_taps: Tensor, anchor: int) -> Tensor:
        w, config = self.weights, self.config
        heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        length = context_taps.shape[0]
        context = self._norm(context_taps @ w["fc.weight"].T, w["hidden_norm.weight"])
        x = self.embedding[torch.tensor([anchor] + [self.mask] * (self.block_size - 1))]
        for layer in range(config["num_hidden_layers"]):
            p = f"layers.{layer}."
            states = self._norm(x, w[p + "input_layernorm.weight"])
            rows = torch.cat([context, states])
            q = self._norm((states @ w[p + "self_attn.q_proj.weight"].T).view(-1, heads, dim), w[p + "self_attn.q_norm.weight"])
            k = self._norm((rows @ w[p + "self_attn.k_proj.weight"].T).view(-1, kv_heads, dim), w[p + "self_attn.k_norm.weight"])
            v = (rows @ w[p + "self_attn.v_proj.weight"].T).view(-1, kv_heads, dim)
            q, k = self._rotate(q, length), self._rotate(k, 0)
            attended = []
            for head in range(heads):
                group = head // (heads // kv_heads)
                scores = q[:, head] @ k[:, group].T / dim**0.5
                attended.append(scores.softmax(-1) @ v[:, group])
            x = x + torch.cat(attended, dim=-1) @ w[p + "self_attn.o_proj.weight"].T
            states = self._norm(x, w[p + "post_attention_layernorm.weight"])
            gate, up = states @ w[p + "mlp.gate_proj.weight"].T, states @ w[p + "mlp.up_proj.weight"].T
            x = x + (torch.nn.functional.silu(gate) * up) @ w[p + "mlp.down_proj.weight"].T
        return self._norm(x, w["norm.weight"])

    def _refine(self, hidden: Tensor, anchor: int, predecessor: int, num_passes: int) -> list[int]:
        w = {name.removeprefix("xpress_head."): tensor for name, tensor in self.weights.items()}
        base = hidden[1:] @ self.head.T
        drafts: list[int] = base.argmax(-1).tolist()
        if not num_passes:
            return drafts
        mean = hidden.mean(dim=0, keepdim=True).expand_as(hidden)
        mixer = torch.tril(w["mix.L"]) + torch.eye(self.block_size)
        for _ in range(num_passes):
            previous = torch.tensor([predecessor, anchor, *drafts[:-1]])
            features = torch.cat([hidden @ w["down_h.weight"].T, mean @ w["down_g.weight"].T, w["w1.weight"][previous]], dim=-1)
            z = features @ w["in_proj.weight"].T
            u = torch.einsum("rkj,jr->kr", mixer, z)
            u = (
                u
                + (torch.nn.functional.silu(u @ w["mlp.gate_proj.weight"].T) * (u @ w["mlp.up_proj.weight"].T))
                @ w["mlp.down_proj.weight"].T
            )
            drafts = (base + (u @ w["w2.weight"].T)[1:]).argmax(-1).tolist()
        return drafts

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]) * weight

    def _rotate(self, x: Tensor, start: int) -> Tensor:
        dim = x.shape[-1]
        frequencies = 1.0 / self.config["rope_theta"] ** (torch.arange(0, dim, 2).double() / dim)
        angles = torch.arange(start, start + x.shape[0]).double()[:, None] * frequencies
        cos, sin = angles.cos().float()[:, None], angles.sin().float()[:, None]
        first, second = x[..., : dim // 2], x[..., dim // 2 :]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def greedy_rounds(drafter: ReferenceDrafter, taps: Tensor, prompt: Sequence[int], output: Sequence[int], num_passes: int) -> list[int]:
    """Kept tokens of every round that it takes to make ``output`` (the target's own greedy tokens, the first from prefill).

    ``taps`` [prompt + output, T·H]: the target's taps over the whole text. The target accepts a draft exactly where it equals ``output``.
    """
    text = [*prompt, *output]
    position = len(prompt)
    kept = []
    while position < len(text) - 1:
        drafts = drafter.draft(taps[:position], text[position], text[position - 1], num_passes)
        remaining = text[position + 1 :]
        accepted = 0
        while accepted < len(drafts) and accepted < len(remaining) and drafts[accepted] == remaining[accepted]:
            accepted += 1
        # The bonus token follows the accepted drafts, unless the output ends before it.
        emitted = min(accepted + 1, len(remaining))
        kept.append(emitted)
        position += emitted
    return kept
