"""The inputs that graphs are compared on: random tokens in two rows of different length, and texts.

The graphs are fed as in a generation: prompt, first block, a round after a partial acceptance, a single token. Each graph's input comes
from what the one before answered. Knows the graphs' inputs; knows nothing about what is done with a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from xpress_export.checkpoints import DrafterCheckpoint, TargetCheckpoint
from xpress_export.options import BuildOptions
from xpress_export.parity.modules import Tensors
from xpress_runtime.sets import AttentionForm

# Takes a graph's inputs and answers with its reference outputs.
Call = Callable[[Tensors], Tensors]

_PROMPT_ROWS = 9
_TABLE_ROWS = 4096
# Rows of one call of the head, whose logits are as wide as the vocabulary.
_HEAD_ROWS = 32
_BLOCKS_PER_TEXT = 4


@dataclass(frozen=True)
class _Block:
    """A call of the drafter and the refiners: block ids [B, P], tap rows from ``first_tap`` on of the target's call ``source``."""

    ids: Tensor
    source: int
    first_tap: int
    context_position: list[int]
    block_position: list[int]
    anchor: Tensor
    predecessor: Tensor


@dataclass
class _Strand:
    """One run through all graphs: ids [B, S] and positions of the target's calls, the rows [B, R] of each that are ranked, and blocks."""

    ids: list[Tensor]
    positions: list[list[int]]
    ranked: list[tuple[int, Tensor]]
    blocks: list[_Block]
    caches: dict[str, Tensors]
    embeddings: list[Tensor] = field(default_factory=list)
    block_embeddings: list[Tensor] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    taps: list[Tensor] = field(default_factory=list)
    drafts: list[Tensors] = field(default_factory=list)


