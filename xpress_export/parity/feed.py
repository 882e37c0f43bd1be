"""The inputs that graphs are compared on: random tokens in two rows of different length, and texts.

The graphs are fed as in a generation: prompt, first block, a round after a partial acceptance, a single token. Each graph's input comes
from what the one before answered. Knows the inputs of the models' graphs; those of the graphs between them are
:mod:`xpress_export.parity.feed_sampling`'s and :mod:`xpress_export.parity.feed_drafting`'s. Knows nothing about what is done with a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from xpress_export.checkpoints import DrafterCheckpoint, DraftModelCheckpoint, TargetCheckpoint
from xpress_export.options import BuildOptions
from xpress_export.parity.feed_drafting import DraftingFeed
from xpress_export.parity.feed_sampling import Call, Draw, SamplingFeed
from xpress_export.parity.modules import Tensors
from xpress_runtime.graph_names import BASE_HEAD, SAMPLED, refiner_name, refiner_variants
from xpress_runtime.memory import backlog_rows
from xpress_runtime.sets import AttentionForm

_PROMPT_ROWS = 9
_TABLE_ROWS = 4096
# Rows of one call of the head, whose logits are as wide as the vocabulary.
_HEAD_ROWS = 32
_BLOCKS_PER_TEXT = 4
# Blocks whose logits the graphs between the models get: those are as wide as the vocabulary, and more of them show nothing new.
_MAX_BLOCKS = 4
_DRAFTED_ROWS = 4


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
    draft_embeddings: list[Tensor] = field(default_factory=list)
    draft_hidden: list[Tensor] = field(default_factory=list)


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
        draft_model: DraftModelCheckpoint | None = None,
    ) -> None:
        self._vocab_size = target.config.vocab_size
        self._block_size = drafter.config.block_size
        self._draw = Draw(torch.Generator().manual_seed(20260802), self._vocab_size, self._block_size)
        self._mask_token_id = drafter.config.mask_token_id
        self._has_base_head = options.base_head
        longest = max([_PROMPT_ROWS + 3 * self._block_size, *(len(text) for text in texts)])
        # Masked graphs have caches of one length.
        rows = longest + self._block_size if form is AttentionForm.LENGTH else options.cache_rows
        configs = {"target": target.config, "drafter": drafter.config.backbone}
        if draft_model is not None:
            configs["draft-decoder"] = draft_model.config
        self._strands = [self._random(), *(self._text(torch.tensor([list(text)])) for text in texts)]
        for strand in self._strands:
            batch = strand.ids[0].shape[0]
            strand.caches = {model: _empty_caches(config, batch, rows) for model, config in configs.items()}
        # The head and the draft model's, once they were called.
        self._logits: dict[str, Call] = {}
        num_stored = backlog_rows(options.prefill_chunk, self._block_size)
        variants = refiner_variants(options.num_passes, options.shortlists)
        sampling = SamplingFeed(self._draw, options.cache_rows, self._some_blocks)
        self._drafting = DraftingFeed(self._draw, options.cache_rows, num_stored, self._some_blocks, lambda: self._strands[0].taps)
        self.calls: dict[str, Callable[[Call], None]] = {
            "embed": self._embed,
            "target": self._target,
            "head": self._rank,
            "drafter": self._drafter,
            **({BASE_HEAD: self._base} if options.base_head else {}),
            **{refiner_name(*variant): self._refiner for variant in variants},
            "accept": sampling.accept,
            **self._drafting.calls(),
        }
        if options.sampling:
            self.calls |= {refiner_name(*variant, sampled=True): self._sampled_refiner for variant in variants}
            self.calls |= sampling.calls()
        if draft_model is not None:
            self.calls |= self._draft_model_calls(shares_tables=draft_model.shares_tables, sampling=options.sampling)

    def _draft_model_calls(self, *, shares_tables: bool, sampling: bool) -> dict[str, Callable[[Call], None]]:
        calls: dict[str, Callable[[Call], None]] = {} if shares_tables else {"draft-embed": self._draft_embed}
        calls["draft-decoder"] = self._draft_decoder
        if not shares_tables:
            calls["draft-head"] = self._draft_rank
        calls["draft-start"] = self._drafting.draft_start
        head = "head" if shares_tables else "draft-head"
        for sampled in (False, True) if sampling else (False,):
            calls[f"draft-step{SAMPLED if sampled else ''}"] = partial(self._draft_step, head, sampled)
        return calls

    def _random(self) -> _Strand:
        """Two rows, the second one shorter: its second call overwrites rows of the first, as after a rejected block."""
        width = self._block_size
        last = torch.tensor([[_PROMPT_ROWS - 1], [5]])
        every = torch.arange(width).expand(2, -1).contiguous()
        blocks = [
            _Block(self._block(self._draw.ids(2)), source, 0, context, position, self._draw.ids(2), self._draw.ids(2))
            # Prompt rows, a first block without new context, and one after different acceptances.
            for source, context, position in ((0, [0, 0], [9, 6]), (1, [9, 6], [9, 6]), (1, [9, 6], [9 + width, 7]))
        ]
        ids = [self._draw.ids(2, _PROMPT_ROWS), self._draw.ids(2, width), self._draw.ids(2, 1)]
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
        self._logits["head"] = call
        for strand in self._strands:
            for source, rows in strand.ranked:
                call({"hidden": strand.hidden[source], "rows": rows})

    def _drafter(self, call: Call) -> None:
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
                strand.drafts.append({"hidden": hidden, "anchor": block.anchor, "predecessor": block.predecessor})
        if not self._has_base_head:
            self._base(self._logits["head"])

    def _base(self, call: Call) -> None:
        """The base logits of every block."""
        for strand in self._strands:
            for drafted in strand.drafts:
                rows = torch.arange(1, self._block_size).expand(drafted["hidden"].shape[0], -1).contiguous()
                drafted["base_logits"] = call({"hidden": drafted["hidden"], "rows": rows})["logits"]

    def _refiner(self, call: Call) -> None:
        for strand in self._strands:
            for inputs in strand.drafts:
                call(inputs)

    def _sampled_refiner(self, call: Call) -> None:
        for strand in self._strands:
            for number, inputs in enumerate(strand.drafts):
                batch = inputs["anchor"].shape[0]
                call({**inputs, "position": self._draw.positions(batch), **self._draw.numbers(batch, greedy=number)})

    def _some_blocks(self) -> list[Tensors]:
        """What the drafter's blocks of some strands were: anchor, base logits and the like; the first are of two rows."""
        first, *texts = self._strands
        return [*first.drafts, *(text.drafts[0] for text in texts)][:_MAX_BLOCKS]

    # The draft model.

    def _draft_embed(self, call: Call) -> None:
        for rows in torch.split(torch.arange(self._vocab_size), _TABLE_ROWS):
            call({"ids": rows[None]})
        for strand in self._strands:
            strand.draft_embeddings = [call({"ids": ids})["embeddings"] for ids in strand.ids]

    def _draft_decoder(self, call: Call) -> None:
        for strand in self._strands:
            caches = strand.caches.pop("draft-decoder")
            for embeddings, position in zip(strand.draft_embeddings or strand.embeddings, strand.positions, strict=True):
                outputs = call({"embeddings": embeddings, "position": torch.tensor(position), **caches})
                strand.draft_hidden.append(outputs["hidden"])
                caches = _next_caches(outputs)

    def _draft_rank(self, call: Call) -> None:
        self._logits["draft-head"] = call
        for strand in self._strands:
            for source, rows in strand.ranked:
                call({"hidden": strand.draft_hidden[source], "rows": rows})

    def _draft_step(self, head: str, sampled: bool, call: Call) -> None:
        """A block from the first rows of the random strand's second call."""
        hidden = self._strands[0].draft_hidden[1]
        rows = [torch.full((hidden.shape[0], 1), row) for row in range(min(hidden.shape[1], _DRAFTED_ROWS))]
        logits = [self._logits[head]({"hidden": hidden, "rows": wanted})["logits"] for wanted in rows]
        self._drafting.draft_step(call, logits, sampled=sampled)


def _empty_caches(config: Any, batch: int, cache_rows: int) -> Tensors:
    shape = (batch, config.num_kv_heads, cache_rows, config.head_dim)
    return {f"{kind}_cache.{layer}": torch.zeros(shape) for kind in ("key", "value") for layer in range(config.num_layers)}


def _next_caches(outputs: Tensors) -> Tensors:
    return {name.replace("_cache_out.", "_cache."): tensor for name, tensor in outputs.items() if "_cache_out." in name}
