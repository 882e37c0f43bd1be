"""Checkpoints → bundle: pairs target and drafter, exports the graphs, adds tokenizer and manifest, all in a staging folder.

Knows the layout of a bundle; knows nothing about the command line or about parity.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from xpress_export.checkpoints import DrafterCheckpoint, DraftModelCheckpoint, TargetCheckpoint
from xpress_export.checkpoints.tokenizer_files import write_tokenizer
from xpress_export.graph_set import export_graph_set
from xpress_export.graphs.exporter import ExportedGraph
from xpress_export.models.decoder import DecoderConfig
from xpress_export.options import BuildOptions
from xpress_export.staging import staged_folder
from xpress_runtime.bundle import TOKENIZER_FOLDER, Bundle, file_sha256, write_manifest
from xpress_runtime.manifest import (
    CacheShape,
    DrafterRecord,
    DraftModelRecord,
    FileRecord,
    GraphRecord,
    GraphSet,
    Manifest,
    Origin,
    TargetRecord,
)
from xpress_runtime.sets import AttentionForm, Precision, set_name
from xpress_runtime.version import VERSION

Report = Callable[[str], None]

# fp32 graphs are for ONNX Runtime's CPU kernels, half-precision ones for GPUs: each form is the only one that runs right there.
ATTENTION_FORMS = {
    Precision.FP32: AttentionForm.LENGTH,
    Precision.FP16: AttentionForm.MASK,
    Precision.BF16: AttentionForm.MASK,
}
_BUILT_WITH = ("torch", "onnx", "onnxscript", "onnxruntime", "transformers")


def build_bundle(
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    output: Path,
    options: BuildOptions,
    *,
    precisions: Sequence[Precision] = (Precision.FP32,),
    draft_model: DraftModelCheckpoint | None = None,
    replace: bool = False,
    complete: Callable[[Path, Manifest], None] = lambda _folder, _manifest: None,
    report: Report = lambda _: None,
) -> Bundle:
    """Write a bundle with one graph set for each precision to ``output``; it appears there complete or not at all.

    ``draft_model`` is an autoregressive drafter beside the block drafter. ``complete`` may add to the staged folder, whose manifest is
    written by then. ``report`` hears each step's name as it begins. ``target`` and ``drafter`` must have passed
    :func:`xpress_export.checkpoints.check_pairing`. Raises OutputError and CheckpointError.
    """
    needed = sum(weight_bytes(target, drafter, precision, draft_model) for precision in precisions)
    with staged_folder(output, needed_bytes=needed, replace=replace) as staging:
        report("tokenizer")
        tokenizer = write_tokenizer(target.location.path, staging / TOKENIZER_FOLDER)
        graph_sets = tuple(_graph_set(target, drafter, options, precision, staging, draft_model, report) for precision in precisions)
        report("manifest")
        manifest = describe(
            target,
            drafter,
            options,
            draft_model=draft_model,
            graph_sets=graph_sets,
            has_tokenizer=tokenizer is not None,
            files=_file_records(staging),
            built_with={"xpress-export": VERSION, **{name: importlib.metadata.version(name) for name in _installed()}},
        )
        write_manifest(staging, manifest)
        complete(staging, manifest)
    return Bundle(output, manifest)


def describe(
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    options: BuildOptions,
    *,
    graph_sets: tuple[GraphSet, ...],
    files: Mapping[str, FileRecord],
    draft_model: DraftModelCheckpoint | None = None,
    has_tokenizer: bool = False,
    built_with: Mapping[str, str] | None = None,
) -> Manifest:
    """The manifest of a bundle of these checkpoints, built with these options."""
    return Manifest(
        target=_target_record(target),
        drafter=_drafter_record(drafter),
        draft_model=None if draft_model is None else _draft_model_record(draft_model),
        graph_sets=graph_sets,
        has_tokenizer=has_tokenizer,
        files=files,
        built_with=built_with or {},
        **asdict(options),
    )


def weight_bytes(
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    precision: Precision = Precision.FP32,
    draft_model: DraftModelCheckpoint | None = None,
) -> int:
    """Bytes of all weights in a precision; tied tables count once, and the little that stays fp32 in half sets counts as half."""
    sources = [target.tensors, drafter.tensors]
    if draft_model is not None and not draft_model.shares_tables:
        sources.append(draft_model.tensors)
    elements = sum(math.prod(shape) for source in sources for shape in source.shapes.values())
    return precision.element_bytes * elements


def _graph_set(
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    options: BuildOptions,
    precision: Precision,
    staging: Path,
    draft_model: DraftModelCheckpoint | None,
    report: Report,
) -> GraphSet:
    form = ATTENTION_FORMS[precision]
    name = set_name(precision, form)
    folder = staging / "graphs" / name
    folder.mkdir(parents=True)
    exported = export_graph_set(
        target,
        drafter,
        options,
        folder,
        precision=precision,
        attention_form=form,
        draft_model=draft_model,
        report=lambda graph: report(f"{name} {graph}"),
    )
    return GraphSet(precision.value, form.value, {graph: _graph_record(made, staging) for graph, made in exported.items()})


def _target_record(target: TargetCheckpoint) -> TargetRecord:
    config = target.config
    return TargetRecord(
        origin=_origin(target),
        model_type=target.model_type,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_positions=config.max_positions,
        stop_token_ids=target.eos_token_ids,
        caches=_cache_shape(config),
    )


def _drafter_record(drafter: DrafterCheckpoint) -> DrafterRecord:
    config = drafter.config
    return DrafterRecord(
        origin=_origin(drafter),
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        tap_layers=config.tap_layers,
        head=drafter.head,
        head_rank=drafter.head_rank,
        trained_with_thinking=drafter.trained_with_thinking,
        anchor_predecessor=drafter.refiner.anchor_predecessor if drafter.refiner is not None else "previous",
        max_positions=config.backbone.max_positions,
        draft_vocab_size=config.draft_vocab_size,
        caches=_cache_shape(config.backbone),
    )


def _draft_model_record(draft_model: DraftModelCheckpoint) -> DraftModelRecord:
    config = draft_model.config
    return DraftModelRecord(
        origin=_origin(draft_model),
        layers=draft_model.layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        shares_tables=draft_model.shares_tables,
        caches=_cache_shape(config),
    )


def _origin(checkpoint: TargetCheckpoint | DrafterCheckpoint | DraftModelCheckpoint) -> Origin:
    location = checkpoint.location
    # A folder is found again from anywhere; only what came from the hub has a revision.
    source = location.source if location.revision is not None else str(location.path.absolute())
    return Origin(source, location.revision, checkpoint.licence, checkpoint.identity())


def _cache_shape(config: DecoderConfig) -> CacheShape:
    return CacheShape(config.num_layers, config.num_kv_heads, config.head_dim)


def _graph_record(graph: ExportedGraph, folder: Path) -> GraphRecord:
    return GraphRecord(graph.path.relative_to(folder).as_posix(), graph.operators)


def _file_records(folder: Path) -> dict[str, FileRecord]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): FileRecord(path.stat().st_size, file_sha256(path)) for path in files}


def _installed() -> list[str]:
    found = {distribution.metadata["Name"] for distribution in importlib.metadata.distributions()}
    return [name for name in _BUILT_WITH if name in found]
