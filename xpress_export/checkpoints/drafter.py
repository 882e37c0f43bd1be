"""A drafter checkpoint of any published format (formats/): its modules, from tensors under the names of the serving format.

Opening checks the config, and names and shapes of all tensors; values are read when a module is asked for, but for the small tensors that
say which tokens can be drafted. Whether drafter and target belong together is pairing.py's question.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from xpress_export.checkpoints.draft_vocabulary import check_mapping, read_draft_token_ids, vocabulary_tensors
from xpress_export.checkpoints.families import TensorLayout
from xpress_export.checkpoints.formats.description import IN_DRAFT, OWN_EMBEDDING, OWN_HEAD, TO_TARGET, DrafterDescription, HeadConfig
from xpress_export.checkpoints.formats.serving import describe_serving
from xpress_export.checkpoints.formats.speculators import KIND, describe_speculators
from xpress_export.checkpoints.formats.training import TrainingSource, base_fields, describe_training, training_beside, training_file
from xpress_export.checkpoints.licence import read_licence
from xpress_export.checkpoints.locate import CONFIG_FILE, Location, locate
from xpress_export.checkpoints.markov import markov_plan
from xpress_export.checkpoints.packing import Packed, check_tensors, expected_tensors, layer_plan, linear, plain, read_plan
from xpress_export.checkpoints.renamed import RenamedSource
from xpress_export.checkpoints.target import identity_of
from xpress_export.checkpoints.tensors import SafetensorsSource, StoredTensors, TensorSource
from xpress_export.models.drafter import Drafter, DrafterConfig
from xpress_export.models.markov import MarkovConfig, MarkovHead
from xpress_export.models.precision import DTYPES
from xpress_export.models.refiner import Refiner, RefinerConfig
from xpress_export.models.rope import RotaryModules
from xpress_runtime.errors import CheckpointError, OptionError
from xpress_runtime.fields import Fields
from xpress_runtime.sets import AttentionForm, Precision

logger = logging.getLogger(__name__)

HEAD = "xpress_head"
W2 = f"{HEAD}.w2.weight"
IN_PROJECTION = f"{HEAD}.in_proj.weight"
MIX = f"{HEAD}.mix.L"


class DrafterCheckpoint:
    """A checked drafter. Of ``refiner`` and ``markov`` the one that it has is set, for bare DFlash neither.

    ``tensors`` have the names of the serving format. ``draft_token_ids`` [Vd] is None where every token can be drafted. ``has_own_head``:
    base logits come from a head of its own; a pairing with the target turns it off where that head is the target's. ``own_embedding``
    holds an embedding table that must equal the target's, if there is one; it and others of the format that no module reads are the
    ``unused_tensors``, by their published names. ``trained_with_thinking`` is None when the checkpoint does
    not say.
    """

    def __init__(
        self,
        location: Location,
        description: DrafterDescription,
        tensors: TensorSource,
        licence: str | None,
        draft_token_ids: Tensor | None,
        own_embedding: StoredTensors | None = None,
        unused_tensors: frozenset[str] = frozenset(),
    ) -> None:
        self.location = location
        self.description = description
        self.config = description.config
        self.refiner = description.head if isinstance(description.head, RefinerConfig) else None
        self.markov = description.head if isinstance(description.head, MarkovConfig) else None
        self.licence = licence
        self.trained_with_thinking = description.trained_with_thinking
        self.tensors = tensors
        self.draft_token_ids = draft_token_ids
        self.has_own_head = OWN_HEAD in tensors.shapes
        self.own_embedding = own_embedding
        self.unused_tensors = unused_tensors

    @property
    def format(self) -> str:
        """A short name of the format that the checkpoint is in."""
        return self.description.format

    @property
    def head(self) -> Literal["xpress", "markov"] | None:
        """What corrects the drafter's block."""
        if self.refiner is not None:
            return "xpress"
        return "markov" if self.markov is not None else None

    @property
    def head_rank(self) -> int | None:
        """Width of the head's token tables."""
        head = self.refiner or self.markov
        return None if head is None else head.rank

    def identity(self) -> str:
        """sha256 over the config as we read it and over the tensors: the same whatever format holds them."""
        description = {"drafter": asdict(self.config), "refiner": asdict(self.refiner) if self.refiner is not None else None}
        return identity_of(description, self.tensors)

    def drafter(
        self,
        num_positions: int,
        attention_form: AttentionForm,
        target_embedding_scale: float = 1.0,
        precision: Precision = Precision.FP32,
    ) -> Drafter:
        """The drafter for a target that multiplies its embeddings with a factor; its weights are read in ``precision``."""
        with torch.device("meta"):
            module = Drafter(self.config, num_positions, attention_form, self.config.backbone.embedding_scale / target_embedding_scale)
        # Not part of the state: the tables must be real, whatever the module was built on.
        module.rotary = RotaryModules(module.rotary.ropes, num_positions)
        parameters = read_plan(drafter_plan(self.config), self.tensors, DTYPES[precision], Drafter.fp32_parts)
        module.load_state_dict(parameters, strict=True, assign=True)
        return module

    def refiner_module(self) -> Refiner | MarkovHead:
        """The head that the drafter has, over the whole vocabulary; CheckpointError if it has none."""
        if self.refiner is not None:
            parameters = read_plan(head_plan(self.refiner, self.config.draft_vocab_size), self.tensors) | self._folded(self.refiner.rank)
            parameters["w2"] = self._for_all_tokens(parameters["w2"])
            with torch.device("meta"):
                refiner = Refiner(self.refiner)
            refiner.load_state_dict(parameters, strict=True, assign=True)
            return refiner
        if self.markov is not None:
            with torch.device("meta"):
                head = MarkovHead(self.markov)
            head.load_state_dict(read_plan(head_plan(self.markov, self.config.draft_vocab_size), self.tensors), strict=True, assign=True)
            return head
        raise CheckpointError(f"'{self.location.source}' is a bare DFlash drafter without a refiner; only 0 passes can be built")

    def own_head_table(self) -> Tensor:
        """The drafter's own head [Vd, H] in fp32, one row for each token that can be drafted."""
        return self.tensors.read(OWN_HEAD)

    def _for_all_tokens(self, rows: Tensor) -> Tensor:
        """Rows [Vd, r] of the tokens that can be drafted → [V, r]; the others are never drafted, and zero."""
        if self.draft_token_ids is None:
            return rows
        table = rows.new_zeros(self.config.backbone.vocab_size, rows.shape[1])
        # Shapes alone have no values to copy.
        return table if table.is_meta else table.index_copy_(0, self.draft_token_ids, rows)

    def _folded(self, rank: int) -> dict[str, Tensor]:
        """Parameters that are computed from a published tensor, not only laid out."""
        projection = self.tensors.read(IN_PROJECTION).T
        mix = self.tensors.read(MIX).tril_()
        # Slot k gets its own z once more: the residual.
        mix.diagonal(dim1=-2, dim2=-1).add_(1)
        return {
            "in_hidden.weight": projection[: 2 * rank].contiguous(),
            "in_token.weight": projection[2 * rank :].contiguous(),
            "mix": mix,
        }


