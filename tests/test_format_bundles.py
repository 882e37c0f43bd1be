"""Every drafter format, built into a bundle: the target's own tokens, and in every round as many as a plain reference loop keeps.

The drafter is the trained one of the conformance data, so that some drafts are accepted and some are not.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import layouts
from tests.conftest import CONFORMANCE, build
from tests.reference import ReferenceDrafter, greedy_rounds
from tests.tiny import edit_json
from xpress_export.checkpoints import Location
from xpress_export.parity.reference import TransformersReference
from xpress_runtime.backends import open_backend
from xpress_runtime.generation import GenerationConfig
from xpress_runtime.session import Session

CASE = CONFORMANCE / "qwen3-b4"
XPRESS, BARE = CASE / "xpress", CASE / "dflash"
NUM_TOKENS = 40
NUM_PROMPTS = 4
# Every fourth token cannot be drafted.
DRAFT_TOKENS = [token for token in range(97) if token % 4]


class MarkovReference(ReferenceDrafter):
    """base + w2(w1[token before]), from left to right."""

    def _refine(self, hidden: Tensor, anchor: int, predecessor: int, num_passes: int) -> list[int]:  # noqa: ARG002
        base = self.base_logits(hidden)
        if not num_passes:
            return base.argmax(dim=-1).tolist()
        drafts, previous = [], anchor
        for slot in range(self.block_size - 1):
            previous = int((base[slot] + self.weights["markov_w2.weight"] @ self.weights["markov_w1.weight"][previous]).argmax())
            drafts.append(previous)
        return drafts


class ReducedReference(ReferenceDrafter):
    def base_logits(self, hidden: Tensor) -> Tensor:
        logits = super().base_logits(hidden)
        return logits.masked_fill(torch.tensor([token not in DRAFT_TOKENS for token in range(logits.shape[1])]), float("-inf"))


class AnchorReference(ReferenceDrafter):
    """As the vLLM port: the anchor stands for the token before it."""

    def draft(self, context_taps: Tensor, anchor: int, predecessor: int, num_passes: int) -> list[int]:  # noqa: ARG002
        return super().draft(context_taps, anchor, anchor, num_passes)


@dataclass(frozen=True)
class Format:
    """``write(folder)`` makes the drafter, and the same in ``folder/serving`` for the reference, and says what ``--drafter`` is."""

    write: Callable[[Path], Path]
    num_passes: int
    reference: type[ReferenceDrafter] = ReferenceDrafter


def _copied(source: Path, folder: Path, **fields: Any) -> Path:
    shutil.copytree(source, folder / "serving")
    edit_json(folder / "serving" / "config.json", **fields)
    return folder / "serving"


def _layout(write: Callable[..., None], source: Path, **options: Any) -> Callable[[Path], Path]:
    def wrote(folder: Path) -> Path:
        write(_copied(source, folder), folder / "drafter", **options)
        return folder / "drafter"

    return wrote


def _training(folder: Path) -> Path:
    layouts.training_checkpoint(_copied(XPRESS, folder), folder / "drafter" / "step_1200.pt")
    return folder / "drafter" / "step_1200.pt"


def _markov(folder: Path, *, layout: bool) -> Path:
    source = _copied(BARE, folder, markov_rank=4)
    tensors = load_file(source / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    tensors |= {name: torch.randn(97, 4, generator=generator) for name in ("markov_w1.weight", "markov_w2.weight")}
    save_file(tensors, source / "model.safetensors")
    if not layout:
        return source
    layouts.speculators(source, folder / "drafter")
    return folder / "drafter"


def _reduced(folder: Path) -> Path:
    head = load_file(CASE / "target" / "model.safetensors")["lm_head.weight"]
    layouts.speculators(_copied(XPRESS, folder), folder / "drafter", draft_token_ids=DRAFT_TOKENS, own_head=head[DRAFT_TOKENS].contiguous())
    return folder / "drafter"


WINDOW = {"use_sliding_window": True, "sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]}

FORMATS = {
    "serving": Format(lambda folder: _copied(XPRESS, folder), 3),
    "flat": Format(_layout(layouts.flat_config, XPRESS), 3),
    "training checkpoint": Format(_training, 3),
    "speculators xpress": Format(_layout(layouts.speculators, XPRESS, shards=2), 3),
    "speculators xpress, reduced vocabulary": Format(_reduced, 3, ReducedReference),
    "bare DFlash": Format(lambda folder: _copied(BARE, folder), 0),
    "speculators dflash": Format(_layout(layouts.speculators, BARE), 0),
    "Markov": Format(lambda folder: _markov(folder, layout=False), 3, MarkovReference),
    "speculators dspark": Format(lambda folder: _markov(folder, layout=True), 3, MarkovReference),
    "anchor as its own predecessor": Format(lambda folder: _copied(XPRESS, folder, anchor_predecessor="anchor"), 3, AnchorReference),
    "windows": Format(lambda folder: _copied(XPRESS, folder, **WINDOW), 1),
    "own scale and cap": Format(lambda folder: _copied(XPRESS, folder, output_multiplier=0.05, final_logit_softcapping=2.0), 3),
}


@pytest.fixture(scope="module")
def prompts() -> list[dict[str, Any]]:
    expected = json.loads((CASE / "expected.json").read_text(encoding="utf-8"))
    return list(expected["prompts"][:NUM_PROMPTS])


@pytest.fixture(scope="module")
def target_reference() -> TransformersReference:
    return TransformersReference(Location(CASE / "target", "target"), ())


@pytest.mark.parametrize("name", FORMATS)
def test_tokens_and_rounds(name: str, prompts: list[dict[str, Any]], target_reference: TransformersReference, tmp_path: Path) -> None:
    made = FORMATS[name]
    drafter = made.write(tmp_path)
    passes = (made.num_passes,) if made.num_passes else None
    built = build(CASE / "target", drafter, tmp_path / "bundle", num_passes=passes, capacity=128, prefill_chunk=16)
    tables = load_file(CASE / "target" / "model.safetensors")
    reference = made.reference(tmp_path / "serving", tables["model.embed_tokens.weight"], tables["lm_head.weight"])
    kept: list[int] = []
    with Session(built.bundle, open_backend("ort-cpu", threads=1)) as session:
        for prompt in prompts:
            for num_passes in dict.fromkeys((made.num_passes, 0)):
                result = session.generate(prompt["prompt"], GenerationConfig(NUM_TOKENS, num_passes=num_passes, ignore_stop=True))
                assert list(result.tokens) == prompt["plain"]
                taps = target_reference.hidden_states([*prompt["prompt"], *result.tokens], reference.taps)
                with torch.inference_mode():
                    expected = greedy_rounds(reference, taps, prompt["prompt"], result.tokens, num_passes)
                assert result.stats.kept_lengths == expected, f"{num_passes} passes"
                kept += expected
    # Some drafts are accepted, and some are not.
    assert 1.2 * len(kept) < sum(kept) < 3.95 * len(kept)
