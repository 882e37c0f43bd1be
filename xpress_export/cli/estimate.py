"""`xpress-export inspect --estimate`: options and output. What is estimated, and from what, is :mod:`xpress_export.estimate`'s."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from xpress_export.cli.options import IntegersType, combined, opened_draft_model, resolved_options
from xpress_export.cli.quiet import quiet_libraries
from xpress_export.cli.show import size, table
from xpress_runtime.sets import Precision

if TYPE_CHECKING:
    from xpress_export.checkpoints import DrafterCheckpoint, DraftModelCheckpoint, TargetCheckpoint
    from xpress_export.estimate import BuildCost, Estimate
    from xpress_export.options import BuildOptions
    from xpress_runtime.memory import MemoryNeed


estimate_options = combined(
    click.option(
        "--estimate", is_flag=True, help="Without PATH: what the bundle of --target and --drafter would need, from their configs."
    ),
    click.option(
        "--target",
        help="Estimate: a folder with config.json, such a file, or a hub id, of which no more is fetched. Of a drafter: does it fit?",
    ),
    click.option("--target-revision", help="Estimate: revision of a target on the hub."),
    click.option("--drafter", help="Estimate: the same for the drafter."),
    click.option("--drafter-revision", help="Estimate: revision of a drafter on the hub."),
    click.option("--draft-model", help="Estimate: the same for an autoregressive drafter. Default: none."),
    click.option("--draft-model-revision", help="Estimate: revision of a draft model on the hub."),
    click.option(
        "--draft-layers",
        type=IntegersType("I[,I-J…]", ranges=True),
        help="Estimate: draft with these layers alone; without --draft-model: of the target itself.",
    ),
    click.option("--num-passes", type=IntegersType("K[,K…]"), help="Estimate: Jacobi passes to build. Default: the checkpoint's."),
    click.option("--shortlist", type=IntegersType("C[,C…]"), help="Estimate: candidates of a slot; 0: all. Default: the checkpoint's."),
    click.option("--no-sampling", is_flag=True, help="Estimate: without the graphs for sampling."),
    click.option("--prefill-chunk", type=click.IntRange(1, 8192), help="Estimate: prompt tokens that run at once. Default: 128."),
    click.option("--profile", help="Estimate: edge, server or a TOML file: defaults of --capacity, --batch and --prefill-chunk."),
    click.option(
        "--precision",
        "precisions",
        type=click.Choice([precision.value for precision in Precision]),
        multiple=True,
        help="Estimate: graphs to build; may be given several times. Default: fp32 and fp16, or bf16 where the target needs it.",
    ),
)


def shown_estimate(
    *,
    target: str | None,
    drafter: str | None,
    target_revision: str | None,
    drafter_revision: str | None,
    draft_model: str | None,
    draft_model_revision: str | None,
    draft_layers: tuple[int, ...] | None,
    shortlist: tuple[int, ...] | None,
    no_sampling: bool,
    profile: str | None,
    precisions: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> str:
    """The estimate as text, or as one JSON object."""
    if target is None or drafter is None:
        raise click.UsageError("--estimate needs --target and --drafter", click.get_current_context())
    from xpress_engines.profiles import load_profile
    from xpress_export.checkpoints.config_only import open_pair_configs
    from xpress_export.estimate import estimate_bundle
    from xpress_export.options import resolve_precisions

    quiet_libraries()
    opened = open_pair_configs(target, drafter, target_revision=target_revision, drafter_revision=drafter_revision)
    chosen = load_profile(profile) if profile is not None else None
    resolved = resolved_options(*opened, {**options, "shortlists": shortlist, "sampling": not no_sampling}, chosen, profile)
    model = opened_draft_model(opened[0], draft_model, draft_model_revision, draft_layers, config_only=True)
    built = resolve_precisions(opened[0], [Precision(name) for name in precisions], with_half=True)
    estimate = estimate_bundle(*opened, resolved, built, model)
    return _json(estimate, resolved) if as_json else _text(*opened, model, estimate, resolved)


def _json(estimate: Estimate, options: BuildOptions) -> str:
    from xpress_export.estimate import GPU_RESERVE_BYTES, MEASURED_ON

    values = asdict(estimate)
    for name, made in estimate.sets.items():
        values["sets"][name]["memory"]["total"] = made.memory.total
    return json.dumps({**values, "options": asdict(options), "gpu_reserve_bytes": GPU_RESERVE_BYTES, "build_scaled_from": MEASURED_ON})


def _text(
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    draft_model: DraftModelCheckpoint | None,
    estimate: Estimate,
    options: BuildOptions,
) -> str:
    config, backbone = target.config, drafter.config.backbone
    names = {"xpress": "refiner", "markov": "Markov head", None: "no refiner"}
    refiner = names[drafter.head] + ("" if drafter.head_rank is None else f" of rank {drafter.head_rank}")
    of_target = [target.model_type, f"{config.num_layers} layers", f"hidden {config.hidden_size}", f"vocabulary {config.vocab_size}"]
    of_drafter = [f"{backbone.num_layers} layers", f"block size {drafter.config.block_size}", refiner]
    passes = ", ".join(map(str, options.num_passes))
    shortlists = ", ".join(str(size) if size else "off" for size in options.shortlists)
    sampling = "sampling" if options.sampling else "no sampling"
    limits = f"capacity {options.capacity}, batch {options.batch}, prefill chunk {options.prefill_chunk}"
    lines = [
        "From the configs alone; no weights were read or fetched.",
        "",
        f"target   {target.location.source}: {', '.join(of_target)}, {_billions(estimate.target_parameters)} parameters",
        f"drafter  {drafter.location.source}: {', '.join(of_drafter)}, {_billions(estimate.drafter_parameters)} parameters",
        *_draft_model_lines(draft_model, estimate),
        f"options  passes {passes}; shortlist {shortlists}; {sampling}; {limits}",
        "",
        *_size_lines(estimate),
        "",
        *_memory_lines(estimate, options),
        "",
        *_build_lines(estimate),
    ]
    return "\n".join(lines)


def _draft_model_lines(draft_model: DraftModelCheckpoint | None, estimate: Estimate) -> list[str]:
    if draft_model is None or estimate.draft_model_parameters is None:
        return []
    shown = f"{draft_model.config.num_layers} layers, {_billions(estimate.draft_model_parameters)} parameters"
    if draft_model.shares_tables:
        return [f"draft    with the target's own: {shown}, which are the target's"]
    return [f"draft    {draft_model.location.source}: {draft_model.model.model_type}, {shown}"]


def _size_lines(estimate: Estimate) -> list[str]:
    columns = {name: (made.graphs, made.on_disk) for name, made in estimate.sets.items()}
    columns |= {f"{name} engines": (made.engines, sum(made.engines.values())) for name, made in estimate.sets.items() if made.engines}
    graphs = next(iter(columns.values()))[0]
    rows = [[graph, *(size(sizes[graph]) for sizes, _ in columns.values())] for graph in graphs]
    rows.append(["on disk", *(size(total) for _, total in columns.values())])
    return [
        "Weights by graph. A set stores what graphs share once, every engine holds its own.",
        table(["", *columns], rows),
        f"Bundle: {size(sum(total for _, total in columns.values()))}, and the tokenizer.",
    ]


def _memory_lines(estimate: Estimate, options: BuildOptions) -> list[str]:
    from xpress_export.estimate import CPU_PEAK, GPU_RESERVE_BYTES

    lines = [f"Memory at run time, capacity {options.capacity}, batch {options.batch}:"]
    parts = ("weights", "target_caches", "drafter_caches", "working")
    places = {name: f"{name} engines, GPU" if made.engines else f"{name}, CPU" for name, made in estimate.sets.items()}
    rows = [[places[name], *_needs(made.memory, parts), size(made.memory.total)] for name, made in estimate.sets.items()]
    lines.append(table(["", *(part.replace("_", " ") for part in parts), "total"], rows))
    added = {name: asdict(made.memory.on_demand) for name, made in estimate.sets.items()}
    asked_for = next(iter(added.values()))
    rows = [[places[name], *(size(sizes[part]) for part in asked_for)] for name, sizes in added.items()]
    lines += ["Added when a request first asks for it:", table(["", *(part.replace("_", " ") for part in asked_for)], rows)]
    if not all(made.engines for made in estimate.sets.values()):
        lines.append(f"Processes on a CPU were measured at {CPU_PEAK.low} to {CPU_PEAK.high} × the total, with smaller models.")
    kept = f"{size(GPU_RESERVE_BYTES)} is kept for driver, CUDA context and activations: assumed, not measured."
    for name, made in estimate.sets.items():
        if made.gpus:
            fits = [[f"{gpu.gib} GiB", "yes" if gpu.fits else "no", str(gpu.largest_capacity or "none")] for gpu in made.gpus]
            question = f"Do {name} engines fit at capacity {options.capacity}, batch {options.batch}, with all that is added? {kept}"
            lines += ["", question, table(["GPU", "fits", "largest capacity that fits"], fits)]
    return lines


def _build_lines(estimate: Estimate) -> list[str]:
    from xpress_export.estimate import MEASURED_ON

    rows = [[name, *_cost(cost)] for name, cost in (("export", estimate.export), ("engines", estimate.engine_build)) if cost]
    return [
        f"Build, scaled from {MEASURED_ON}; not measured at this size.",
        "Without download and parity, checkpoints in the page cache; times from an idle machine to a busy one.",
        table(["", "peak memory", "time"], rows),
    ]


def _needs(need: MemoryNeed, parts: tuple[str, ...]) -> list[str]:
    return [size(getattr(need, part)) for part in parts]


def _cost(cost: BuildCost) -> list[str]:
    memory, seconds = cost.peak_bytes, cost.seconds
    return [f"{memory.low / 1e9:.1f} to {memory.high / 1e9:.1f} GB", f"{seconds.low / 60:.1f} to {seconds.high / 60:.1f} min"]


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 1e8 else f"{count / 1e6:.1f} million"