def open_drafter(reference: str, revision: str | None = None, *, base_config: Path | None = None) -> DrafterCheckpoint:
    """Find a drafter of any format and check its config, and names and shapes of all its tensors.

    ``base_config``: config.json (or its folder) of the drafter that a .pt file started from. Raises CheckpointError, and OptionError where
    it is given for another format.
    """
    location = locate(reference, revision, training_files=True)
    if location.is_gguf:
        raise CheckpointError(f"'{reference}' is a GGUF file; a drafter is a folder with config.json and safetensors, or a .pt file")
    training = training_file(location)
    if training is not None:
        source = TrainingSource.from_file(training)
        return _opened(location, describe_training(base_fields(training, base_config), source), source, str(training))
    if base_config is not None:
        raise OptionError(f"--base-config is for training checkpoints (.pt), and '{reference}' has a config of its own; leave it out")
    if beside := training_beside(location.path):
        logger.warning("%s holds a training checkpoint too, which is not read; name %s itself to use it", location.path, beside.name)
    fields = Fields.from_file(location.path / CONFIG_FILE, CheckpointError)
    # The config first: its errors say more about a folder of another kind.
    describe_config(fields)
    tensors = SafetensorsSource.from_folder(location.path, integers=(TO_TARGET, IN_DRAFT))
    return _opened(location, describe_config(fields, tensors.shapes), tensors, str(location.path))


def describe_config(fields: Fields, shapes: Mapping[str, tuple[int, ...]] | None = None) -> DrafterDescription:
    """The drafter of a config.json of any format; ``shapes`` of its tensors where they are known. Raises CheckpointError."""
    return (describe_speculators if KIND in fields else describe_serving)(fields, shapes)


