"""The drafter against the method's equations: a context that grows row by row in Python lists, no static cache, no gather."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.close import assert_close
from tests.tiny import rope_theta, write_drafter, write_target
from xpress_export.checkpoints import open_drafter
from xpress_export.models.drafter import Drafter
from xpress_runtime.sets import AttentionForm

# fp32 through two layers, sums in another order.
TOLERANCE = 1e-5

NUM_POSITIONS = 40
BLOCK_SIZE = 4


class Reference:
    """One sequence: ``extend`` appends verified rows to the context, ``draft`` fills a block behind it and keeps nothing."""

    def __init__(self, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        self.tensors = tensors
        self.config = config
        self.keys: list[list[Tensor]] = [[] for _ in range(config["num_hidden_layers"])]
        self.values: list[list[Tensor]] = [[] for _ in range(config["num_hidden_layers"])]

    def extend(self, taps: Tensor) -> None:
        for row in taps:
            context = self.norm(self.tensors["fc.weight"] @ row, "hidden_norm")
            for layer in range(len(self.keys)):
                position = len(self.keys[layer])
                self.keys[layer].append(self.key(layer, context, position))
                self.values[layer].append(self.value(layer, context))

    def draft(self, embeddings: Tensor) -> Tensor:
        length = len(self.keys[0])
        hidden = list(embeddings)
        for layer in range(len(self.keys)):
            states = [self.norm(row, f"layers.{layer}.input_layernorm") for row in hidden]
            keys = self.keys[layer] + [self.key(layer, row, length + slot) for slot, row in enumerate(states)]
            values = self.values[layer] + [self.value(layer, row) for row in states]
            hidden = [
                self.mlp(layer, row + self.attend(layer, states[slot], length + slot, keys, values)) for slot, row in enumerate(hidden)
            ]
        return torch.stack([self.norm(row, "norm") for row in hidden])

    def attend(self, layer: int, row: Tensor, position: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        head_dim, heads = self.config["head_dim"], self.config["num_attention_heads"]
        group = heads // self.config["num_key_value_heads"]
        queries = self.heads(layer, "q", row)
        attended = []
        for head in range(heads):
            query = self.rotate(self.norm(queries[head], f"layers.{layer}.self_attn.q_norm"), position)
            scores = torch.stack([query @ key[head // group] / head_dim**0.5 for key in keys])
            weights = scores.softmax(dim=0)
            attended.append(sum(weight * value[head // group] for weight, value in zip(weights, values, strict=True)))
        return self.project(layer, "self_attn.o_proj", torch.cat(attended))

    def mlp(self, layer: int, row: Tensor) -> Tensor:
        states = self.norm(row, f"layers.{layer}.post_attention_layernorm")
        gate, up = self.project(layer, "mlp.gate_proj", states), self.project(layer, "mlp.up_proj", states)
        return row + self.project(layer, "mlp.down_proj", gate * gate.sigmoid() * up)

    def key(self, layer: int, row: Tensor, position: int) -> Tensor:
        keys = self.norm(self.heads(layer, "k", row), f"layers.{layer}.self_attn.k_norm")
        return torch.stack([self.rotate(head, position) for head in keys])

    def value(self, layer: int, row: Tensor) -> Tensor:
        return self.heads(layer, "v", row)

    def heads(self, layer: int, kind: str, row: Tensor) -> Tensor:
        return self.project(layer, f"self_attn.{kind}_proj", row).reshape(-1, self.config["head_dim"])

    def project(self, layer: int, name: str, row: Tensor) -> Tensor:
        return self.tensors[f"layers.{layer}.{name}.weight"] @ row

    def norm(self, row: Tensor, name: str) -> Tensor:
        mean_square = (row * row).mean(dim=-1, keepdim=True)
        epsilon: float = self.config["rms_norm_eps"]
        return row / (mean_square + epsilon).sqrt() * self.tensors[f"{name}.weight"]

    def rotate(self, head: Tensor, position: int) -> Tensor:
        half = len(head) // 2
        rotated = head.clone()
        for index in range(half):
            angle = torch.tensor(position * rope_theta(self.config) ** (-index / half), dtype=torch.float64)
            rotated[index] = head[index] * angle.cos() - head[index + half] * angle.sin()
            rotated[index + half] = head[index + half] * angle.cos() + head[index] * angle.sin()
        return rotated


@dataclass
class Case:
    """A random drafter with its published tensors."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    drafters: dict[AttentionForm, Drafter]

    def reference(self) -> Reference:
        return Reference(self.tensors, self.config)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("drafter")
    write_target(folder / "target", "qwen3", rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    tensors = write_drafter(folder / "drafter", folder / "target", block_size=BLOCK_SIZE, tap_layers=(0, 2))
    config = json.loads((folder / "drafter" / "config.json").read_text())
    checkpoint = open_drafter(str(folder / "drafter"))
    return Case(tensors, config, {form: checkpoint.drafter(NUM_POSITIONS, form) for form in AttentionForm})


class Run:
    """A drafter on caches of two rows, from one call to the next."""

    def __init__(self, drafter: Drafter, garbage: float = 3e4) -> None:
        backbone = drafter.config.backbone
        shape = (2, backbone.num_kv_heads, NUM_POSITIONS, backbone.head_dim)
        self.drafter = drafter
        self.garbage = garbage
        self.keys = [torch.full(shape, garbage) for _ in range(backbone.num_layers)]
        self.values = [torch.full(shape, -garbage) for _ in range(backbone.num_layers)]
        self.context = torch.tensor([0, 0])

    def call(self, block: Tensor, new_rows: list[Tensor], width: int) -> Tensor:
        """Feed each row's new context (padded to ``width`` tap rows with garbage) and a block behind it."""
        taps = torch.full((2, width, new_rows[0].shape[-1]), self.garbage)
        for row, values in enumerate(new_rows):
            taps[row, : len(values)] = values
        block_position = self.context + torch.tensor([len(values) for values in new_rows])
        hidden: Tensor
        hidden, self.keys, self.values = self.drafter(block, taps, self.context, block_position, self.keys, self.values)
        self.context = block_position
        return hidden


# Per call: tap rows given, and how many of them are new context of each row.
ROUNDS: tuple[tuple[int, tuple[int, int]], ...] = (
    # Prompts of 9 and 6 tokens in chunks of 5; then a first block without new context.
    (5, (5, 5)),
    (5, (4, 1)),
    (BLOCK_SIZE, (0, 0)),
    # Everything accepted beside nothing, the other way round, something in between, one row idle.
    (BLOCK_SIZE, (4, 1)),
    (BLOCK_SIZE, (1, 4)),
    (BLOCK_SIZE, (2, 3)),
    (BLOCK_SIZE, (0, 3)),
    # A backlog longer than a block, and a single tap row.
    (7, (7, 2)),
    (1, (1, 1)),
)


def inputs(case: Case, num_new: tuple[int, int], generator: torch.Generator) -> tuple[Tensor, list[Tensor]]:
    hidden = case.config["hidden_size"]
    block = torch.randn(2, BLOCK_SIZE, hidden, generator=generator)
    return block, [torch.randn(count, 2 * hidden, generator=generator) for count in num_new]


@pytest.mark.parametrize("form", AttentionForm)
def test_rounds_equal_the_equations(case: Case, form: AttentionForm) -> None:
    run = Run(case.drafters[form])
    references = case.reference(), case.reference()
    generator = torch.Generator().manual_seed(1)
    for width, num_new in ROUNDS:
        block, new_rows = inputs(case, num_new, generator)
        hidden = run.call(block, new_rows, width)
        for row, reference in enumerate(references):
            reference.extend(new_rows[row])
            assert_close(hidden[row], reference.draft(block[row]), TOLERANCE)


@pytest.mark.parametrize("form", AttentionForm)
def test_garbage_does_not_matter(case: Case, form: AttentionForm) -> None:
    """What lies behind the valid columns, and tap rows behind the new ones, change not one bit."""
    clean, dirty = (Run(case.drafters[form], garbage) for garbage in (0.0, 3e4))
    generator = torch.Generator().manual_seed(2)
    for width, num_new in ROUNDS:
        block, new_rows = inputs(case, num_new, generator)
        assert torch.equal(clean.call(block, new_rows, width), dirty.call(block, new_rows, width))
        valid = dirty.context + BLOCK_SIZE
        for caches in zip(clean.keys + clean.values, dirty.keys + dirty.values, strict=True):
            for row in range(2):
                assert torch.equal(*(cache[row, :, : valid[row]] for cache in caches))


def test_forms_agree(case: Case) -> None:
    runs = [Run(case.drafters[form]) for form in AttentionForm]
    generator = torch.Generator().manual_seed(3)
    for width, num_new in ROUNDS:
        block, new_rows = inputs(case, num_new, generator)
        by_length, by_mask = (run.call(block, new_rows, width) for run in runs)
        assert_close(by_length, by_mask, TOLERANCE)


def test_prefill_in_chunks_is_one_chunk(case: Case) -> None:
    generator = torch.Generator().manual_seed(4)
    block, prompt = inputs(case, (9, 9), generator)
    hidden = []
    for chunks in ((9,), (4, 4, 1), (1,) * 9):
        run, start = Run(case.drafters[AttentionForm.LENGTH]), 0
        for width in chunks:
            run.call(torch.randn(block.shape, generator=generator), [rows[start : start + width] for rows in prompt], width)
            start += width
        hidden.append(run.call(block, [rows[:0] for rows in prompt], 1))
    assert_close(hidden[1], hidden[0], TOLERANCE)
    assert_close(hidden[2], hidden[0], TOLERANCE)


def test_block_sees_itself_both_ways(case: Case) -> None:
    """Changing the last slot changes the first one, and changing the first context row changes every slot."""
    generator = torch.Generator().manual_seed(5)
    block, prompt = inputs(case, (6, 6), generator)

    def hidden(block: Tensor, prompt: list[Tensor]) -> Tensor:
        return Run(case.drafters[AttentionForm.LENGTH]).call(block, prompt, 6)

    before = hidden(block, prompt)
    last_changed = block.clone()
    last_changed[:, -1] += 1
    assert ((hidden(last_changed, prompt) - before).abs().amax(dim=-1) > 1e-3).all()
    context_changed = [torch.cat([rows[:1] + 1, rows[1:]]) for rows in prompt]
    assert ((hidden(block, context_changed) - before).abs().amax(dim=-1) > 1e-3).all()


def test_past_the_end_is_refused(case: Case) -> None:
    run = Run(case.drafters[AttentionForm.LENGTH])
    run.context = torch.tensor([0, NUM_POSITIONS - BLOCK_SIZE])
    block, _ = inputs(case, (0, 0), torch.Generator().manual_seed(6))
    with pytest.raises(IndexError):
        run.call(block, [torch.zeros(1, 2 * case.config["hidden_size"])] * 2, 1)
