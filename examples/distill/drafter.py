"""The drafter as it is trained: many blocks of a sequence at once, over taps of the whole sequence. Names are those of the serving format.

Written apart from the modules that are exported, which work on one block and a cache; a test compares both. Knows nothing of files,
losses or optimisers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from examples.distill.sizes import Sizes

# The refiner's rows by the token that they are for, as the serving format names them.
READOUT = "xpress_head.w2.weight"


class Rms(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


class Rotary(nn.Module):
    """Rotates halves of a head: x [B, heads, S, D] at positions [B, S]."""

    frequencies: Tensor

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        self.register_buffer("frequencies", theta ** (-torch.arange(0, head_dim, 2).float() / head_dim), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = positions[:, None, :, None].float() * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.q_proj = nn.Linear(sizes.hidden_size, sizes.num_heads * sizes.head_dim, bias=False)
        self.k_proj = nn.Linear(sizes.hidden_size, sizes.num_kv_heads * sizes.head_dim, bias=False)
        self.v_proj = nn.Linear(sizes.hidden_size, sizes.num_kv_heads * sizes.head_dim, bias=False)
        self.o_proj = nn.Linear(sizes.num_heads * sizes.head_dim, sizes.hidden_size, bias=False)
        self.q_norm = Rms(sizes.head_dim, sizes.rms_norm_eps)
        self.k_norm = Rms(sizes.head_dim, sizes.rms_norm_eps)

    def forward(self, states: Tensor, context: Tensor, rotary: Rotary, positions: Tensor, mask: Tensor) -> Tensor:
        """states [B, S, H] at ``positions`` [B, S]; context [B, N, H] at 0 to N-1; mask [B, 1, S, N + S], added to scores."""
        rows = torch.cat([context, states], dim=1)
        context_positions = torch.arange(context.shape[1], device=states.device).expand(states.shape[0], -1)
        query = rotary(self.q_norm(self._heads(self.q_proj(states))), positions)
        key = rotary(self.k_norm(self._heads(self.k_proj(rows))), torch.cat([context_positions, positions], dim=1))
        value = self._heads(self.v_proj(rows))
        groups = self.sizes.num_heads // self.sizes.num_kv_heads
        attended = nn.functional.scaled_dot_product_attention(
            query, key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1), attn_mask=mask.to(query.dtype)
        )
        output: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return output

    def _heads(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-1], -1, self.sizes.head_dim).transpose(1, 2)


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class Layer(nn.Module):
    def __init__(self, sizes: Sizes, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = Rms(sizes.hidden_size, sizes.rms_norm_eps)
        self.self_attn = Attention(sizes)
        self.post_attention_layernorm = Rms(sizes.hidden_size, sizes.rms_norm_eps)
        self.mlp = Mlp(sizes.hidden_size, sizes.intermediate_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, states: Tensor, context: Tensor, rotary: Rotary, positions: Tensor, mask: Tensor) -> Tensor:
        states = states + self.dropout(self.self_attn(self.input_layernorm(states), context, rotary, positions, mask))
        output: Tensor = states + self.dropout(self.mlp(self.post_attention_layernorm(states)))
        return output


class Backbone(nn.Module):
    """DFlash: taps of a sequence and blocks at anchors of it → hidden states of the blocks, after the norm."""

    def __init__(self, sizes: Sizes, dropout: float = 0.0, feature_noise: float = 0.0) -> None:
        super().__init__()
        self.sizes = sizes
        self.feature_noise = feature_noise
        self.fc = nn.Linear(len(sizes.tap_layers) * sizes.hidden_size, sizes.hidden_size, bias=False)
        self.hidden_norm = Rms(sizes.hidden_size, sizes.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(sizes, dropout) for _ in range(sizes.num_layers))
        self.norm = Rms(sizes.hidden_size, sizes.rms_norm_eps)
        self.rotary = Rotary(sizes.head_dim, sizes.rope_theta)

    def forward(self, taps: Tensor, embeddings: Tensor, anchors: Tensor) -> Tensor:
        """taps [B, N, T·H]; embeddings [B, M, P, H] of the blocks whose anchors stand at ``anchors`` [B, M] → [B, M, P, H].

        A block sees the context rows before its anchor, and itself.
        """
        batch, num_blocks, block_size, width = embeddings.shape
        # Taps of real models exceed 2e4: too much for a sum in half precision.
        with torch.autocast(taps.device.type, enabled=False):
            context = self.hidden_norm(self.fc(taps.float()))
        if self.training and self.feature_noise:
            context = context + self.feature_noise * torch.randn_like(context)
        offsets = torch.arange(block_size, device=taps.device)
        positions = (anchors[:, :, None] + offsets).flatten(1)
        mask = self._mask(anchors, taps.shape[1], block_size)
        states = embeddings.flatten(1, 2)
        for layer in self.layers:
            states = layer(states, context, self.rotary, positions, mask)
        output: Tensor = self.norm(states)
        return output.reshape(batch, num_blocks, block_size, width)

    @staticmethod
    def _mask(anchors: Tensor, num_rows: int, block_size: int) -> Tensor:
        """[B, 1, M·P, N + M·P], 0 where a row sees a column."""
        columns = torch.arange(num_rows, device=anchors.device)
        sees_context = columns[None, None, :] < anchors[:, :, None]
        own = torch.eye(anchors.shape[1], dtype=torch.bool, device=anchors.device).repeat_interleave(block_size, dim=1)
        sees = torch.cat([sees_context, own.expand(anchors.shape[0], -1, -1)], dim=-1).repeat_interleave(block_size, dim=1)
        return torch.zeros(sees.shape, device=anchors.device).masked_fill(~sees, float("-inf"))[:, None]


class Table(nn.Module):
    """Rows of numbers, one per token."""

    def __init__(self, num_tokens: int, width: int, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_tokens, width) * scale if scale else torch.zeros(num_tokens, width))

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, self.weight)


class Mixer(nn.Module):
    def __init__(self, rank: int, block_size: int) -> None:
        super().__init__()
        # Upper-case as the checkpoints have it.
        self.L = nn.Parameter(torch.zeros(rank, block_size, block_size))


class Refiner(nn.Module):
    """xPress: hidden states of a block and the token before each slot → an update [.., P-1, r] that ``bias`` reads out."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        rank = sizes.refiner_rank
        self.w1 = Table(sizes.vocab_size, rank, 0.02)
        # Without a bias at first: the refined logits begin as the base logits.
        self.w2 = Table(sizes.vocab_size, rank, 0.0)
        self.down_h = nn.Linear(sizes.hidden_size, rank, bias=False)
        self.down_g = nn.Linear(sizes.hidden_size, rank, bias=False)
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix = Mixer(rank, sizes.block_size)
        self.mlp = Mlp(rank, sizes.refiner_mlp_hidden)

    def forward(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """hidden [.., P, H], previous [.., P] → [.., P-1, r]."""
        mean = self.down_g(hidden.mean(dim=-2, keepdim=True)).expand(*hidden.shape[:-1], -1)
        z = self.in_proj(torch.cat([self.down_h(hidden), mean, self.w1(previous).to(mean.dtype)], dim=-1))
        u = z + torch.einsum("rkj,...jr->...kr", self.mix.L.tril().to(z.dtype), z)
        update: Tensor = u + self.mlp(u)
        return update[..., 1:, :]

    def bias(self, update: Tensor, columns: Tensor | None) -> Tensor:
        """update [.., r] → logits to add [.., V], or those of ``columns`` only."""
        return nn.functional.linear(update, self.w2.weight if columns is None else self.w2.weight[columns])


class MarkovHead(nn.Module):
    """DSpark's plain head: a bias that depends on the token before only. The same two calls as the refiner."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.markov_w1 = Table(sizes.vocab_size, sizes.markov_rank, 0.02)
        self.markov_w2 = Table(sizes.vocab_size, sizes.markov_rank, 0.0)

    def forward(self, hidden: Tensor, previous: Tensor) -> Tensor:
        update: Tensor = self.markov_w1(previous)[..., 1:, :].to(hidden.dtype)
        return update

    def bias(self, update: Tensor, columns: Tensor | None) -> Tensor:
        return nn.functional.linear(update, self.markov_w2.weight if columns is None else self.markov_w2.weight[columns])


class TrainedDrafter(nn.Module):
    """Backbone and, unless bare DFlash, a head."""

    def __init__(self, sizes: Sizes, dropout: float = 0.0, feature_noise: float = 0.0) -> None:
        super().__init__()
        self.sizes = sizes
        self.backbone = Backbone(sizes, dropout, feature_noise)
        self.head: Refiner | MarkovHead | None = None
        if sizes.refiner_rank:
            self.head = Refiner(sizes)
        elif sizes.markov_rank:
            self.head = MarkovHead(sizes)

    def serving_state(self) -> dict[str, Tensor]:
        """All tensors under the names of the serving format."""
        state = dict(self.backbone.state_dict())
        if self.head is not None:
            prefix = "xpress_head." if isinstance(self.head, Refiner) else ""
            state |= {prefix + name: tensor for name, tensor in self.head.state_dict().items()}
        return state
