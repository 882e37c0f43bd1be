"""`xpress-export inspect`: what a bundle holds and needs, or what a checkpoint is."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from xpress_export.cli.estimate import estimate_options, shown_estimate
from xpress_export.cli.options import combined, json_option
from xpress_export.cli.show import engine_lines, size, table
from xpress_runtime.errors import BundleError
from xpress_runtime.manifest import MANIFEST_FILE

if TYPE_CHECKING:
    from xpress_runtime.bundle import Bundle
    from xpress_runtime.engines import EngineManifest
    from xpress_runtime.manifest import Manifest, Origin

# What checkpoints are, as the package that reads them has it. That one is not imported here: it needs torch, and a bundle does not.
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_WEIGHT_SUFFIXES = (".gguf", ".pt", ".pth")
_CONFIG_FILE = "config.json"


@click.command("inspect")
@click.argument("path", required=False)
@combined(
    click.option("--capacity", type=click.IntRange(1), help="Of a bundle or an estimate: memory at this capacity. Default: the bundle's."),
    click.option("--batch", type=click.IntRange(1), help="Of a bundle or an estimate: memory for this many rows. Default: the bundle's."),
    click.option("--no-verify", is_flag=True, help="Do not hash the bundle's files."),
    click.option("--revision", help="Revision of a checkpoint on the hub."),
    click.option("--identity", is_flag=True, help="Of a checkpoint: read all tensors for their sha256."),
    json_option,
)
@estimate_options
def command(
    path: str | None,
    capacity: int | None,
    batch: int | None,
    no_verify: bool,
    revision: str | None,
    identity: bool,
    as_json: bool,
    estimate: bool,
    **estimated: Any,
) -> None:
    """Show what PATH is: a bundle, or a checkpoint (a folder, a .gguf or .pt file, or a hub id).

    Of a bundle: where it came from, its graphs with sizes and operators, its parity result and the memory it needs. Of a checkpoint: its
    format, sizes and layers, and whether it can be built; with --target whether a drafter fits that target. With --estimate: what a bundle
    would need, before its checkpoints are downloaded.
    """
    context = click.get_current_context()
    if estimate:
        if path is not None or no_verify or revision is not None or identity:
            raise click.UsageError("--estimate takes neither PATH nor --no-verify, --revision or --identity", context)
        click.echo(shown_estimate(**estimated, capacity=capacity, batch=batch, as_json=as_json))
        return
    if path is None:
        raise click.UsageError("Missing argument 'PATH'", context)
    checkpoint = _is_checkpoint(path)
    for name, value in estimated.items():
        if value and not (checkpoint and name in ("target", "target_revision")):
            option = "precision" if name == "precisions" else name.replace("_", "-")
            raise click.UsageError(f"--{option} is for --estimate", context)
    of_bundle = {"--capacity": capacity, "--batch": batch, "--no-verify": no_verify}
    of_checkpoint = {"--revision": revision, "--identity": identity}
    for option, value in (of_bundle if checkpoint else of_checkpoint).items():
        if value:
            raise click.UsageError(f"{option} is for {'bundles' if checkpoint else 'checkpoints'}, and {path} is none", context)
    if checkpoint:
        _explain(path, revision, estimated["target"], estimated["target_revision"], with_identity=identity, as_json=as_json)
        return
    from xpress_runtime.bundle import Bundle

    if not (Path(path) / MANIFEST_FILE).exists():
        raise BundleError(
            f"{path} is neither a bundle (a folder with {MANIFEST_FILE}; xpress-export build makes one) nor a checkpoint "
            f"(a folder with {_CONFIG_FILE}, a .gguf or .pt file, or a hub id such as 'org/name')"
        )
    opened = Bundle.open(Path(path), verify=not no_verify)
    manifest = opened.manifest
    capacity, batch = capacity or manifest.capacity, batch or manifest.batch
    engines = _engines(opened, verify=not no_verify)
    if as_json:
        held = {kind: {"problem": found} if isinstance(found, str) else found.to_json() for kind, found in engines.items()}
        click.echo(json.dumps({**manifest.to_json(), "memory": _memory(manifest, engines, capacity, batch), "engines": held}))
        return
    click.echo(_shown(manifest, engines, capacity, batch))


def _is_checkpoint(path: str) -> bool:
    """Decided without what only an export needs: a bundle is shown where torch is not installed."""
    if not path.strip() or "\0" in path:
        return False
    try:
        place = Path(path).expanduser()
        if not place.exists():
            return _HUB_ID.fullmatch(path) is not None
        if place.is_file():
            return place.suffix in (*_WEIGHT_SUFFIXES, ".json")
        names = [entry.name for entry in place.iterdir()]
    except (OSError, RuntimeError):
        return False
    if MANIFEST_FILE in names:
        return False
    return _CONFIG_FILE in names or any(name.endswith(_WEIGHT_SUFFIXES) for name in names)


def _explain(
    path: str, revision: str | None, target: str | None, target_revision: str | None, *, with_identity: bool, as_json: bool
) -> None:
    from xpress_export.checkpoints.explain import explain
    from xpress_export.cli.quiet import quiet_libraries
    from xpress_export.cli.show_checkpoint import shown_checkpoint
    from xpress_runtime.errors import CheckFailed

    quiet_libraries()
    found = explain(path, revision, with_identity=with_identity, target=target, target_revision=target_revision)
    click.echo(json.dumps(found.to_json()) if as_json else shown_checkpoint(found))
    if found.mismatch is not None:
        raise CheckFailed(found.mismatch)


def _engines(bundle: Bundle, *, verify: bool) -> dict[str, EngineManifest | str]:
    """Each kind that the bundle holds, or why it cannot be used: the bundle is a good one without."""
    from xpress_runtime.engines import engine_kinds, open_engines
    from xpress_runtime.errors import BundleError

    found: dict[str, EngineManifest | str] = {}
    for kind in engine_kinds(bundle):
        try:
            found[kind] = open_engines(bundle, kind, verify=verify).manifest
        except BundleError as problem:
            found[kind] = str(problem)
    return found


def _memory(manifest: Manifest, engines: Mapping[str, EngineManifest | str], capacity: int, batch: int) -> dict[str, dict[str, Any]]:
    """By graph set, and by kind of engines that can be used."""
    from dataclasses import asdict

    from xpress_runtime.memory import memory_need

    sizes = {"capacity": capacity, "batch": batch}
    needs = {graph_set.name: memory_need(manifest, graph_set, **sizes) for graph_set in manifest.graph_sets}
    for kind, found in engines.items():
        if not isinstance(found, str):
            needs[f"engines {kind}"] = memory_need(manifest, manifest.graph_set(found.graph_set), **sizes, weights=found.bytes)
    return {name: {**sizes, **asdict(need), "total": need.total} for name, need in needs.items()}


def _shown(manifest: Manifest, engines: Mapping[str, EngineManifest | str], capacity: int, batch: int) -> str:
    target, drafter = manifest.target, manifest.drafter
    heads = {"xpress": "xPress", "markov": "Markov head", None: "none (bare DFlash)"}
    refiner = heads[drafter.head] + (f", rank {drafter.head_rank}" if drafter.head_rank else "")
    shortlists = ", ".join(str(size) if size else "off" for size in manifest.shortlists)
    lines = [
        f"target    {_origin(target.origin)}",
        f"          {target.model_type}, {target.caches.num_layers} layers, hidden {target.hidden_size}, vocabulary {target.vocab_size}",
        f"drafter   {_origin(drafter.origin)}",
        f"          {drafter.caches.num_layers} layers, block size {drafter.block_size}, {drafter.num_proposals} proposals a round",
        f"          mask id {drafter.mask_token_id}, taps {list(drafter.tap_layers)}",
        f"refiner   {refiner}; passes {', '.join(str(passes) for passes in manifest.num_passes)} (the first is the default)",
        *([] if drafter.anchor_predecessor == "previous" else ["          before the anchor stands the anchor itself"]),
        *([] if drafter.draft_vocab_size == target.vocab_size else [f"          drafts {drafter.draft_vocab_size} of the tokens"]),
        f"          shortlist {shortlists}; sampling {'yes' if manifest.sampling else 'no: greedy only'}",
        *_draft_model(manifest),
        f"limits    capacity {manifest.capacity} tokens, batch {manifest.batch}, prefill chunk {manifest.prefill_chunk}",
        f"tokenizer {'yes' if manifest.has_tokenizer else 'none: token ids only'}; stop tokens {list(target.stop_token_ids)}",
        *_parity(manifest),
        f"built by  {', '.join(f'{name} {version}' for name, version in manifest.built_with.items())}",
    ]
    for graph_set in manifest.graph_sets:
        rows = []
        for name, graph in graph_set.graphs.items():
            counts = sorted(graph.operators.items(), key=lambda item: (-item[1], item[0]))
            shown = ", ".join(f"{count} {operator}" for operator, count in counts[:5]) + (", …" if len(counts) > 5 else "")
            rows.append([name, size(manifest.files[graph.file].bytes), str(sum(graph.operators.values())), shown])
        lines += ["", f"graphs {graph_set.name}", table(["graph", "file", "operators", "most frequent"], rows)]
    for kind, found in engines.items():
        lines += ["", *([f"engines {kind} cannot be used: {found}"] if isinstance(found, str) else engine_lines(found))]
    for name, need in _memory(manifest, engines, capacity, batch).items():
        parts = " + ".join(
            f"{part.replace('_', ' ')} {size(need[part])}" for part in ("weights", "target_caches", "drafter_caches", "working")
        )
        lines += ["", f"memory for {name}, capacity {capacity}, batch {batch}: {size(need['total'])} = {parts}"]
    sizes = [record.bytes for record in manifest.files.values()]
    sizes += [engine.bytes for found in engines.values() if not isinstance(found, str) for engine in found.engines.values()]
    lines += ["", f"{len(sizes)} files, {size(sum(sizes))}"]
    return "\n".join(lines)


def _draft_model(manifest: Manifest) -> list[str]:
    record = manifest.draft_model
    if record is None:
        return []
    layers = "" if record.layers is None else f", its layers {', '.join(map(str, record.layers))}"
    tables = "the target's tables" if record.shares_tables else f"vocabulary {record.vocab_size}"
    return [
        f"draft model {_origin(record.origin)}",
        f"          autoregressive, {record.caches.num_layers} layers{layers}, hidden {record.hidden_size}, {tables}",
    ]


def _origin(origin: Origin) -> str:
    revision = f" at {origin.revision}" if origin.revision else ""
    return f"{origin.source}{revision} (licence: {origin.licence or 'not stated'}; identity {origin.identity[:12]})"


def _parity(manifest: Manifest) -> list[str]:
    if not manifest.parity:
        return ["parity    not checked"]
    from xpress_export.parity.report import failures

    lines = []
    for name, result in manifest.parity.items():
        found = f"{len(result['graphs'])} graphs, {result['generation']['tokens']} generated tokens"
        lines.append(f"parity    {name} " + (f"passed: {found}" if result["passed"] else f"FAILED: {'; '.join(failures(result))}"))
    return lines
