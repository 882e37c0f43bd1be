"""Batches for training: random sequences from the cached features, random anchors in their answers, and what each block shows and must say.

A batch depends on seed, step and process only, so a run that is taken up again sees what it would have seen. Knows nothing of models.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from examples.distill.answers import prompt_ids
from examples.distill.features import Features, Span, read_features, read_spans, read_tokens, shard_paths
from examples.distill.run_folder import RunFolder
from xpress_runtime.errors import OptionError


@dataclass(frozen=True)
class Blocks:
    """``anchors`` [B, M]; ``shown`` [B, M, P]: anchor, revealed tokens and masks; ``previous`` [B, M, P]: the true token before each slot.

    ``labels`` [B, M, P-1] are the true tokens of slots 1 to P-1, ``counted`` says which of them are neither shown nor behind the end.
    ``target_rows`` [B, M, P-1] are the sequence's rows whose final hidden states the target reads these tokens from.
    """

    anchors: Tensor
    shown: Tensor
    previous: Tensor
    labels: Tensor
    counted: Tensor
    target_rows: Tensor

    def to(self, device: torch.device) -> Blocks:
        return Blocks(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class Batch:
    """``taps`` [B, N, T·H] as cached, ``final`` [B, N, H] or None, and the blocks."""

    taps: Tensor
    final: Tensor | None
    blocks: Blocks

    def to(self, device: torch.device) -> Batch:
        return Batch(self.taps.to(device), None if self.final is None else self.final.to(device), self.blocks.to(device))


class FeatureSet:
    """The cached sequences of a part, and which tokens their answers hold."""

    def __init__(self, folder: RunFolder, part: str) -> None:
        self._places: list[tuple[Path, Span]] = []
        wanted = prompt_ids(folder, part)
        for path in shard_paths(folder, part):
            # One token after the first is the least that can be drafted.
            self._places += [(path, span) for span in read_spans(path) if span.id in wanted and span.length - span.start >= 2]
        self._places.sort(key=lambda place: place[1].id)
        if not self._places:
            raise OptionError(
                f"{folder.features(part)} holds no answer of two tokens or more; run 'features' first, "
                "and give max_new_tokens and max_length room"
            )

    def __len__(self) -> int:
        return len(self._places)

    def read(self, indices: Sequence[int]) -> Iterator[Features]:
        for index in indices:
            path, span = self._places[index]
            yield from read_features(path, [span])

    def all(self) -> Iterator[Features]:
        yield from self.read(range(len(self)))

    def answer_token_counts(self) -> Tensor:
        """How often each token occurs in the answers, from token 0 to the highest that does."""
        counts = torch.zeros(0, dtype=torch.long)
        by_path: dict[Path, list[Span]] = {}
        for path, span in self._places:
            by_path.setdefault(path, []).append(span)
        for path, spans in by_path.items():
            for tokens, span in zip(read_tokens(path, spans), spans, strict=True):
                found = tokens[span.start :].long().bincount(minlength=len(counts))
                found[: len(counts)] += counts
                counts = found
        return counts


def step_indices(size: int, seed: int, step: int, sequences: int, process: int, num_processes: int) -> list[int]:
    """Which of ``size`` sequences a process takes at a step: the next ones of an order that every epoch shuffles anew."""
    first = (step * num_processes + process) * sequences
    places = (divmod(place, size) for place in range(first, first + sequences))
    return [_epoch_order(size, seed, epoch)[index] for epoch, index in places]


@lru_cache(maxsize=2)
def _epoch_order(size: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(size))
    random.Random(f"order {seed} {epoch}").shuffle(order)
    return tuple(order)


class Sampler:
    """Which sequences, anchors and revealed slots make the batch of a step."""

    def __init__(
        self,
        features: FeatureSet,
        *,
        block_size: int,
        mask_token_id: int,
        sequences: int,
        blocks: int,
        revealed_share: float,
        seed: int,
        process: int = 0,
        num_processes: int = 1,
    ) -> None:
        self._features = features
        self._block_size = block_size
        self._mask_token_id = mask_token_id
        self._sequences = sequences
        self._blocks = blocks
        self._revealed_share = revealed_share
        self._seed = seed
        self._process = process
        self._num_processes = num_processes

    def batch(self, step: int) -> Batch:
        randomness = random.Random(f"batch {self._seed} {step} {self._process}")
        sequences = list(self._features.read(self.indices(step)))
        anchors = torch.stack([self._anchors(sequence, randomness) for sequence in sequences])
        tokens = torch.nn.utils.rnn.pad_sequence([sequence.tokens.long() for sequence in sequences], batch_first=True)
        lengths = torch.tensor([len(sequence.tokens) for sequence in sequences])
        return Batch(
            taps=torch.nn.utils.rnn.pad_sequence([sequence.taps for sequence in sequences], batch_first=True),
            final=torch.nn.utils.rnn.pad_sequence([s.final for s in sequences if s.final is not None], batch_first=True)
            if sequences[0].final is not None
            else None,
            blocks=cut_blocks(tokens, lengths, anchors, self._block_size, self._mask_token_id, self._revealed(anchors.shape, randomness)),
        )

    def indices(self, step: int) -> list[int]:
        """The sequences of a step."""
        return step_indices(len(self._features), self._seed, step, self._sequences, self._process, self._num_processes)

    def _anchors(self, sequence: Features, randomness: random.Random) -> Tensor:
        """Positions of the answer but its last, each once as far as there are enough."""
        possible = range(sequence.span.start, len(sequence.tokens) - 1)
        if len(possible) >= self._blocks:
            return torch.tensor(randomness.sample(possible, self._blocks))
        return torch.tensor(randomness.choices(possible, k=self._blocks))

    def _revealed(self, shape: torch.Size, randomness: random.Random) -> Tensor:
        """[B, M, P-1]: in a share of the blocks 1 to P-2 random slots are shown, as after an earlier denoising step."""
        num_slots = self._block_size - 1
        revealed = torch.zeros(*shape, num_slots, dtype=torch.bool)
        for row in revealed.view(-1, num_slots):
            if num_slots > 1 and randomness.random() < self._revealed_share:
                row[randomness.sample(range(num_slots), randomness.randint(1, num_slots - 1))] = True
        return revealed


def cut_blocks(tokens: Tensor, lengths: Tensor, anchors: Tensor, block_size: int, mask_token_id: int, revealed: Tensor) -> Blocks:
    """Blocks at ``anchors`` [B, M] of ``tokens`` [B, N]; ``revealed`` [B, M, P-1] slots show their true token.

    A slot behind the end of its sequence holds token 0 where something must be read, and is not counted. The token before the first
    position of a sequence is that position's own.
    """
    rows = anchors[:, :, None] + torch.arange(-1, block_size)
    inside = rows < lengths[:, None, None]
    found = tokens.gather(1, rows.clamp(0, tokens.shape[1] - 1).flatten(1)).reshape(rows.shape).where(inside, torch.zeros(()).long())
    true = found[..., 1:]
    shown = true.clone()
    hidden = ~revealed | ~inside[..., 2:]
    shown[..., 1:] = torch.where(hidden, torch.full_like(true[..., 1:], mask_token_id), true[..., 1:])
    return Blocks(
        anchors=anchors,
        shown=shown,
        previous=found[..., :-1],
        labels=true[..., 1:],
        counted=inside[..., 2:] & ~revealed,
        target_rows=rows[..., 1:-1].clamp(max=tokens.shape[1] - 1),
    )
