"""Group B's drafter: the target's first layers as a causal LM, trained on the same answers as the block drafter, for an honest comparison.

Embedding, final norm and head stay the target's, so only the layers are learned. Knows nothing of blocks or features.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from examples.distill.answers import Answer, read_answers
from examples.distill.batches import step_indices
from examples.distill.loop import LOSS, Task, run_loop
from examples.distill.processes import accelerator as find_accelerator
from examples.distill.run_folder import PARTS, RunFolder, check_same, write_json
from examples.distill.settings import Settings
from examples.distill.target import Target
from xpress_runtime.errors import OptionError, OutputError


@dataclass(frozen=True)
class TokenBatch:
    """``ids`` [B, N], padded with 0; ``mask`` [B, N] of what is there; ``counted`` [B, N-1] where the next token is the answer's."""

    ids: Tensor
    mask: Tensor
    counted: Tensor

    def to(self, device: torch.device) -> TokenBatch:
        return TokenBatch(self.ids.to(device), self.mask.to(device), self.counted.to(device))


class NextToken(nn.Module):
    """Cross-entropy with the answer's tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: TokenBatch) -> dict[str, Tensor]:
        hidden = self.model.model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False).last_hidden_state
        logits = self.model.lm_head(hidden[:, :-1][batch.counted]).float()
        labels = batch.ids[:, 1:][batch.counted]
        agreement = (logits.argmax(dim=-1) == labels).float().mean()
        return {LOSS: nn.functional.cross_entropy(logits, labels), "agreement": agreement}


def train_draft_model(settings: Settings, folder: RunFolder, report: Callable[[str], None]) -> None:
    """Train it to its last step and leave the best checkpoint in ``draft_model/``; nothing where [draft_model] asks for no layer."""
    wanted = settings.draft_model
    if not wanted.num_layers:
        return
    accelerator = find_accelerator()
    target = Target(settings.target)
    if wanted.num_layers > (available := target.checkpoint.config.num_layers):
        raise OptionError(f"[draft_model] asks for {wanted.num_layers} layers, and {target.name} has {available}")
    limit = settings.features.max_length
    held_out, train = (
        [answer for answer in read_answers(folder, part) if answer.fits(limit) and len(answer.answer) >= 2] for part in PARTS
    )
    if not train or not held_out:
        raise OptionError(f"{folder.root / 'answers'} holds no answers to train and measure on; run 'generate' first")
    training = settings.training.model_copy(
        update={"steps": wanted.steps, "sequences": wanted.sequences, "learning_rate": wanted.learning_rate}
    )
    into = folder.root / "draft_model_training"
    note = into / "training.json"
    depends = {"target": target.identity, **wanted.model_dump(exclude={"steps"}), "precision": training.precision, "seed": training.seed}
    check_same(note, depends, "train", f"remove {into.name} and draft_model")
    model = _first_layers(target, wanted.num_layers, accelerator.device)
    if accelerator.is_main_process:
        write_json(note, depends)
    objective = NextToken(model)

    def batch(step: int) -> TokenBatch:
        places = step_indices(len(train), training.seed, step, wanted.sequences, accelerator.process_index, accelerator.num_processes)
        return _batch([train[index] for index in places], limit)

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        right = total = 0.0
        for first in range(0, len(held_out), wanted.sequences):
            found = _batch(held_out[first : first + wanted.sequences], limit).to(accelerator.device)
            agreement = objective(found)["agreement"]
            count = int(found.counted.sum())
            right, total = right + float(agreement) * count, total + count
        return {"agreement": right / max(1.0, total)}

    def keep(_step: int, _figures: dict[str, float]) -> None:
        _write(model, target, folder)

    task = Task(objective, batch, (LOSS, "agreement"), ("agreement",), evaluate, keep)
    run_loop(task, training, into, accelerator, lambda line: report(f"draft model: {line}"))


def _first_layers(target: Target, num_layers: int, device: torch.device) -> Any:
    model = target.model("float32", device)
    model.model.layers = model.model.layers[:num_layers]
    model.config.num_hidden_layers = num_layers
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:num_layers]
    model.requires_grad_(False)
    model.model.layers.requires_grad_(True)
    return model


def _batch(answers: Sequence[Answer], limit: int) -> TokenBatch:
    sequences = [torch.tensor(answer.tokens(limit)) for answer in answers]
    ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    places = torch.arange(ids.shape[1])
    lengths = torch.tensor([len(sequence) for sequence in sequences])[:, None]
    starts = torch.tensor([len(answer.prompt) for answer in answers])[:, None]
    counted = (places[1:] >= starts) & (places[1:] < lengths)
    return TokenBatch(ids, (places < lengths).long(), counted)


def _write(model: Any, target: Target, folder: RunFolder) -> None:
    """A folder that ``xpress-export build --draft-model`` takes, in half precision."""
    from transformers import PreTrainedTokenizerFast

    staged = folder.root / ".draft_model.part"
    shutil.rmtree(staged, ignore_errors=True)
    try:
        with TemporaryDirectory() as files:
            target.write_tokenizer(Path(files))
            # Named as a plain one, or it would be read as what the target's family usually has.
            tokenizer: Any = PreTrainedTokenizerFast(tokenizer_file=str(Path(files) / "tokenizer.json"))  # type: ignore[no-untyped-call]
        tokenizer.save_pretrained(staged)
        state = {name: tensor.half() for name, tensor in model.state_dict().items()}
        config = model.config
        config.dtype = torch.float16
        # The weights are dense, whatever file they came from.
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model.save_pretrained(staged, state_dict=state)
        shutil.rmtree(folder.draft_model, ignore_errors=True)
        staged.rename(folder.draft_model)
    except OSError as problem:
        raise OutputError(f"{folder.draft_model} cannot be written: {problem.strerror or problem}") from None
