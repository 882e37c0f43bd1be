"""What a bundle will weigh, need and cost to build, from two configs alone.

Sizes and memory come from the very modules that the export traces, made without values, and from the runtime's own formula. Peak memory and
time of a build cannot be computed: they are scaled from measured builds of small models and keep their spread. Knows nothing about how
figures are shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from xpress_export.build import ATTENTION_FORMS, describe
from xpress_export.checkpoints import DrafterCheckpoint, DraftModelCheckpoint, TargetCheckpoint
from xpress_export.graph_set import graph_makers
from xpress_export.models.rope import RopeConfig, distinct_ropes
from xpress_export.options import BuildOptions, cache_rows
from xpress_runtime.graph_names import BASE_HEAD, SAMPLED
from xpress_runtime.manifest import FileRecord, GraphSet, Manifest
from xpress_runtime.memory import MemoryNeed, largest_below, memory_need
from xpress_runtime.sets import AttentionForm, Precision, set_name

GPU_GIB = (8, 12, 16, 24, 32, 48, 80)
# For the driver, the CUDA context and the engines' activations. An assumption: no GPU was measured.
GPU_RESERVE_BYTES = 2**30


@dataclass(frozen=True)
class Spread:
    """The lowest and the highest of a measured figure, or of what follows from it."""

    low: float
    high: float

    def __mul__(self, factor: float) -> Spread:
        return Spread(self.low * factor, self.high * factor)

    def __add__(self, other: Spread | int) -> Spread:
        low, high = (other, other) if isinstance(other, int) else (other.low, other.high)
        return Spread(self.low + low, self.high + high)


# Measured with torch 2.13.0 and tensorrt-rtx 1.7.1 (layout "shared") on two cores of a shared AMD EPYC virtual machine, checkpoints in the
# page cache. Four models, as layers × hidden size and fp32 weights of the target's layers: SmolLM2-135M (30 × 576, 0.42 GB) and random ones
# of 12 × 1024 (0.60 GB), 8 × 2048 (1.61 GB) and 4 × 4096 (3.09 GB, each layer as large as one of Qwen3-8B). Every measured peak and time is
# within its spread. Times begin with an idle machine and end with one that had two to five processes on its two cores.
MEASURED_ON = "measured builds of SmolLM2-135M and of random models with up to 3.1 GB of fp32 layers, on two cores"
EXPORT_BASE_BYTES = 520_000_000
# Copies of a graph's largest tensor, beside all of the graph's weights in fp32. Measured before weights were read in the precision of the
# graphs and written without a copy: builds have needed less since, those of half precision alone half of it.
EXPORT_COPIES = Spread(0, 6.5)
EXPORT_SECONDS = Spread(6, 28)
EXPORT_SECONDS_PER_LAYER = Spread(0.4, 0.9)
# Of fp32 weights.
EXPORT_SECONDS_PER_GB = Spread(4, 9)
# The graphs between the models, with vocabularies of 1,000 and 151,936 tokens, on a machine with one to seven processes on its two cores.
EXPORT_SECONDS_PER_SMALL_GRAPH = Spread(1, 9)
# Kernels beside the weights: 0.2 to 11 MB an engine, 0.2 to 3 MB of the graphs between the models.
ENGINE_CODE_BYTES = 5_000_000
SMALL_ENGINE_CODE_BYTES = 1_500_000
ENGINE_BASE_BYTES = 650_000_000
# Peak above that, over the size of the largest engine.
ENGINE_PEAK = Spread(2.75, 3.0)
ENGINE_SECONDS = Spread(1, 2)
ENGINE_SECONDS_PER_LAYER = Spread(0.1, 0.4)
ENGINE_SECONDS_PER_SMALL_GRAPH = Spread(0.1, 4)
# Of engines.
ENGINE_SECONDS_PER_GB = Spread(2.4, 9)
# Peak of a process that generates with fp32 graphs, over what memory_need plans.
CPU_PEAK = Spread(0.96, 1.14)


@dataclass(frozen=True)
class GpuFit:
    """Whether a set's engines fit a GPU at the estimate's capacity and batch, with all that requests may ask for, and the largest capacity
    that does; None: not any.
    """

    gib: int
    fits: bool
    largest_capacity: int | None


@dataclass(frozen=True)
class SetEstimate:
    """Bytes of one graph set: the weights that each graph reads, and on disk, where a tensor of several graphs lies once.

    Half-precision sets have ``engines``, in bytes by graph; ``memory`` is then the GPU's, for fp32 the host's.
    """

    graphs: Mapping[str, int]
    on_disk: int
    engines: Mapping[str, int]
    memory: MemoryNeed
    gpus: Sequence[GpuFit]


@dataclass(frozen=True)
class BuildCost:
    """Scaled from measured builds, never measured at this size; parity and download not included. Sets and engines are built in turn."""

    peak_bytes: Spread
    seconds: Spread


@dataclass(frozen=True)
class Estimate:
    """``sets`` by name; ``engine_build`` None without a half-precision set. ``draft_model_parameters``: those of the layers that draft, and
    of tables of their own; None without a draft model.
    """

    target_parameters: int
    drafter_parameters: int
    draft_model_parameters: int | None
    sets: Mapping[str, SetEstimate]
    export: BuildCost
    engine_build: BuildCost | None


@dataclass(frozen=True)
class _Checkpoints:
    """What a bundle is made of."""

    target: TargetCheckpoint
    drafter: DrafterCheckpoint
    draft_model: DraftModelCheckpoint | None

    @property
    def num_layers(self) -> int:
        drafting = self.draft_model.config.num_layers if self.draft_model is not None else 0
        return self.target.config.num_layers + self.drafter.config.backbone.num_layers + drafting


def estimate_bundle(
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    options: BuildOptions,
    precisions: Sequence[Precision],
    draft_model: DraftModelCheckpoint | None = None,
) -> Estimate:
    """The estimate for one graph set of each precision. Reads no tensor, so that checkpoints may be known by their configs alone."""
    made_of = _Checkpoints(target, drafter, draft_model)
    sets = {set_name(precision, ATTENTION_FORMS[precision]): _set(made_of, options, precision) for precision in precisions}
    drafting = _draft_model_parameters(draft_model) if draft_model is not None else None
    parameters = _parameters(target) + _parameters(drafter) + (drafting or 0)
    wide = _weights(made_of, options, Precision.FP32)
    weights = [list(tensors.values()) for tensors in wide.values() if tensors]
    peaks = [EXPORT_COPIES * max(sizes) + (EXPORT_BASE_BYTES + sum(sizes)) for sizes in weights]
    num_small = sum(_is_small(graph) for graph in wide)
    export = BuildCost(
        Spread(max(peak.low for peak in peaks), max(peak.high for peak in peaks)),
        (
            EXPORT_SECONDS
            + EXPORT_SECONDS_PER_SMALL_GRAPH * num_small
            + EXPORT_SECONDS_PER_LAYER * made_of.num_layers
            + EXPORT_SECONDS_PER_GB * (4e-9 * parameters)
        )
        * len(sets),
    )
    engines = [made.engines for made in sets.values() if made.engines]
    engine_build = None
    if engines:
        sizes = [size for each in engines for size in each.values()]
        engine_build = BuildCost(
            ENGINE_PEAK * max(sizes) + ENGINE_BASE_BYTES,
            (ENGINE_SECONDS + ENGINE_SECONDS_PER_SMALL_GRAPH * num_small + ENGINE_SECONDS_PER_LAYER * made_of.num_layers) * len(engines)
            + ENGINE_SECONDS_PER_GB * (1e-9 * sum(sizes)),
        )
    return Estimate(_parameters(target), _parameters(drafter), drafting, sets, export, engine_build)


def _set(made_of: _Checkpoints, options: BuildOptions, precision: Precision) -> SetEstimate:
    weights = _weights(made_of, options, precision)
    graphs = {graph: sum(tensors.values()) for graph, tensors in weights.items()}
    on_disk = sum({_stored_as(graph, name, made_of): size for graph, sizes in weights.items() for name, size in sizes.items()}.values())
    graph_set = GraphSet(precision.value, ATTENTION_FORMS[precision].value, {})

    def manifest(weights: int) -> Manifest:
        files = {f"graphs/{graph_set.name}/weights": FileRecord(weights, "")}
        return describe(made_of.target, made_of.drafter, options, draft_model=made_of.draft_model, graph_sets=(graph_set,), files=files)

    if precision is Precision.FP32 or made_of.target.config.attention_cap is not None:
        # No engine can be built of soft-capped attention: such graphs run as they are, wherever ONNX Runtime runs them.
        memory = memory_need(manifest(on_disk), graph_set, batch=options.batch)
        return SetEstimate(graphs, on_disk, {}, memory, ())
    # TensorRT-RTX folds the cast of a head's table into it, and so holds the table in fp32.
    held = {graph: size * (2 if graph in ("head", "draft-head", BASE_HEAD) else 1) for graph, size in graphs.items()}
    engines = {graph: size + (SMALL_ENGINE_CODE_BYTES if _is_small(graph) else ENGINE_CODE_BYTES) for graph, size in held.items()}
    # What a GPU holds of weights are its engines.
    with_engines = manifest(sum(engines.values()))
    # Tables with a row for each position grow with the capacity as caches do.
    longer = _weights(made_of, replace(options, cache_rows=options.cache_rows + 1), precision)
    per_row = sum(sum(tensors.values()) for tensors in longer.values()) - sum(graphs.values())
    gpus = tuple(_fit(gib, with_engines, per_row) for gib in GPU_GIB)
    return SetEstimate(graphs, on_disk, engines, memory_need(with_engines, graph_set, batch=options.batch), gpus)


def _is_small(graph: str) -> bool:
    """Whether a graph is one of those between the models, beside acceptance and the greedy refiners."""
    models = ("embed", "target", "head", BASE_HEAD, "drafter", "draft-embed", "draft-decoder", "draft-head")
    return graph not in (*models, "accept") and (not graph.startswith("refiner-") or graph.endswith(SAMPLED))


def _weights(made_of: _Checkpoints, options: BuildOptions, precision: Precision) -> dict[str, dict[str, int]]:
    """Bytes of every tensor of every graph, by graph and by the module's own name for it."""
    weights = {}
    with torch.device("meta"):
        makers = graph_makers(made_of.target, made_of.drafter, options, precision, ATTENTION_FORMS[precision], made_of.draft_model)
        for graph, make in makers.items():
            module = make().module
            weights[graph] = {name: tensor.nbytes for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    return weights


def _stored_as(graph: str, name: str, made_of: _Checkpoints) -> str:
    """One name for all tensors of a set that have the same content, which the export stores once."""
    target, draft_model = made_of.target, made_of.draft_model
    owner, _, tensor = name.rpartition(".")
    rope = _rope_of(graph, name, made_of)
    if rope is not None:
        return f"{rope}: {tensor}"
    if owner.rpartition(".")[2] == "noise":
        return f"noise: {tensor}"
    if graph == BASE_HEAD and not made_of.drafter.has_own_head:
        graph, name = "head", tensor
    if graph == "head" and target.config.tied_embeddings:
        graph = "embed"
    elif graph.startswith("refiner-"):
        graph = "refiner"
    elif draft_model is not None and graph == "draft-head" and draft_model.config.tied_embeddings:
        graph = "draft-embed"
    elif draft_model is not None and graph == "draft-decoder":
        name = name.removeprefix("decoder.")
        if draft_model.shares_tables:
            # Some of the target's own layers.
            first, _, rest = name.removeprefix("layers.").partition(".")
            return f"target: layers.{draft_model.layers[int(first)]}.{rest}" if name.startswith("layers.") else f"target: {name}"
    return f"{graph}: {name}"


def _rope_of(graph: str, name: str, made_of: _Checkpoints) -> RopeConfig | None:
    """The rotary embedding whose table this is; equal ones have equal tables, whichever model they are of."""
    parts = name.removeprefix("decoder.").split(".")
    if parts[0] != "rotary":
        return None
    config = {"target": made_of.target.config, "drafter": made_of.drafter.config.backbone}.get(graph)
    if config is None:
        assert made_of.draft_model is not None, f"graph {graph} rotates nothing"
        config = made_of.draft_model.config
    return distinct_ropes(layer.rope for layer in config.layers)[int(parts[1])]


def _fit(gib: int, manifest: Manifest, bytes_per_row: int) -> GpuFit:
    def needed(capacity: int) -> int:
        rows = cache_rows(capacity, manifest.prefill_chunk, manifest.drafter.block_size)
        need = memory_need(replace(manifest, capacity=capacity, cache_rows=rows), manifest.graph_sets[0], batch=manifest.batch)
        return need.total + need.on_demand.total + bytes_per_row * (rows - manifest.cache_rows)

    room = gib * 2**30 - GPU_RESERVE_BYTES
    largest = largest_below(manifest.target.max_positions + 1, needed, room)
    # 2 is the least that can be built.
    return GpuFit(gib, needed(manifest.capacity) <= room, largest if largest > 1 else None)


def _parameters(checkpoint: TargetCheckpoint | DrafterCheckpoint) -> int:
    return sum(math.prod(shape) for shape in checkpoint.tensors.shapes.values())


def _draft_model_parameters(draft_model: DraftModelCheckpoint) -> int:
    with torch.device("meta"):
        modules: list[nn.Module] = [draft_model.decoder(1, AttentionForm.LENGTH)]
        if not draft_model.shares_tables:
            modules += [draft_model.embedding(), *([] if draft_model.config.tied_embeddings else [draft_model.head()])]
    return sum(parameter.numel() for module in modules for parameter in module.parameters())