class Feed:
    """The inputs of each graph's calls. ``calls[graph](call)`` makes them in order and keeps what later graphs read.

    Graphs must be called in the order of ``calls``; ``texts`` are token ids, at least two each.
    """

    def __init__(
        self,
        target: TargetCheckpoint,
        drafter: DrafterCheckpoint,
        options: BuildOptions,
        form: AttentionForm,
        texts: Sequence[Sequence[int]] = (),
    ) -> None:
        self._generator = torch.Generator().manual_seed(20260802)
        self._vocab_size = target.config.vocab_size
        self._cache_rows = options.cache_rows
        self._block_size = drafter.config.block_size
        self._mask_token_id = drafter.config.mask_token_id
        longest = max([_PROMPT_ROWS + 3 * self._block_size, *(len(text) for text in texts)])
        # Masked graphs have caches of one length.
        rows = longest + self._block_size if form is AttentionForm.LENGTH else options.cache_rows
        configs = {"target": target.config, "drafter": drafter.config.backbone}
        self._strands = [self._random(), *(self._text(torch.tensor([list(text)])) for text in texts)]
        for strand in self._strands:
            batch = strand.ids[0].shape[0]
            strand.caches = {model: _empty_caches(config, batch, rows) for model, config in configs.items()}
        self._head: Call | None = None
        self.calls: dict[str, Callable[[Call], None]] = {
            "embed": self._embed,
            "target": self._target,
            "head": self._rank,
            "drafter": self._drafter,
            **{f"refiner-k{passes}": self._refiner for passes in options.num_passes},
            "accept": self._accept,
        }

    def _ids(self, *shape: int) -> Tensor:
        return torch.randint(self._vocab_size, shape, generator=self._generator)

    def _random(self) -> _Strand:
        """Two rows, the second one shorter: its second call overwrites rows of the first, as after a rejected block."""
        width = self._block_size
        last = torch.tensor([[_PROMPT_ROWS - 1], [5]])
        every = torch.arange(width).expand(2, -1).contiguous()
        blocks = [
            _Block(self._block(self._ids(2)), source, 0, context, position, self._ids(2), self._ids(2))
            # Prompt rows, a first block without new context, and one after different acceptances.
            for source, context, position in ((0, [0, 0], [9, 6]), (1, [9, 6], [9, 6]), (1, [9, 6], [9 + width, 7]))
        ]
        ids = [self._ids(2, _PROMPT_ROWS), self._ids(2, width), self._ids(2, 1)]
        return _Strand(ids, [[0, 0], [9, 6], [11, 9]], [(0, last), (1, every)], blocks, {})

    def _text(self, text: Tensor) -> _Strand:
        """One row: the text in one call, every row of it ranked, and a few blocks along it."""
        length = text.shape[1]
        ends = sorted({1 + (length - 2) * part // _BLOCKS_PER_TEXT for part in range(1, _BLOCKS_PER_TEXT + 1)})
        blocks = [
            _Block(self._block(text[:, end]), 0, start, [start], [end], text[:, end], text[:, end - 1])
            for start, end in pairwise([0, *ends])
        ]
        ranked = [(0, rows[None]) for rows in torch.split(torch.arange(length), _HEAD_ROWS)]
        return _Strand([text], [[0]], ranked, blocks, {})

    def _block(self, anchor: Tensor) -> Tensor:
        block = torch.full((anchor.shape[0], self._block_size), self._mask_token_id)
        block[:, 0] = anchor
        return block

    def _embed(self, call: Call) -> None:
        # Every row of the table: a damaged one would show in few texts.
        for rows in torch.split(torch.arange(self._vocab_size), _TABLE_ROWS):
            call({"ids": rows[None]})
        for strand in self._strands:
            strand.embeddings = [call({"ids": ids})["embeddings"] for ids in strand.ids]
            strand.block_embeddings = [call({"ids": block.ids})["embeddings"] for block in strand.blocks]

    def _target(self, call: Call) -> None:
        for strand in self._strands:
            caches = strand.caches.pop("target")
            for embeddings, position in zip(strand.embeddings, strand.positions, strict=True):
                outputs = call({"embeddings": embeddings, "position": torch.tensor(position), **caches})
                strand.hidden.append(outputs["hidden"])
                strand.taps.append(outputs["taps"])
                caches = _next_caches(outputs)

    def _rank(self, call: Call) -> None:
        self._head = call
        for strand in self._strands:
            for source, rows in strand.ranked:
                call({"hidden": strand.hidden[source], "rows": rows})

    def _drafter(self, call: Call) -> None:
        assert self._head is not None, "the head is called before the drafter"
        for strand in self._strands:
            caches = strand.caches.pop("drafter")
            for block, embeddings in zip(strand.blocks, strand.block_embeddings, strict=True):
                positions = {"context_position": block.context_position, "block_position": block.block_position}
                outputs = call(
                    {
                        "embeddings": embeddings,
                        "taps": strand.taps[block.source][:, block.first_tap :],
                        **{name: torch.tensor(position) for name, position in positions.items()},
                        **caches,
                    }
                )
                caches = _next_caches(outputs)
                hidden = outputs["hidden"]
                draft_rows = torch.arange(1, self._block_size).expand(hidden.shape[0], -1).contiguous()
                base = self._head({"hidden": hidden, "rows": draft_rows})["logits"]
                strand.drafts.append({"hidden": hidden, "base_logits": base, "anchor": block.anchor, "predecessor": block.predecessor})

    def _refiner(self, call: Call) -> None:
        for strand in self._strands:
            for inputs in strand.drafts:
                call(inputs)

    def _accept(self, call: Call) -> None:
        for inputs in self._accept_cases():
            call(inputs)

    def _accept_cases(self) -> Iterator[Tensors]:
        width = self._block_size
        target = self._ids(2, width)
        for accepted in range(width):
            verify = torch.cat([self._ids(2, 1), target[:, :-1]], dim=1)
            if accepted < width - 1:
                verify[0, accepted + 1] = (verify[0, accepted + 1] + 1) % self._vocab_size
            yield {
                "verify_ids": verify,
                "target_tokens": target,
                "position": torch.tensor([40, 3]),
                "predecessor": self._ids(2),
                "active": torch.tensor([1, accepted % 2]),
            }
        # Plain decoding, up to and past the position from which rows are frozen.
        for position in range(max(0, self._cache_rows - 4 * width), self._cache_rows, 2):
            yield {
                "verify_ids": self._ids(2, 1),
                "target_tokens": self._ids(2, 1),
                "position": torch.tensor([position, position + 1]),
                "predecessor": self._ids(2),
                "active": torch.tensor([1, 1]),
            }


def _empty_caches(config: Any, batch: int, cache_rows: int) -> Tensors:
    shape = (batch, config.num_kv_heads, cache_rows, config.head_dim)
    return {f"{kind}_cache.{layer}": torch.zeros(shape) for kind in ("key", "value") for layer in range(config.num_layers)}


def _next_caches(outputs: Tensors) -> Tensors:
    return {name.replace("_cache_out.", "_cache."): tensor for name, tensor in outputs.items() if "_cache_out." in name}
