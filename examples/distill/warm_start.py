"""What a drafter begins with: a checkpoint of any published format, an earlier run's drafter, the target's own layers, or random numbers.

Knows checkpoints and names of tensors; knows nothing of training.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from examples.distill.drafter import READOUT, TrainedDrafter
from examples.distill.run_folder import RunFolder
from examples.distill.settings import TrainingSettings
from examples.distill.target import Target
from xpress_export.checkpoints import open_drafter
from xpress_export.checkpoints.pairing import check_pairing
from xpress_export.checkpoints.tensors import TensorSource
from xpress_runtime.errors import CheckpointError

FROM_TARGET = "target"
_LAYER_TENSORS = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
)


def begin(drafter: TrainedDrafter, settings: TrainingSettings, target: Target, report: Callable[[str], None]) -> None:
    """Fill the drafter's parameters. Raises CheckpointError where a checkpoint has other sizes."""
    _initialise(drafter, settings.seed)
    if settings.warm_start == FROM_TARGET:
        _from_target(drafter, target, report)
    elif settings.warm_start is not None:
        earlier = RunFolder(Path(settings.warm_start)).drafter
        _from_checkpoint(drafter, str(earlier) if earlier.is_dir() else settings.warm_start, target, report)


def _initialise(drafter: TrainedDrafter, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in drafter.named_parameters():
        if parameter.ndim == 2 and not name.endswith(("w2.weight",)):
            scale = 0.02 if name.endswith("w1.weight") else parameter.shape[1] ** -0.5
            parameter.data.normal_(0, scale, generator=generator)
    # What a layer adds is small at first.
    for name, parameter in drafter.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.mul_(0.5)


def _from_checkpoint(drafter: TrainedDrafter, reference: str, target: Target, report: Callable[[str], None]) -> None:
    """Any published format: it is opened as the exporter opens it."""
    checkpoint = open_drafter(reference)
    check_pairing(target.checkpoint, checkpoint)
    state = drafter.serving_state()
    taken = 0
    for name, parameter in state.items():
        if name not in checkpoint.tensors.shapes:
            # A bare DFlash drafter gets a head of its own, which begins as no correction.
            if name.startswith(("xpress_head.", "markov_")):
                continue
            raise CheckpointError(f"'{reference}' has no tensor {name}; it is smaller than the drafter under [drafter]")
        # A reduced vocabulary has rows for its own tokens; the others begin as no correction.
        drafted = checkpoint.draft_token_ids if name == READOUT else None
        asked = tuple(parameter.shape) if drafted is None else (len(drafted), *parameter.shape[1:])
        if checkpoint.tensors.shapes[name] != asked:
            raise CheckpointError(
                f"'{reference}': tensor {name} has shape {list(checkpoint.tensors.shapes[name])}, and [drafter] asks for {list(asked)}"
            )
        parameter[slice(None) if drafted is None else drafted] = checkpoint.tensors.read(name)
        taken += 1
    if checkpoint.config.tap_layers != drafter.sizes.tap_layers:
        raise CheckpointError(
            f"'{reference}' taps layers {list(checkpoint.config.tap_layers)}, and [drafter] {list(drafter.sizes.tap_layers)}"
        )
    report(f"begins with {taken} of {len(state)} tensors of '{reference}'")


def _from_target(drafter: TrainedDrafter, target: Target, report: Callable[[str], None]) -> None:
    """Layers spread over the target, its last among them; a target whose layers have another form gives what has the same shape."""
    tensors, sizes = target.checkpoint.tensors, drafter.sizes
    state = drafter.serving_state()
    # The last layers write what the head reads.
    last = sizes.num_target_layers
    layers = [round((index + 1) * last / sizes.num_layers) - 1 for index in range(sizes.num_layers)]
    taken: set[str] = set()
    for index, layer in enumerate(layers):
        for name in _LAYER_TENSORS:
            taken |= _take(state, f"layers.{index}.{name}", f"model.layers.{layer}.{name}", tensors)
    taken |= _take(state, "norm.weight", "model.norm.weight", tensors)
    if not taken:
        raise CheckpointError(f"{target.name} has no layer of the drafter's form; leave warm_start out")
    report(f"begins with the target's layers {', '.join(map(str, layers))} ({len(taken)} tensors)")


def _take(state: dict[str, Tensor], ours: str, theirs: str, tensors: TensorSource) -> set[str]:
    if tensors.shapes.get(theirs) != tuple(state[ours].shape):
        return set()
    state[ours].copy_(tensors.read(theirs))
    return {ours}
