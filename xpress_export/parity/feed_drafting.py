"""The inputs of the small graphs around drafting: denoising steps, lookup, confidence, stored taps, and the steps of a draft model.

Knows these graphs' inputs; knows nothing about models.

Sizes: B rows, P block size, V vocabulary, N positions, M stored rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from xpress_export.parity.feed_sampling import Call, Draw
from xpress_export.parity.modules import Tensors

_CANDIDATES = 8
# Few different tokens, so that much of a text was there before.
_LOOKUP_VOCABULARY = 3


class DraftingFeed:
    """``blocks`` answers with hidden states [B, P, H] and base logits [B, P-1, V] of some blocks, once the drafter was called;
    ``taps`` with the target's of some calls [2, W, F].
    """

    def __init__(
        self,
        draw: Draw,
        num_positions: int,
        num_stored: int,
        blocks: Callable[[], list[Tensors]],
        taps: Callable[[], list[Tensor]],
    ) -> None:
        self._draw = draw
        self._num_positions = num_positions
        self._num_stored = num_stored
        self._blocks = blocks
        self._taps = taps

    def calls(self) -> dict[str, Callable[[Call], None]]:
        """Graphs that every set has, each with the function that makes its calls."""
        return {
            "denoise": self._denoise,
            "lookup": self._lookup,
            "confidence": self._confidence,
            "store-taps": self._store_taps,
        }

    def _denoise(self, call: Call) -> None:
        """Two steps of a block: what the first one kept goes into the second, whose logits are another's."""
        num_proposals = self._draw.block_size - 1
        for block in self._blocks():
            hidden, logits = block["hidden"], block["base_logits"]
            batch = hidden.shape[0]
            kept = {
                "kept_hidden": torch.zeros_like(hidden),
                "kept_logits": torch.zeros_like(logits),
                "filled": torch.zeros(batch, num_proposals, dtype=torch.int64),
                "block_ids": torch.cat([block["anchor"][:, None], self._draw.ids(batch, num_proposals)], dim=1),
            }
            for num_filled in ((num_proposals + 1) // 2, num_proposals):
                outputs = call({"hidden": hidden, "base_logits": logits, **kept, "num_filled": torch.full((batch,), num_filled)})
                kept = {
                    "kept_hidden": outputs["out_hidden"],
                    "kept_logits": outputs["out_logits"],
                    "filled": outputs["out_filled"],
                    "block_ids": outputs["out_ids"],
                }
                hidden, logits = hidden.flip(1), self._draw.near(logits)

    def _lookup(self, call: Call) -> None:
        """Texts that repeat themselves, from a first round on; rows end at the first position, in the middle and at the end."""
        block_size = self._draw.block_size
        last = self._num_positions - 1 - block_size
        for start, num_emitted in ((0, 0), (1, 1), (last // 2, block_size), (last, 2)):
            position = torch.tensor([start + num_emitted, start])
            call(
                {
                    "history": torch.randint(_LOOKUP_VOCABULARY, (2, self._num_positions), generator=self._draw.generator),
                    "tokens": torch.randint(_LOOKUP_VOCABULARY, (2, block_size), generator=self._draw.generator),
                    "context_position": torch.tensor([start, start]),
                    "position": position,
                }
            )

    def _confidence(self, call: Call) -> None:
        for block in self._blocks():
            scores = block["base_logits"]
            call({"scores": scores})
            call({"scores": scores.topk(min(_CANDIDATES, self._draw.vocab_size), dim=-1).values})

    def _store_taps(self, call: Call) -> None:
        """Taps of calls of the target behind each other, to the last row of the store."""
        taps = [each for each in self._taps() if each.shape[1] <= self._num_stored]
        store = torch.zeros(taps[0].shape[0], 1, self._num_stored, taps[0].shape[2])
        for each in (*taps, *taps[::-1]):
            last = self._num_stored - each.shape[1]
            store = call({"store": store, "taps": each, "start": torch.tensor([min(1, last), last])})["store_out"]

    def draft_start(self, call: Call) -> None:
        """Rows at the start of a text, further on, and one that is not active."""
        for position in ((1, 7), (0, 40), (self._num_positions - self._draw.block_size, 2)):
            call({"anchor": self._draw.ids(2), "predecessor": self._draw.ids(2), "position": torch.tensor(position)})

    def draft_step(self, call: Call, logits: Sequence[Tensor], *, sampled: bool) -> None:
        """A block token by token, ``logits`` [2, 1, V] of the draft model in turn."""
        draw, batch = self._draw, logits[0].shape[0]
        collected = torch.zeros(batch, draw.block_size - 1, draw.vocab_size)
        for index, of_slot in enumerate(logits):
            slot = 1 + index % (draw.block_size - 1)
            drawn = {"slot": torch.tensor([slot]), "position": draw.positions(batch), **draw.numbers(batch, greedy=index)}
            collected = call({"logits": of_slot, "collected": collected, **(drawn if sampled else {})})["collected_out"]