def serving_tensors(description: DrafterDescription) -> dict[str, tuple[int, ...]]:
    """Every tensor that a drafter must have, under the names of the serving format, with its shape."""
    shapes = expected_tensors(drafter_plan(description.config)) | vocabulary_tensors(description)
    if description.head is not None:
        shapes |= expected_tensors(head_plan(description.head, description.config.draft_vocab_size)) | folded_tensors(description.head)
    return shapes


def drafter_plan(config: DrafterConfig) -> dict[str, Packed]:
    """The backbone's parameters out of the published tensors."""
    hidden = config.backbone.hidden_size
    plan = linear("fc", [("fc", hidden)], len(config.tap_layers) * hidden, bias=False)
    plan |= {"hidden_norm.weight": plain("hidden_norm.weight", hidden), "norm.weight": plain("norm.weight", hidden)}
    for layer in range(config.backbone.num_layers):
        plan |= layer_plan(f"layers.{layer}", f"layers.{layer}", config.backbone, TensorLayout(), packed_qkv=False)
    return plan


def head_plan(config: HeadConfig, draft_vocab_size: int) -> dict[str, Packed]:
    """The head's parameters that are published tensors as they are or transposed; the rest is :func:`folded_tensors`."""
    if isinstance(config, MarkovConfig):
        return markov_plan(config)
    rank, hidden = config.rank, config.hidden_size
    gate_up = [(f"{HEAD}.mlp.gate_proj", config.mlp_hidden), (f"{HEAD}.mlp.up_proj", config.mlp_hidden)]
    return {
        "w1": plain(f"{HEAD}.w1.weight", config.vocab_size, rank),
        "w2": plain(W2, draft_vocab_size, rank),
        **linear("down_h", [(f"{HEAD}.down_h", rank)], hidden, bias=False),
        **linear("down_g", [(f"{HEAD}.down_g", rank)], hidden, bias=False),
        **linear("mlp.gate_up", gate_up, rank, bias=False),
        **linear("mlp.down", [(f"{HEAD}.mlp.down_proj", rank)], config.mlp_hidden, bias=False),
    }


def folded_tensors(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Published tensors that parameters are computed from; a Markov head has none."""
    if isinstance(config, MarkovConfig):
        return {}
    return {IN_PROJECTION: (config.rank, 3 * config.rank), MIX: (config.rank, config.block_size, config.block_size)}


def check_description(description: DrafterDescription, origin: str) -> None:
    """CheckpointError for what no single field forbids."""
    if isinstance(description.head, RefinerConfig) and description.head.shortlist > description.config.draft_vocab_size:
        raise CheckpointError(
            f"{origin}: the shortlist of config.json has {description.head.shortlist} candidates, "
            f"and only {description.config.draft_vocab_size} tokens can be drafted"
        )
    if description.is_reduced and isinstance(description.head, MarkovConfig):
        raise CheckpointError(
            f"{origin}: a Markov head over a reduced draft vocabulary ({description.config.draft_vocab_size} of "
            f"{description.config.backbone.vocab_size} tokens) is not supported"
        )


def _opened(location: Location, description: DrafterDescription, source: StoredTensors, origin: str) -> DrafterCheckpoint:
    """Check the tensors against the description, and give those that count the names of the serving format."""
    check_description(description, origin)
    if description.head is None and any(name.startswith(f"{HEAD}.") for name in source.shapes):
        raise CheckpointError(f"{origin} has tensors of a refiner ({HEAD}.…), but config.json has no xpress_rank")
    check_mapping(description, set(source.shapes), origin)
    needed = serving_tensors(description)
    if description.may_have_head and OWN_HEAD in source.shapes:
        needed[OWN_HEAD] = (description.config.draft_vocab_size, description.config.backbone.hidden_size)
    if description.may_have_head and OWN_EMBEDDING in description.ignored & source.shapes.keys():
        table = {OWN_EMBEDDING: (description.config.backbone.vocab_size, description.config.backbone.hidden_size)}
    else:
        table = {}
    published = {name: description.published(name) for name in needed}
    allowed = description.ignored | ({TO_TARGET, IN_DRAFT} if description.may_have_head else set())
    check_tensors(source, {published[name]: shape for name, shape in needed.items()} | table, origin, allowed)
    for note in description.notes:
        logger.info("%s: %s", origin, note)
    for name in sorted((description.ignored - table.keys()) & source.shapes.keys()):
        logger.info("%s: tensor '%s' is ignored", origin, name)
    return DrafterCheckpoint(
        location,
        description,
        RenamedSource(source, published),
        read_licence(location.folder),
        read_draft_token_ids(description, source, origin),
        source if table else None,
        frozenset(source.shapes.keys() - published.values()),
    )
