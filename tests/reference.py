"""Drafter, refiner and greedy round in plain PyTorch, written from the method's equations: no static cache, no packing, one row.

Layers may have windows and be causal, rotary embeddings may be scaled (linear, llama3, yarn), logits and embeddings have factors, and some
tokens be all that is drafted (d2t).

Independent of the package on purpose. Reads the serving format by itself and keeps every context row in a list.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
        self.frequencies, self.rotary_factor = rotary_frequencies(self.config)
        self.never_drafted: Tensor | None = None
        if "d2t" in self.weights:
            offsets = self.weights["d2t"].long()
            tokens = torch.arange(len(offsets)) + offsets
            self.head = torch.zeros_like(head)
            self.head[tokens] = self.weights["lm_head.weight"]
            w2 = self.weights["xpress_head.w2.weight"]
            self.weights["xpress_head.w2.weight"] = torch.zeros(len(head), w2.shape[1])
            self.weights["xpress_head.w2.weight"][tokens] = w2
            self.never_drafted = torch.ones(len(head), dtype=torch.bool)
            self.never_drafted[tokens] = False

    def draft(self, context_taps: Tensor, anchor: int, predecessor: int, num_passes: int) -> list[int]:
        """Drafts of slots 1 … P-1. ``context_taps`` [length, T·H]: every verified row before the anchor."""
        hidden = self.hidden(context_taps, anchor)
        return self._refine(hidden, anchor, predecessor, num_passes)

    def base_logits(self, hidden: Tensor) -> Tensor:
        """Of slots 1 … P-1 [P-1, V], from the hidden states of the block [P, H]."""
        logits: Tensor = self.config.get("output_multiplier", 1.0) * (hidden[1:] @ self.head.T)
        cap = self.config.get("final_logit_softcapping")
        logits = cap * torch.tanh(logits / cap) if cap else logits
        return logits if self.never_drafted is None else logits.masked_fill(self.never_drafted, -math.inf)

    def hidden(self, context_taps: Tensor, anchor: int) -> Tensor:
        """The block's hidden states [P, H] behind every row of ``context_taps`` [length, T·H]."""
        w, config = self.weights, self.config
        heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        length = context_taps.shape[0]
        context = self._norm(context_taps @ w["fc.weight"].T, w["hidden_norm.weight"])
        x = self.embedding[torch.tensor([anchor] + [self.mask] * (self.block_size - 1))] * self.config.get("input_embedding_scale", 1.0)
        for layer in range(config["num_hidden_layers"]):
            p = f"layers.{layer}."
            states = self._norm(x, w[p + "input_layernorm.weight"])
            rows = torch.cat([context, states])
            q = self._norm((states @ w[p + "self_attn.q_proj.weight"].T).view(-1, heads, dim), w[p + "self_attn.q_norm.weight"])
            k = self._norm((rows @ w[p + "self_attn.k_proj.weight"].T).view(-1, kv_heads, dim), w[p + "self_attn.k_norm.weight"])
            v = (rows @ w[p + "self_attn.v_proj.weight"].T).view(-1, kv_heads, dim)
            q, k = self._rotate(q, length), self._rotate(k, 0)
            visible = self._visible(layer, length)
            attended = []
            for head in range(heads):
                group = head // (heads // kv_heads)
                scores = (q[:, head] @ k[:, group].T / dim**0.5).masked_fill(~visible, -math.inf)
                attended.append(scores.softmax(-1) @ v[:, group])
            x = x + torch.cat(attended, dim=-1) @ w[p + "self_attn.o_proj.weight"].T
            states = self._norm(x, w[p + "post_attention_layernorm.weight"])
            gate, up = states @ w[p + "mlp.gate_proj.weight"].T, states @ w[p + "mlp.up_proj.weight"].T
            x = x + (torch.nn.functional.silu(gate) * up) @ w[p + "mlp.down_proj.weight"].T
        return self._norm(x, w["norm.weight"])

    def refined_logits(self, hidden: Tensor, previous: Sequence[int]) -> Tensor:
        """Of slots 1 … P-1 [P-1, V], from the hidden states of the block [P, H] and the token before each of its slots."""
        w = {name.removeprefix("xpress_head."): tensor for name, tensor in self.weights.items()}
        mean = hidden.mean(dim=0, keepdim=True).expand_as(hidden)
        features = torch.cat([hidden @ w["down_h.weight"].T, mean @ w["down_g.weight"].T, w["w1.weight"][torch.tensor(previous)]], dim=-1)
        mixer = torch.tril(w["mix.L"]) + torch.eye(self.block_size)
        u = torch.einsum("rkj,jr->kr", mixer, features @ w["in_proj.weight"].T)
        gate, up = u @ w["mlp.gate_proj.weight"].T, u @ w["mlp.up_proj.weight"].T
        u = u + (torch.nn.functional.silu(gate) * up) @ w["mlp.down_proj.weight"].T
        return self.base_logits(hidden) + (u @ w["w2.weight"].T)[1:]

    def _refine(self, hidden: Tensor, anchor: int, predecessor: int, num_passes: int) -> list[int]:
        drafts: list[int] = self.base_logits(hidden).argmax(-1).tolist()
        for _ in range(num_passes):
            drafts = self.refined_logits(hidden, [predecessor, anchor, *drafts[:-1]]).argmax(-1).tolist()
        return drafts

    def _visible(self, layer: int, length: int) -> Tensor:
        """Which of length + P rows each of the block's P rows sees."""
        sliding = self.config.get("layer_types", ["full_attention"] * (layer + 1))[layer] == "sliding_attention"
        causal = self.config.get("is_causal", sliding)
        visible = torch.ones(self.block_size, length + self.block_size, dtype=torch.bool)
        for slot in range(self.block_size):
            for row in range(length + self.block_size):
                distance = length + slot - row
                if causal and distance < 0:
                    visible[slot, row] = False
                if sliding and abs(distance) >= self.config["sliding_window"]:
                    visible[slot, row] = False
        return visible

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]) * weight

    def _rotate(self, x: Tensor, start: int) -> Tensor:
        dim = x.shape[-1]
        angles = torch.arange(start, start + x.shape[0]).double()[:, None] * self.frequencies
        cos, sin = (values.float()[:, None] * self.rotary_factor for values in (angles.cos(), angles.sin()))
        first, second = x[..., : dim // 2], x[..., dim // 2 :]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def rotary_frequencies(config: dict[str, Any]) -> tuple[Tensor, float]:
    """Angle per position of each pair of dims, and what cosines and sines are multiplied with."""
    dim, base = config["head_dim"], config["rope_theta"]
    frequencies = base ** -(torch.arange(0, dim, 2).double() / dim)
    scaling = config.get("rope_scaling") or {"rope_type": "default"}
    kind, factor = scaling["rope_type"], scaling.get("factor", 1.0)
    original = scaling.get("original_max_position_embeddings", config["max_position_embeddings"])
    if kind == "linear":
        return frequencies / factor, 1.0
    if kind == "llama3":
        turns = original * frequencies / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return frequencies * kept + frequencies / factor * (1 - kept), 1.0
    if kind == "yarn":

        def pair_that_turns(times: float) -> float:
            return float(dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(base)))

        first = max(math.floor(pair_that_turns(scaling.get("beta_fast", 32.0))), 0)
        last = min(math.ceil(pair_that_turns(scaling.get("beta_slow", 1.0))), dim - 1)
        stretched = ((torch.arange(dim // 2).double() - first) / (last - first)).clamp(0, 1)
        return frequencies * (1 - stretched) + frequencies / factor * stretched, 0.1 * math.log(factor) + 1
    assert kind == "default"
    return frequencies, 1.0


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
