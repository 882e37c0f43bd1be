"""The model of an autoregressive drafter: any causal LM that has the target's tokenizer, or some layers of one, of the target itself too.

Whether it has positions for the capacity that is wanted is the builder's question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import torch

from xpress_export.checkpoints.locate import Location
from xpress_export.checkpoints.packing import read_plan
from xpress_export.checkpoints.same_tokenizer import check_same_tokenizer
from xpress_export.checkpoints.target import TargetCheckpoint, decoder_plan, identity_of, open_target
from xpress_export.checkpoints.tensors import TensorSource
from xpress_export.models.decoder import Head
from xpress_export.models.draft_decoder import DraftDecoder
from xpress_export.models.draft_step import DraftEmbedding
from xpress_export.models.precision import DTYPES
from xpress_export.models.rope import RotaryModules
from xpress_runtime.errors import OptionError
from xpress_runtime.sets import AttentionForm, Precision


class DraftModelCheckpoint:
    """A causal LM of which ``layers`` (0-based, in this order) draft, between its own embedding, final norm and head.

    ``shares_tables``: it is the target itself, so that embedding and head need not exist twice.
    """

    def __init__(self, model: TargetCheckpoint, layers: Sequence[int] | None, *, shares_tables: bool) -> None:
        self.model = model
        self.layers = tuple(range(model.config.num_layers)) if layers is None else _checked_layers(layers, model)
        self.config = replace(model.config, layers=tuple(model.config.layers[layer] for layer in self.layers))
        self.shares_tables = shares_tables

    @property
    def location(self) -> Location:
        return self.model.location

    @property
    def tensors(self) -> TensorSource:
        """Those of the whole model."""
        return self.model.tensors

    @property
    def licence(self) -> str | None:
        return self.model.licence

    def identity(self) -> str:
        """sha256 over the config as we read it, the layers that draft, and the tensors of the whole model."""
        return identity_of({"draft_model": asdict(self.config), "layers": self.layers}, self.tensors)

    def embedding(self) -> DraftEmbedding:
        with torch.device("meta"):
            module = DraftEmbedding(self.config.vocab_size, self.config.hidden_size, self.config.embedding_scale)
        module.table = self.model.embedding().table
        return module

    def head(self) -> Head:
        return self.model.head()

    def decoder(self, num_positions: int, attention_form: AttentionForm, precision: Precision = Precision.FP32) -> DraftDecoder:
        with torch.device("meta"):
            module = DraftDecoder(self.config, num_positions, attention_form)
        # Not part of the state: the tables must be real, whatever the module was built on.
        module.decoder.rotary = RotaryModules(module.decoder.rotary.ropes, num_positions)
        plan = decoder_plan(self.config, self.model.layout, self.layers)
        module.decoder.load_state_dict(read_plan(plan, self.tensors, DTYPES[precision]), strict=True, assign=True)
        return module


def open_draft_model(
    reference: str | None, revision: str | None, layers: Sequence[int] | None, target: TargetCheckpoint
) -> DraftModelCheckpoint:
    """Find a draft model (None: the target itself) and check it; ``layers`` None are all of its layers.

    Raises CheckpointError, PairingError where it has another tokenizer than the target, OptionError where it has no such layers.
    """
    if reference is None and revision is not None:
        raise OptionError(f"revision '{revision}' was given for a draft model, and none was named; leave it out")
    model = target if reference is None else open_target(reference, revision)
    if model.location.path.resolve() == target.location.path.resolve():
        model = target
    opened = DraftModelCheckpoint(model, layers, shares_tables=model is target)
    if model is not target:
        check_same_tokenizer(target, model)
    return opened


def _checked_layers(layers: Sequence[int], model: TargetCheckpoint) -> tuple[int, ...]:
    most = model.config.num_layers - 1
    expected = f"expected some of 0 to {most}, the layers of '{model.location.source}'"
    if not layers:
        raise OptionError(f"no layer of the draft model was named, {expected}")
    for layer in layers:
        if not 0 <= layer <= most:
            raise OptionError(f"layer {layer} of the draft model does not exist, {expected}")
        if layers.count(layer) > 1:
            raise OptionError(f"layer {layer} of the draft model was named twice, {expected}, each once")
    return tuple(layers)
