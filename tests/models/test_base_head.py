"""The block's own head: scale and cap, a reduced vocabulary, and a table of its own, against plain formulas."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from xpress_export.models.base_head import BaseHead
from xpress_export.models.decoder import Head
from xpress_export.models.draft_step import UNKNOWN

VOCABULARY, HIDDEN, ROWS = 11, 6, torch.tensor([[1, 2, 3], [3, 0, 1]])


def made(num_rows: int, scale: float, cap: float | None, draft_token_ids: torch.Tensor | None) -> BaseHead:
    head = Head(num_rows, HIDDEN, scale, cap)
    head.table = nn.Parameter(torch.randn(num_rows, HIDDEN, generator=torch.Generator().manual_seed(1)), requires_grad=False)
    return BaseHead(head, VOCABULARY, draft_token_ids)


@pytest.mark.parametrize("cap", [None, 0.7])
@pytest.mark.parametrize("scale", [1.0, 0.125])
@pytest.mark.parametrize("draft_token_ids", [None, torch.tensor([7, 0, 10, 3])])
def test_logits_and_tokens(scale: float, cap: float | None, draft_token_ids: torch.Tensor | None) -> None:
    module = made(VOCABULARY if draft_token_ids is None else len(draft_token_ids), scale, cap, draft_token_ids)
    hidden = torch.randn(2, 4, HIDDEN, generator=torch.Generator().manual_seed(2))
    logits, tokens = module(hidden, ROWS)
    expected = torch.stack([hidden[row][ROWS[row]] for row in range(2)]) @ module.head.table.T * scale
    if cap is not None:
        expected = cap * torch.tanh(expected / cap)
    known = torch.arange(VOCABULARY) if draft_token_ids is None else draft_token_ids
    assert logits.shape == (2, 3, VOCABULARY)
    assert torch.allclose(logits[..., known], expected, atol=1e-6)
    unknown = [token for token in range(VOCABULARY) if token not in known.tolist()]
    assert (logits[..., unknown] == UNKNOWN).all()
    assert torch.equal(tokens, known[expected.argmax(dim=-1)])


def test_a_token_without_a_row_is_never_drawn() -> None:
    module = made(2, 1.0, None, torch.tensor([4, 9]))
    logits, _ = module(torch.randn(1, 4, HIDDEN), ROWS[:1])
    # Over any temperature that a request may have.
    for inverse_temperature in (1e-2, 1.0, 1e6):
        probabilities = torch.softmax(logits * inverse_temperature, dim=-1)
        assert torch.allclose(probabilities[..., [4, 9]].sum(dim=-1), torch.ones(1, 3))
