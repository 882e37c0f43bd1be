"""One set of graphs of a target, a drafter and a refiner, exported into a folder with one weights file.

Decides the order (one model in memory at a time); knows nothing about bundles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from xpress_export.checkpoints import DrafterCheckpoint, TargetCheckpoint
from xpress_export.graphs.accept import accept_graph
from xpress_export.graphs.drafter import drafter_graph
from xpress_export.graphs.embed import embed_graph
from xpress_export.graphs.exporter import ExportedGraph, export_graph
from xpress_export.graphs.head import head_graph
from xpress_export.graphs.refiner import refiner_graph
from xpress_export.graphs.spec import GraphSpec
from xpress_export.graphs.target import target_graph
from xpress_export.graphs.weights import WeightStore
from xpress_export.models.accept import Accept
from xpress_export.models.precision import DTYPES, in_precision
from xpress_export.options import BuildOptions
from xpress_runtime.sets import AttentionForm, Precision
from xpress_runtime.version import BUNDLE_FORMAT

Report = Callable[[str], None]


def graph_names(options: BuildOptions) -> list[str]:
    """The graphs of a set, in the order of export: small ones first, so that a fault in them shows early."""
    return ["accept", *(f"refiner-k{passes}" for passes in options.num_passes), "embed", "head", "drafter", "target"]


def export_graph_set(
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    options: BuildOptions,
    folder: Path,
    *,
    precision: Precision = Precision.FP32,
    attention_form: AttentionForm = AttentionForm.LENGTH,
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
    makers = graph_makers(target, drafter, options, precision, attention_form)
    exported = {}
    with WeightStore(folder) as weights:
        for name in graph_names(options):
            report(name)
            exported[name] = export_graph(makers[name](), folder, weights, metadata)
    return exported


def graph_makers(
    target: TargetCheckpoint, drafter: DrafterCheckpoint, options: BuildOptions, precision: Precision, form: AttentionForm
) -> dict[str, Callable[[], GraphSpec]]:
    """For each graph of the set a function that loads its weights and describes it. Only the refiner is kept between calls."""
    config = drafter.config
    # From there a round ends at most a block further, and a frozen row still needs room for a context run and a block behind its position.
    last_start = options.cache_rows - 3 * config.block_size
    load_refiner = functools.cache(lambda: in_precision(drafter.refiner_module(), precision))

    def refiner(passes: int) -> GraphSpec:
        return refiner_graph(
            load_refiner() if passes else None,
            passes,
            options.shortlist if passes else 0,
            hidden_size=target.config.hidden_size,
            vocab_size=target.config.vocab_size,
            block_size=config.block_size,
            dtype=DTYPES[precision],
        )

    return {
        "accept": lambda: accept_graph(Accept(config.block_size, config.mask_token_id, last_start)),
        **{f"refiner-k{passes}": functools.partial(refiner, passes) for passes in options.num_passes},
        "embed": lambda: embed_graph(in_precision(target.embedding(), precision)),
        "head": lambda: head_graph(in_precision(target.head(), precision)),
        "drafter": lambda: drafter_graph(in_precision(drafter.drafter(options.cache_rows, form), precision)),
        "target": lambda: target_graph(in_precision(target.decoder(config.tap_layers, options.cache_rows, form), precision)),
    }
