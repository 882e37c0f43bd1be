"""The inputs of acceptance and of the graphs of sampling: blocks of the drafter's logits, with targets that agree with them in part.

Knows these graphs' inputs; knows nothing about models.

Sizes: B rows, P block size, W verified slots, V vocabulary, Q scored tokens of a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from xpress_export.parity.modules import Tensors
from xpress_runtime.sampling import KEY_NUMBERS, NOISE_PRIME

# Takes a graph's inputs and answers with its reference outputs.
Call = Callable[[Tensors], Tensors]

_TEMPERATURES = (0.7, 1.5)
_CANDIDATES = 8
# Target's logits beside the drafter's: close enough that drafts are accepted now and then.
_DISAGREEMENT = 0.5
_TOP_K, _TOP_P, _MIN_P = (1, 5, 10**6), (0.3, 0.9, 1.0), (0.0, 0.1)
_REPETITION, _PRESENCE, _FREQUENCY = (1.3, 1.0), (0.5, 0.0), (-0.25, 0.0)


class Draw:
    """Random inputs of blocks of ``block_size`` from a vocabulary."""

    def __init__(self, generator: torch.Generator, vocab_size: int, block_size: int) -> None:
        self.generator = generator
        self.vocab_size = vocab_size
        self.block_size = block_size

    def ids(self, *shape: int) -> Tensor:
        return torch.randint(self.vocab_size, shape, generator=self.generator)

    def positions(self, batch: int) -> Tensor:
        return torch.randint(1000, (batch,), generator=self.generator)

    def numbers(self, batch: int, greedy: int) -> Tensors:
        """What a graph that draws reads of its rows. All are sampled, but for row ``greedy`` where there are several."""
        is_greedy = (torch.arange(batch) == greedy) & (batch > 1)
        temperatures = torch.tensor([_TEMPERATURES[row % len(_TEMPERATURES)] for row in range(batch)])
        return {
            "noise_key": torch.randint(NOISE_PRIME, (batch, KEY_NUMBERS), generator=self.generator),
            "inverse_temperature": torch.where(is_greedy, 1.0, 1 / temperatures),
            "sampled": (~is_greedy).long(),
        }

    def from_softmax(self, scores: Tensor) -> Tensor:
        """scores [..., Q] → an index each."""
        weights = torch.softmax(scores, dim=-1).flatten(0, -2)
        return torch.multinomial(weights, 1, generator=self.generator).reshape(scores.shape[:-1])

    def near(self, logits: Tensor) -> Tensor:
        """Logits of another model that mostly agrees."""
        return logits + _DISAGREEMENT * torch.randn(logits.shape, generator=self.generator)


class SamplingFeed:
    """``blocks`` answers with anchors [B] and base logits [B, P-1, V] of some blocks, once the drafter was called."""

    def __init__(self, draw: Draw, cache_rows: int, blocks: Callable[[], list[Tensors]]) -> None:
        self._draw = draw
        self._cache_rows = cache_rows
        self._blocks = blocks

    def calls(self) -> dict[str, Callable[[Call], None]]:
        """Graphs of sampling, each with the function that makes its calls."""
        return {
            "sample": self._sample,
            "accept-sampled": self._accept_sampled,
            "accept-candidates": self._accept_candidates,
            "filter-top-k": lambda call: self._filter(call, [{"top_k": value} for value in _TOP_K]),
            "filter-top-p": lambda call: self._filter(call, [{"top_p": p, "min_p": least} for p in _TOP_P for least in _MIN_P]),
            "penalise": self._penalise,
            "count": self._count,
        }

    def accept(self, call: Call) -> None:
        """Greedy acceptance of every length, and plain decoding."""
        for inputs in self._accept_cases():
            call(inputs)

    def _accept_cases(self) -> Iterator[Tensors]:
        draw, width = self._draw, self._draw.block_size
        target = draw.ids(2, width)
        for accepted in range(width):
            verify = torch.cat([draw.ids(2, 1), target[:, :-1]], dim=1)
            if accepted < width - 1:
                verify[0, accepted + 1] = (verify[0, accepted + 1] + 1) % draw.vocab_size
            yield {"verify_ids": verify, "target_tokens": target, **self._state(torch.tensor([40, 3]), torch.tensor([1, accepted % 2]))}
        # Plain decoding, up to and past the position from which rows are frozen.
        for position in range(max(0, self._cache_rows - 4 * width), self._cache_rows, 2):
            state = self._state(torch.tensor([position, position + 1]), torch.tensor([1, 1]))
            yield {"verify_ids": draw.ids(2, 1), "target_tokens": draw.ids(2, 1), **state}

    def _state(self, position: Tensor, active: Tensor) -> Tensors:
        return {"position": position, "predecessor": self._draw.ids(position.shape[0]), "active": active}

    def _sample(self, call: Call) -> None:
        for number, block in enumerate(self._blocks()):
            for logits in torch.split(block["base_logits"], 1, dim=1):
                batch = logits.shape[0]
                call({"logits": logits, "position": self._draw.positions(batch), **self._draw.numbers(batch, greedy=number)})

    def _accept_sampled(self, call: Call) -> None:
        for number, block in enumerate(self._blocks()):
            base, numbers = block["base_logits"], self._draw.numbers(block["anchor"].shape[0], greedy=number)
            scores = base * numbers["inverse_temperature"][:, None, None]
            self._verify(call, block, self._drafts(scores, numbers), numbers, {"draft_scores": scores})

    def _accept_candidates(self, call: Call) -> None:
        for number, block in enumerate(self._blocks()):
            base, numbers = block["base_logits"], self._draw.numbers(block["anchor"].shape[0], greedy=number)
            top = base.topk(min(_CANDIDATES, self._draw.vocab_size), dim=-1)
            scores = top.values * numbers["inverse_temperature"][:, None, None]
            drafts = top.indices.gather(-1, self._drafts(scores, numbers)[..., None])[..., 0]
            self._verify(call, block, drafts, numbers, {"draft_scores": scores, "candidates": top.indices})
            # As lookup proposes: one candidate, and no doubt.
            certain = {"draft_scores": torch.zeros_like(scores[..., :1]), "candidates": drafts[..., None]}
            self._verify(call, block, drafts, numbers, certain)

    def _drafts(self, scores: Tensor, numbers: Tensors) -> Tensor:
        """Places [B, P-1] in the last axis of scores: drawn, in greedy rows the best."""
        return torch.where(numbers["sampled"][:, None] == 1, self._draw.from_softmax(scores), scores.argmax(dim=-1))

    def _verify(self, call: Call, block: Tensors, drafts: Tensor, numbers: Tensors, drawn_from: Tensors) -> None:
        """All slots with every row active, and of two rows the first two slots with one row that is not."""
        base, batch = block["base_logits"], drafts.shape[0]
        verify = torch.cat([block["anchor"][:, None], drafts], dim=1)
        logits = self._draw.near(torch.cat([base, base[:, -1:]], dim=1))
        for width, active in ((verify.shape[1], torch.ones(batch)), (2, torch.arange(batch) == 0))[:batch]:
            state = self._state(self._draw.positions(batch), active.long())
            call({"verify_ids": verify[:, :width], "logits": logits[:, :width], **drawn_from, **state, **numbers})

    def _filter(self, call: Call, limits: list[dict[str, float]]) -> None:
        for number, block in enumerate(self._blocks()):
            logits, batch = block["base_logits"], block["anchor"].shape[0]
            scale = self._draw.numbers(batch, greedy=number)["inverse_temperature"]
            # Rows with limits of their own, another pair in each call.
            own = [limits[(number + row) % len(limits)] for row in range(batch)]
            given = {name: torch.tensor([limit[name] for limit in own]) for name in limits[0]}
            for width in (logits.shape[1], 1):
                call({"logits": logits[:, :width], "inverse_temperature": scale, **given})

    def _penalise(self, call: Call) -> None:
        for block in self._blocks():
            logits, batch = block["base_logits"], block["anchor"].shape[0]
            verify = logits.argmax(dim=-1)
            rates = {
                name: torch.tensor([values[row % len(values)] for row in range(batch)])
                for name, values in (("repetition", _REPETITION), ("presence", _PRESENCE), ("frequency", _FREQUENCY))
            }
            given = {"counts": self._counts(batch), "in_prompt": self._counts(batch).clamp(max=1), **rates}
            call({"logits": logits, "verify_ids": verify, **given})
            # The first token: no token stands before it.
            call({"logits": logits[:, :1], "verify_ids": torch.full((batch, 1), -1), **given})

    def _count(self, call: Call) -> None:
        batch, block_size = 2, self._draw.block_size
        for width in (block_size, 1):
            for num_emitted in ((0, width), (width, 1)):
                call(
                    {
                        "counts": self._counts(batch),
                        "verify_ids": self._draw.ids(batch, width),
                        "num_emitted": torch.tensor(num_emitted),
                    }
                )

    def _counts(self, batch: int) -> Tensor:
        return torch.randint(3, (batch, self._draw.vocab_size), generator=self._draw.generator).float()
