"""Third stage: the target's taps over prompts and answers, in half precision on disk.

A shard is one safetensors file of many sequences, written as a whole; sequences that a shard holds already are not made again, so the
stage may run once more after new answers. Knows nothing of drafters but which layers they tap.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from examples.distill.answers import Answer, read_answers
from examples.distill.processes import this_process
from examples.distill.run_folder import PARTS, RunFolder, check_same, replaced, write_json
from examples.distill.settings import Settings
from examples.distill.sizes import tap_layers
from examples.distill.target import DTYPES, Target
from xpress_runtime.errors import CheckFailed, OptionError, OutputError

# Free space that is left alone on the disk.
_RESERVE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Span:
    """Where one sequence lies in its shard: rows ``first`` to ``first + length``; its answer begins at row ``start`` of them."""

    id: str
    family: str
    first: int
    length: int
    start: int


@dataclass(frozen=True)
class Features:
    """One sequence: ``tokens`` [N], ``taps`` [N, T·H], ``final`` [N, H] (None where not cached); the answer begins at ``start``."""

    span: Span
    tokens: Tensor
    taps: Tensor
    final: Tensor | None


def cache_features(settings: Settings, folder: RunFolder, report: Callable[[str], None]) -> None:
    """Cache the features of every answer that has none yet."""
    state = this_process()
    target = Target(settings.target)
    layers = tap_layers(settings.drafter, target.checkpoint.config.num_layers)
    with_final = settings.training.tv_weight > 0
    depends = {
        "target": target.identity,
        "precision": settings.target.precision,
        "cache": settings.features.cache,
        "tap_layers": layers,
        "max_length": settings.features.max_length,
        "final": with_final,
    }
    model = None
    for part in PARTS:
        into = folder.make(folder.features(part))
        note = into / "features.json"
        check_same(note, depends, "features", "remove its features")
        state.wait_for_everyone()
        known = {span.id for path in shard_paths(folder, part) for span in read_spans(path)}
        sequences = [answer for answer in read_answers(folder, part) if answer.id not in known]
        state.wait_for_everyone()
        kept = [answer for answer in sequences if answer.fits(settings.features.max_length)]
        if len(kept) < len(sequences):
            report(
                f"{part}: {len(sequences) - len(kept)} prompts are left out, they reach max_length = {settings.features.max_length} tokens"
            )
        mine = kept[state.process_index :: state.num_processes]
        if not mine:
            continue
        width = target.checkpoint.config.hidden_size * (len(layers) + with_final)
        num_bytes = sum(len(answer.prompt) + len(answer.answer) for answer in kept) * width * 2
        if state.is_main_process:
            report(f"{part}: features of {len(kept)} sequences take {num_bytes / 1e9:.2f} GB")
            _check_space(into, num_bytes)
            write_json(note, depends)
        if model is None:
            model = target.model(settings.target.precision, state.device)
        size = settings.features.shard_sequences
        for first in range(0, len(mine), size):
            shard = mine[first : first + size]
            path = _free_name(into, state.process_index)
            _write_shard(path, _tensors(model, shard, layers, settings, with_final=with_final))
            report(f"{part}: features of {min(first + size, len(mine))} of {len(mine)} sequences")
    state.wait_for_everyone()


def shard_paths(folder: RunFolder, part: str) -> list[Path]:
    return sorted(folder.features(part).glob("process-*.safetensors"))


def read_spans(path: Path) -> list[Span]:
    """What a shard holds. Raises OptionError where it is damaged."""
    try:
        with safe_open(path, framework="pt") as shard:
            return [Span(**span) for span in json.loads(shard.metadata()["spans"])]
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as problem:
        raise OptionError(f"{path} is no shard of features ({problem}); remove it and run 'features' again") from None


def read_features(path: Path, spans: Sequence[Span]) -> Iterator[Features]:
    """Some sequences of a shard; only their rows are read."""
    with safe_open(path, framework="pt") as shard:
        tokens, taps = shard.get_slice("tokens"), shard.get_slice("taps")
        final = shard.get_slice("final") if "final" in shard.keys() else None  # noqa: SIM118, not a mapping
        for span in spans:
            rows = slice(span.first, span.first + span.length)
            yield Features(span, tokens[rows], taps[rows], None if final is None else final[rows])


def read_tokens(path: Path, spans: Sequence[Span]) -> Iterator[Tensor]:
    """The tokens of some sequences of a shard."""
    with safe_open(path, framework="pt") as shard:
        tokens = shard.get_tensor("tokens")
    for span in spans:
        yield tokens[span.first : span.first + span.length]


@torch.inference_mode()
def _tensors(
    model: Any, answers: Sequence[Answer], layers: Sequence[int], settings: Settings, *, with_final: bool
) -> tuple[dict[str, Tensor], list[Span]]:
    """Tensors of a shard, its sequences in the order given."""
    limit, dtype = settings.features.max_length, DTYPES[settings.features.cache]
    tokens = [torch.tensor(answer.tokens(limit)) for answer in answers]
    taps: list[Tensor] = [torch.empty(0)] * len(answers)
    final: list[Tensor] = [torch.empty(0)] * len(answers)
    by_length = sorted(range(len(answers)), key=lambda index: len(tokens[index]))
    while by_length:
        # The longest first, so that a batch that is too large for memory fails at once.
        num_rows = max(1, settings.features.batch_tokens // len(tokens[by_length[-1]]))
        batch, by_length = by_length[-num_rows:], by_length[:-num_rows]
        padded = torch.nn.utils.rnn.pad_sequence([tokens[index] for index in batch], batch_first=True)
        lengths = torch.tensor([len(tokens[index]) for index in batch])
        mask = torch.arange(padded.shape[1])[None, :] < lengths[:, None]
        output = model.model(
            input_ids=padded.to(model.device), attention_mask=mask.long().to(model.device), output_hidden_states=True, use_cache=False
        )
        # The first entry is the embedding's output; the last one is behind the final norm.
        tapped = torch.cat([output.hidden_states[layer + 1] for layer in layers], dim=-1)
        for row, index in enumerate(batch):
            taps[index] = tapped[row, : len(tokens[index])].to(dtype).cpu()
            final[index] = output.last_hidden_state[row, : len(tokens[index])].to(dtype).cpu()
            if not taps[index].isfinite().all():
                raise CheckFailed(
                    f"taps of prompt {answers[index].id} exceed the range of {settings.features.cache}; "
                    'set cache = "bfloat16" under [features] (or the target gives no finite numbers in its precision)'
                )
    spans, first = [], 0
    for answer, row_tokens in zip(answers, tokens, strict=True):
        spans.append(Span(answer.id, answer.family, first, len(row_tokens), len(answer.prompt)))
        first += len(row_tokens)
    tensors = {"tokens": torch.cat(tokens).int(), "taps": torch.cat(taps)}
    if with_final:
        tensors["final"] = torch.cat(final)
    return tensors, spans


def _write_shard(path: Path, shard: tuple[dict[str, Tensor], list[Span]]) -> None:
    tensors, spans = shard
    with replaced(path, "the shards before it are kept: make room and run 'features' again", (SafetensorError,)) as scratch:
        save_file(tensors, scratch, {"spans": json.dumps([asdict(span) for span in spans])})


def _free_name(folder: Path, process: int) -> Path:
    number = sum(1 for _ in folder.glob(f"process-{process}-*.safetensors"))
    return folder / f"process-{process}-{number:05d}.safetensors"


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed + _RESERVE_BYTES:
        raise OutputError(
            f"{folder} has {free / 1e9:.1f} GB of space and the features need {needed / 1e9:.1f} GB; make room, use another run folder, "
            "or generate fewer or shorter answers"
        )
