"""The block's own head: base logits where they are not what the target's head gives.

A drafter may bound or scale its logits otherwise than the target, write for a reduced vocabulary, or bring a head of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from xpress_export.models.decoder import Head
from xpress_export.models.draft_step import UNKNOWN


class BaseHead(nn.Module):
    """Hidden [B, P, H] and the wanted rows [B, R] → base logits [B, R, V] in fp32 and their argmax [B, R].

    ``draft_token_ids`` int64 [Vd]: the token that each row of the head's table writes; None: row v writes token v. A token without a row
    gets a logit that no draw ever takes.
    """

    def __init__(self, head: Head, vocab_size: int, draft_token_ids: Tensor | None) -> None:
        super().__init__()
        self.head = head
        self.row_of: Tensor | None
        rows = None
        if draft_token_ids is not None:
            # The row behind the last is that of all tokens without one.
            rows = torch.full((vocab_size,), draft_token_ids.shape[0], dtype=torch.int64, device="cpu")
            rows[draft_token_ids] = torch.arange(draft_token_ids.shape[0], device="cpu")
        self.register_buffer("row_of", rows, persistent=False)

    def forward(self, hidden: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        logits, tokens = self.head(hidden, rows)
        if self.row_of is None:
            return logits, tokens
        unknown = torch.full_like(logits[..., :1], UNKNOWN)
        logits = torch.cat([logits, unknown], dim=-1).index_select(-1, self.row_of)
        return logits, logits.argmax(dim=-1)
