"""The target's embedding and head as training uses them, and the tokens that its softmax runs over.

Knows which tokens the answers hold; knows nothing of drafters or losses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from examples.distill.batches import FeatureSet
from examples.distill.settings import Settings
from examples.distill.target import Target
from xpress_runtime.errors import CheckpointError, OptionError


@dataclass(frozen=True)
class TargetTables:
    """The target's embedding [V, H], and its head [V, H] or the rows of ``columns`` [W] of it.

    ``to_column`` [V] is the place of each token among the columns, -1 for those that are none. The target's own logits are ``logit_scale``
    times the product, bounded by ``logit_cap``; base logits are the product alone.
    """

    embedding: Tensor
    head: Tensor
    columns: Tensor | None = None
    to_column: Tensor | None = None
    logit_scale: float = 1.0
    logit_cap: float | None = None

    def column_of(self, tokens: Tensor) -> Tensor:
        return tokens if self.to_column is None else self.to_column[tokens]

    def token_of(self, columns: Tensor) -> Tensor:
        return columns if self.columns is None else self.columns[columns]

    def holds(self, tokens: Tensor) -> Tensor:
        """Which tokens have a column."""
        return self.column_of(tokens) >= 0

    def target_logits(self, final: Tensor) -> Tensor:
        """What the target says, fp32, for its final hidden states [.., H]."""
        logits = nn.functional.linear(final.to(self.head.dtype), self.head).float() * self.logit_scale
        return logits if self.logit_cap is None else torch.tanh(logits / self.logit_cap) * self.logit_cap


@dataclass(frozen=True)
class DraftVocabulary:
    """The tokens [Vd] that can be drafted, ascending, and the target's rows of them [Vd, H], which are the drafter's own head."""

    tokens: Tensor
    head: Tensor


@dataclass(frozen=True)
class Vocabulary:
    """The tables on a device, what the drafter drafts of it (None: every token), and how often the answers hold each token."""

    tables: TargetTables
    drafted: DraftVocabulary | None
    counts: Tensor


def read_vocabulary(
    settings: Settings, target: Target, features: FeatureSet, device: torch.device, report: Callable[[str], None]
) -> Vocabulary:
    """Cut the head to what is drafted or, if asked, to what the answers hold. Raises CheckpointError, OptionError."""
    config = target.checkpoint.config
    dtype = torch.bfloat16 if settings.training.precision == "bfloat16" else torch.float32
    embedding = target.checkpoint.embedding().table.detach().to(device, dtype)
    head = target.checkpoint.head().table.detach()
    counts = features.answer_token_counts()
    if len(counts) > len(head):
        raise CheckpointError(f"the answers hold token {len(counts) - 1}, and the head of {target.name} has {len(head)} rows")
    tokens, drafted = counts.nonzero().flatten(), None
    wanted = settings.drafter.draft_vocab_size
    if wanted is not None:
        tokens = most_frequent(counts, wanted)
        drafted = DraftVocabulary(tokens, head[tokens])
        report(f"drafts {len(tokens)} of {len(head)} tokens, {int(counts[tokens].sum()) / int(counts.sum()):.1%} of what the answers hold")
    columns = to_column = None
    if wanted is not None or settings.training.vocabulary == "seen":
        to_column = torch.full((len(head),), -1)
        to_column[tokens] = torch.arange(len(tokens))
        columns, to_column, head = tokens.to(device), to_column.to(device), head[tokens]
    tables = TargetTables(embedding, head.to(device, dtype), columns, to_column, config.logit_scale, config.logit_cap)
    return Vocabulary(tables, drafted, counts)


def most_frequent(counts: Tensor, size: int) -> Tensor:
    """The ``size`` tokens that occur most often, or all that do where they are fewer, ascending; of equals the first."""
    order = counts.argsort(descending=True, stable=True)[:size]
    tokens: Tensor = order[counts[order] > 0].sort().values
    if len(tokens) < 2:
        raise OptionError("the answers hold one token alone, which is no vocabulary to draft; leave out draft_vocab_size under [drafter]")
    return tokens
