"""Fourth stage: the drafter, trained on cached features, without the target.

Puts the parts together: sizes, tables of the target, batches, losses, the loop, and the folder in the serving format that
``xpress-export build`` takes. Knows nothing of how a loop runs or what a loss is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from examples.distill.batches import Batch, FeatureSet, Sampler
from examples.distill.card import write_card
from examples.distill.drafter import READOUT, TrainedDrafter
from examples.distill.loop import LOSS, Task, run_loop
from examples.distill.losses import block_losses
from examples.distill.processes import accelerator as find_accelerator
from examples.distill.replay import replay
from examples.distill.run_folder import RunFolder, check_same, replaced, write_json
from examples.distill.settings import Settings, TrainingSettings
from examples.distill.sizes import drafter_sizes
from examples.distill.tables import DraftVocabulary, TargetTables, read_vocabulary
from examples.distill.target import Target
from examples.distill.warm_start import begin
from xpress_export.checkpoints.formats.description import IN_DRAFT, OWN_HEAD, TO_TARGET
from xpress_runtime.errors import OptionError

# What may change between two calls of one training run.
_FREE = {"steps", "checkpoint_minutes", "evaluate_steps", "log_steps"}
_LOSSES = (LOSS, "refined", "free", "base", "variation", "slot_1")


class Objective(nn.Module):
    """The drafter and its losses as one call, which is what ``accelerate`` spreads over processes."""

    def __init__(self, drafter: TrainedDrafter, tables: TargetTables, settings: TrainingSettings) -> None:
        super().__init__()
        self.drafter = drafter
        self._tables = tables
        self._settings = settings

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        found = block_losses(self.drafter, self._tables, batch, self._settings)
        return dict(zip(_LOSSES, (found.total, found.refined, found.free, found.base, found.variation, found.correct), strict=True))


def train_drafter(settings: Settings, folder: RunFolder, report: Callable[[str], None]) -> None:
    """Train the drafter to its last step and leave the best checkpoint in ``drafter/``."""
    training = settings.training
    accelerator = find_accelerator()
    target = Target(settings.target)
    train, held_out = FeatureSet(folder, "train"), FeatureSet(folder, "held_out")
    sizes = drafter_sizes(settings.drafter, target.checkpoint.config, target.special_token_ids(), settings.prompts.thinking)
    has_head = bool(sizes.refiner_rank or sizes.markov_rank)
    if not (training.base_weight or (has_head and (training.refined_weight or (training.free_weight and training.free_rounds)))):
        raise OptionError("no part of the loss has a weight; set base_weight, refined_weight or free_weight under [training] above 0")
    note = folder.training / "training.json"
    depends = {"target": target.identity, **settings.drafter.model_dump(), **training.model_dump(exclude=_FREE)}
    check_same(note, depends, "train", "remove its training and drafter")
    say = report if accelerator.is_main_process else lambda _: None
    vocabulary = read_vocabulary(settings, target, train, accelerator.device, say)
    tables, num_tokens = vocabulary.tables, int(vocabulary.counts.sum())
    check_mask_token(sizes.mask_token_id, vocabulary.counts, is_stated=settings.drafter.mask_token_id is not None, say=say)
    drafter = TrainedDrafter(sizes, training.dropout, training.feature_noise)
    begin(drafter, training, target, say)
    if accelerator.is_main_process:
        write_json(note, depends)
    sampler = Sampler(
        train,
        block_size=sizes.block_size,
        mask_token_id=sizes.mask_token_id,
        sequences=training.sequences,
        blocks=training.blocks,
        revealed_share=training.revealed_share,
        seed=training.seed,
        process=accelerator.process_index,
        num_processes=accelerator.num_processes,
    )
    passes = (sizes.num_passes, 0) if sizes.refiner_rank and sizes.num_passes else (0,)
    if sizes.markov_rank:
        passes = (sizes.block_size - 1, 0)
    facts = {
        "sequences": len(train),
        "answer_tokens": num_tokens,
        "softmax_tokens": len(tables.head),
        "draft_tokens": sizes.vocab_size if vocabulary.drafted is None else len(vocabulary.drafted.tokens),
        **_given(settings),
    }

    def evaluate() -> dict[str, float]:
        found = replay(drafter, tables, held_out.all(), passes)
        return {f"tau_{num_passes}": found[num_passes].length for num_passes in passes}

    def keep(step: int, figures: dict[str, float]) -> None:
        write_drafter(drafter, vocabulary.drafted, folder)
        write_json(folder.drafter / "training.json", {"step": step, "held_out": figures, **facts})
        write_card(folder, sizes, target)

    say(f"{len(train)} sequences, {num_tokens} answer tokens, softmax over {len(tables.head)} of {sizes.vocab_size} tokens")
    task = Task(
        objective=Objective(drafter, tables, training),
        batch=sampler.batch,
        losses=_LOSSES,
        figures=tuple(f"tau_{num_passes}" for num_passes in passes),
        evaluate=evaluate,
        keep=keep,
    )
    run_loop(task, training, folder.training, accelerator, report)


def check_mask_token(mask_token_id: int, counts: Tensor, *, is_stated: bool, say: Callable[[str], None]) -> None:
    """A mask that answers hold means two things to the drafter: refused where nobody chose it, pointed out where somebody did."""
    times = int(counts[mask_token_id]) if mask_token_id < len(counts) else 0
    if times and not is_stated:
        raise OptionError(
            f"mask_token_id under [drafter] is missing, and the tokenizer's mask or padding token, id {mask_token_id}, occurs {times} "
            "times in the answers; name a token that texts do not hold"
        )
    if times:
        say(f"the mask token, id {mask_token_id}, occurs {times} times in the answers; one that texts do not hold is better")


def write_drafter(drafter: TrainedDrafter, drafted: DraftVocabulary | None, folder: RunFolder) -> None:
    """The drafter in the serving format, half precision; each file as a whole. ``drafted``: None where every token can be."""
    into = folder.make(folder.drafter)
    state = {name: tensor.detach().half().cpu().contiguous() for name, tensor in drafter.serving_state().items()}
    config = drafter.sizes.serving_config()
    if drafted is not None:
        if READOUT in state:
            state[READOUT] = state[READOUT][drafted.tokens]
        state[OWN_HEAD] = drafted.head.half().contiguous()
        state[TO_TARGET] = drafted.tokens - torch.arange(len(drafted.tokens))
        state[IN_DRAFT] = torch.zeros(drafter.sizes.vocab_size, dtype=torch.bool).index_fill_(0, drafted.tokens, True)
        config["draft_vocab_size"] = len(drafted.tokens)
    with replaced(into / "model.safetensors", errors=(SafetensorError,)) as scratch:
        save_file(state, scratch, {"format": "pt"})
    write_json(into / "config.json", config)


def _given(settings: Settings) -> dict[str, Any]:
    """What a model card says of how it was made."""
    return {
        "prompts": settings.prompts.model_dump(include={"families", "files"}),
        "answers": settings.answers.model_dump(include={"max_new_tokens", "temperature", "top_p", "precision"}),
        "features": {"precision": settings.target.precision},
        "training": settings.training.model_dump(exclude={"checkpoint_minutes", "evaluate_steps", "log_steps"}),
    }
