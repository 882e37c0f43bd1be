"""A target checkpoint: its config, and its tensors under the names that its family publishes them.

Opening checks names and shapes of all tensors; values are read when a module is asked for, tensor by tensor.
"""

from __future__ import annotations

import hashlib
import json
import re
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import torch

from xpress_export.checkpoints.decoder_config import read_decoder_config
from xpress_export.checkpoints.families import FAMILIES, TensorLayout
from xpress_export.checkpoints.licence import read_licence
from xpress_export.checkpoints.locate import Location, locate
from xpress_export.checkpoints.packing import Packed, check_tensors, expected_tensors, layer_plan, plain, read_plan
from xpress_export.checkpoints.tensors import GgufSource, SafetensorsSource, TensorSource
from xpress_export.models.decoder import Decoder, DecoderConfig, Embedding, Head
from xpress_export.models.precision import DTYPES
from xpress_export.models.rope import RotaryModules
from xpress_runtime.errors import CheckpointError
from xpress_runtime.fields import Fields
from xpress_runtime.sets import AttentionForm, Precision

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
# Saved by old releases of transformers; computed from the config since.
ROTARY_BUFFER = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


class TargetCheckpoint:
    """A checked target. ``location`` says where tokenizer files lie; ``licence`` is None when the checkpoint states none."""

    def __init__(
        self,
        location: Location,
        model_type: str,
        config: DecoderConfig,
        tensors: TensorSource,
        eos_token_ids: tuple[int, ...],
        licence: str | None,
    ) -> None:
        self.location = location
        self.model_type = model_type
        self.config = config
        self.eos_token_ids = eos_token_ids
        self.licence = licence
        self.tensors = tensors
        self._plan = decoder_plan(config, self.layout)
        self._tied_table: weakref.ref[torch.nn.Parameter] | None = None
        allowed = {name for name in tensors.shapes if ROTARY_BUFFER.fullmatch(name)} | {HEAD}
        tables = {EMBEDDING: (config.vocab_size, config.hidden_size)}
        if HEAD in tensors.shapes or not config.tied_embeddings:
            tables[HEAD] = tables[EMBEDDING]
        if HEAD not in tensors.shapes and HEAD in tables:
            raise CheckpointError(
                f"{location.path}: tensor '{HEAD}' is missing; if the head is tied, config.json must say tie_word_embeddings true"
            )
        check_tensors(tensors, tables | expected_tensors(self._plan), str(location.path), allowed)

    @property
    def layout(self) -> TensorLayout:
        """How the family stores its tensors."""
        return FAMILIES[self.model_type].layout

    @property
    def beyond_fp16(self) -> str | None:
        """Why fp16 is too narrow for the family; None where it is not."""
        return FAMILIES[self.model_type].beyond_fp16

    def identity(self) -> str:
        """sha256 over the config as we read it and over the tensors."""
        return identity_of(asdict(self.config), self.tensors)

    def embedding(self) -> Embedding:
        with torch.device("meta"):
            module = Embedding(self.config.vocab_size, self.config.hidden_size, self.config.embedding_scale)
        module.table = self._embedding_table()
        return module

    def head(self) -> Head:
        """The head; with tied embeddings its table is the embedding's very tensor."""
        with torch.device("meta"):
            module = Head(self.config.vocab_size, self.config.hidden_size, self.config.logit_scale, self.config.logit_cap)
        if self.config.tied_embeddings:
            module.table = self._embedding_table()
            if HEAD in self.tensors.shapes and not torch.equal(self.tensors.read(HEAD), module.table):
                raise CheckpointError(
                    f"{self.location.path}: config.json ties the embeddings, but '{HEAD}' differs from '{EMBEDDING}'; "
                    "set tie_word_embeddings to false if the head is its own"
                )
        else:
            module.table = _parameter(self.tensors.read(HEAD))
        return module

    def decoder(
        self, tap_layers: tuple[int, ...], num_positions: int, attention_form: AttentionForm, precision: Precision = Precision.FP32
    ) -> Decoder:
        """The decoder; its weights are read in ``precision``, so that they never lie in memory in fp32 as well."""
        with torch.device("meta"):
            module = Decoder(self.config, tap_layers, num_positions, attention_form)
        # Not part of the state: the tables must be real, whatever the module was built on.
        module.rotary = RotaryModules(module.rotary.ropes, num_positions)
        module.load_state_dict(read_plan(self._plan, self.tensors, DTYPES[precision]), strict=True, assign=True)
        return module

    def _embedding_table(self) -> torch.nn.Parameter:
        table = self._tied_table() if self._tied_table is not None else None
        # A table that its module converted to another precision since is not the checkpoint's any more.
        if table is None or table.dtype != torch.float32:
            table = _parameter(self.tensors.read(EMBEDDING))
            if self.config.tied_embeddings:
                self._tied_table = weakref.ref(table)
        return table


def open_target(reference: str, revision: str | None = None) -> TargetCheckpoint:
    """Find a target and check its config, and names and shapes of all its tensors."""
    location = locate(reference, revision)
    source: TensorSource
    if location.is_gguf:
        gguf = GgufSource.from_file(location.path)
        fields = Fields(gguf.config, str(location.path), CheckpointError)
        source, licence, generation = gguf, gguf.licence or read_licence(location.folder), None
    else:
        fields = Fields.from_file(location.path / "config.json", CheckpointError)
        generation_path = location.path / "generation_config.json"
        generation = Fields.from_file(generation_path, CheckpointError) if generation_path.exists() else None
        licence = read_licence(location.path)
    model_type, config = read_target_config(fields, location)
    eos_token_ids = read_eos(generation, fields, config.vocab_size)
    if not location.is_gguf:
        # After the config, whose errors say more about a folder of another kind.
        source = SafetensorsSource.from_folder(location.path)
    return TargetCheckpoint(location, model_type, config, source, eos_token_ids, licence)


def read_target_config(fields: Fields, location: Location) -> tuple[str, DecoderConfig]:
    """The model_type and the decoder of a target's config; a drafter's is told apart."""
    for name in ("dflash_config", "speculators_model_type"):
        if name in fields:
            raise CheckpointError(f"{location.path} is a drafter (its config.json has {name}), expected a target")
    return read_decoder_config(fields)


def decoder_plan(config: DecoderConfig, layout: TensorLayout, layers: Sequence[int] | None = None) -> dict[str, Packed]:
    """Our decoder's parameters out of the published tensors; ``layers`` are the published layers that ours are, one after another."""
    plan: dict[str, Packed] = {"norm.weight": plain("model.norm.weight", config.hidden_size, offset=layout.norm_offset)}
    for ours, published in enumerate(range(config.num_layers) if layers is None else layers):
        plan |= layer_plan(f"layers.{ours}", f"model.layers.{published}", config, layout, packed_qkv=True)
    return plan


def read_eos(generation: Fields | None, config: Fields, vocab_size: int) -> tuple[int, ...]:
    """Stop tokens: the generation defaults' where they name any, else the config's; may be empty."""
    for fields in (generation, config):
        if fields is None or "eos_token_id" not in fields:
            continue
        if isinstance(fields.required("eos_token_id"), list):
            return fields.integers("eos_token_id", 0, vocab_size - 1)
        return (fields.integer("eos_token_id", 0, vocab_size - 1),)
    return ()


def identity_of(description: Mapping[str, object], source: TensorSource) -> str:
    """sha256 of a description and of the tensors it belongs to."""
    text = json.dumps(description, sort_keys=True)
    return hashlib.sha256(f"{text}\0{source.sha256()}".encode()).hexdigest()


def _parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)
