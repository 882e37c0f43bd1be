"""One set of graphs of a target, a drafter and a refiner, exported into a folder with one weights file.

Decides the order (one model in memory at a time); knows nothing about bundles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from xpress_export.checkpoints import DrafterCheckpoint, DraftModelCheckpoint, TargetCheckpoint
from xpress_export.checkpoints.base_head import base_head
from xpress_export.graphs.accept import accept_graph, accept_sampled_graph
from xpress_export.graphs.base_head import base_head_graph
from xpress_export.graphs.confidence import confidence_graph
from xpress_export.graphs.denoise import denoise_graph
from xpress_export.graphs.draft_decoder import draft_decoder_graph
from xpress_export.graphs.draft_start import draft_start_graph
from xpress_export.graphs.draft_step import draft_step_graph
from xpress_export.graphs.drafter import drafter_graph
from xpress_export.graphs.embed import embed_graph
from xpress_export.graphs.exporter import ExportedGraph, export_graph
from xpress_export.graphs.head import head_graph
from xpress_export.graphs.lookup import lookup_graph
from xpress_export.graphs.processors import count_graph, penalise_graph, sample_graph, top_k_graph, top_p_graph
from xpress_export.graphs.refiner import refiner_graph
from xpress_export.graphs.spec import Dim, GraphSpec
from xpress_export.graphs.store_taps import store_taps_graph
from xpress_export.graphs.target import target_graph
from xpress_export.graphs.weights import WeightStore
from xpress_export.models.accept import Accept
from xpress_export.models.precision import DTYPES, in_precision
from xpress_export.options import BuildOptions
from xpress_runtime.graph_names import SAMPLED, graph_names, refiner_name, refiner_variants
from xpress_runtime.memory import backlog_rows
from xpress_runtime.sets import AttentionForm, Precision
from xpress_runtime.version import BUNDLE_FORMAT

Report = Callable[[str], None]


def export_graph_set(
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    options: BuildOptions,
    folder: Path,
    *,
    precision: Precision = Precision.FP32,
    attention_form: AttentionForm = AttentionForm.LENGTH,
    draft_model: DraftModelCheckpoint | None = None,
    report: Report = lambda _: None,
) -> dict[str, ExportedGraph]:
    """Write every graph of the set into ``folder``; ``report`` hears a graph's name before its export begins."""
    metadata = {
        "xpress.format_version": str(BUNDLE_FORMAT),
        "xpress.target": target.identity(),
        "xpress.drafter": drafter.identity(),
        "xpress.precision": precision.value,
        "xpress.attention_form": attention_form.value,
    }
    if draft_model is not None:
        metadata["xpress.draft_model"] = draft_model.identity()
    exported = {}
    with WeightStore(folder) as weights:
        for name, make in graph_makers(target, drafter, options, precision, attention_form, draft_model).items():
            report(name)
            exported[name] = export_graph(make(), folder, weights, metadata)
    return exported


def set_graph_names(options: BuildOptions, draft_model: DraftModelCheckpoint | None = None) -> tuple[str, ...]:
    """The graphs of a set, in the order of export: small ones first, so that a fault in them shows early."""
    shares_tables = None if draft_model is None else draft_model.shares_tables
    return graph_names(
        options.num_passes,
        options.shortlists,
        sampling=options.sampling,
        base_head=options.base_head,
        draft_model_shares_tables=shares_tables,
    )


def graph_makers(
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    options: BuildOptions,
    precision: Precision,
    form: AttentionForm,
    draft_model: DraftModelCheckpoint | None = None,
) -> dict[str, Callable[[], GraphSpec]]:
    """For each graph of the set a function that loads its weights and describes it. Only the refiner is kept between calls."""
    config = drafter.config
    block_size, hidden_size, vocab_size = config.block_size, target.config.hidden_size, target.config.vocab_size
    dtype = DTYPES[precision]
    num_positions: Dim = "N" if form is AttentionForm.LENGTH else options.cache_rows
    # From there a round ends at most a block further, and a frozen row still needs room for a context run and a block behind its position.
    accept = Accept(block_size, config.mask_token_id, last_start=options.cache_rows - 3 * block_size)
    sizes: dict[str, Any] = {"hidden_size": hidden_size, "vocab_size": vocab_size, "block_size": block_size, "dtype": dtype}
    load_refiner = functools.cache(lambda: in_precision(drafter.refiner_module(), precision))

    def refiner(passes: int, shortlist: int, *, sampled: bool) -> GraphSpec:
        return refiner_graph(load_refiner() if passes else None, passes, shortlist, sampled=sampled, **sizes)

    makers: dict[str, Callable[[], GraphSpec]] = {
        "accept": lambda: accept_graph(accept),
        "denoise": lambda: denoise_graph(**sizes),
        "lookup": lambda: lookup_graph(block_size, num_positions),
        "confidence": lambda: confidence_graph(block_size),
        "store-taps": lambda: store_taps_graph(
            num_rows=backlog_rows(options.prefill_chunk, block_size), taps_size=len(config.tap_layers) * hidden_size, dtype=dtype
        ),
        "sample": lambda: sample_graph(vocab_size),
        "accept-sampled": lambda: accept_sampled_graph(accept, vocab_size, with_candidates=False),
        "accept-candidates": lambda: accept_sampled_graph(accept, vocab_size, with_candidates=True),
        "filter-top-k": lambda: top_k_graph(vocab_size),
        "filter-top-p": lambda: top_p_graph(vocab_size),
        "penalise": lambda: penalise_graph(vocab_size),
        "count": lambda: count_graph(vocab_size),
        **{
            refiner_name(passes, shortlist, sampled=sampled): functools.partial(refiner, passes, shortlist, sampled=sampled)
            for passes, shortlist in refiner_variants(options.num_passes, options.shortlists)
            for sampled in (False, True)
        },
        **_draft_model_makers(draft_model, options, precision, form, block_size=block_size, vocab_size=vocab_size),
        "embed": lambda: embed_graph(in_precision(target.embedding(), precision)),
        "head": lambda: head_graph(in_precision(target.head(), precision)),
        "base-head": lambda: base_head_graph(in_precision(base_head(target, drafter), precision), vocab_size),
        "drafter": lambda: drafter_graph(in_precision(drafter.drafter(options.cache_rows, form, target.config.embedding_scale), precision)),
        "target": lambda: target_graph(in_precision(target.decoder(config.tap_layers, options.cache_rows, form, precision), precision)),
    }
    return {name: makers[name] for name in set_graph_names(options, draft_model)}


def _draft_model_makers(
    draft_model: DraftModelCheckpoint | None,
    options: BuildOptions,
    precision: Precision,
    form: AttentionForm,
    *,
    block_size: int,
    vocab_size: int,
) -> dict[str, Callable[[], GraphSpec]]:
    if draft_model is None:
        return {}

    def step(*, sampled: bool) -> GraphSpec:
        return draft_step_graph(
            sampled=sampled, draft_vocab_size=draft_model.config.vocab_size, vocab_size=vocab_size, block_size=block_size
        )

    return {
        "draft-start": lambda: draft_start_graph(block_size),
        "draft-step": lambda: step(sampled=False),
        f"draft-step{SAMPLED}": lambda: step(sampled=True),
        "draft-embed": lambda: replace(embed_graph(in_precision(draft_model.embedding(), precision)), name="draft-embed"),
        "draft-head": lambda: replace(head_graph(in_precision(draft_model.head(), precision)), name="draft-head"),
        "draft-decoder": lambda: draft_decoder_graph(in_precision(draft_model.decoder(options.cache_rows, form, precision), precision)),
    }
