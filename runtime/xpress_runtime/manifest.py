"""What ``bundle.json`` says: plain records, written by the build and read by the runtime.

Knows the layout of the description; knows nothing about files, backends or graphs' contents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from xpress_runtime.errors import BundleError
from xpress_runtime.fields import Fields
from xpress_runtime.graph_names import graph_names
from xpress_runtime.sets import AttentionForm, Precision, set_name
from xpress_runtime.version import BUNDLE_FORMAT

MANIFEST_FILE = "bundle.json"

HEADS = ("xpress", "markov")
ANCHOR_PREDECESSORS = ("previous", "anchor")


@dataclass(frozen=True)
class Origin:
    """Where a checkpoint came from. ``identity`` is a sha256 over its config and tensors."""

    source: str
    revision: str | None
    licence: str | None
    identity: str


@dataclass(frozen=True)
class CacheShape:
    """Key and value caches of one model: ``num_layers`` pairs of [batch, num_kv_heads, cache rows, head_dim]."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def elements(self, batch: int, cache_rows: int) -> int:
        """Number of elements of all caches of the model."""
        return 2 * self.num_layers * batch * self.num_kv_heads * cache_rows * self.head_dim


@dataclass(frozen=True)
class TargetRecord:
    """The target of a bundle."""

    origin: Origin
    model_type: str
    hidden_size: int
    vocab_size: int
    max_positions: int
    stop_token_ids: tuple[int, ...]
    caches: CacheShape


@dataclass(frozen=True)
class DrafterRecord:
    """The block drafter of a bundle. ``head``: "xpress" (the refiner), "markov" or None for bare DFlash; ``head_rank`` is its rank.

    ``anchor_predecessor``: what the refiner takes for the token before the anchor, "previous" (that token) or "anchor" (the anchor itself).
    ``max_positions``: the longest text that it was trained for. ``draft_vocab_size``: tokens that it can draft.
    """

    origin: Origin
    block_size: int
    mask_token_id: int
    tap_layers: tuple[int, ...]
    head: str | None
    head_rank: int | None
    trained_with_thinking: bool | None
    anchor_predecessor: str
    max_positions: int
    draft_vocab_size: int
    caches: CacheShape

    @property
    def num_proposals(self) -> int:
        """Tokens that one block proposes: all slots but the anchor's."""
        return self.block_size - 1


@dataclass(frozen=True)
class DraftModelRecord:
    """The autoregressive drafter of a bundle: a causal LM with the target's tokenizer, or with ``layers`` those layers of one.

    ``shares_tables``: its embedding table and head are the target's, so the set has no graphs of its own for them.
    """

    origin: Origin
    layers: tuple[int, ...] | None
    hidden_size: int
    vocab_size: int
    shares_tables: bool
    caches: CacheShape


@dataclass(frozen=True)
class GraphRecord:
    """One graph file and how often each operator occurs in it."""

    file: str
    operators: Mapping[str, int]


@dataclass(frozen=True)
class GraphSet:
    """The graphs of one precision and attention form, by graph name."""

    precision: str
    attention_form: str
    graphs: Mapping[str, GraphRecord]

    @property
    def name(self) -> str:
        return set_name(Precision(self.precision), AttentionForm(self.attention_form))


@dataclass(frozen=True)
class FileRecord:
    """Size and content of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """All of ``bundle.json``.

    ``num_passes`` and ``shortlists`` list the built numbers of refinement passes and of candidates per slot (0: the whole vocabulary), the
    default first; ``capacity`` is in tokens (prompt and output together), and ``cache_rows`` is larger by the longest overhang of a chunk
    or block. ``sampling``: whether the graphs for sampling are there. ``base_head``: whether the block has a head of its own. ``parity`` is
    what the last parity run of each graph set found.
    """

    target: TargetRecord
    drafter: DrafterRecord
    draft_model: DraftModelRecord | None
    num_passes: tuple[int, ...]
    shortlists: tuple[int, ...]
    sampling: bool
    base_head: bool
    capacity: int
    cache_rows: int
    prefill_chunk: int
    batch: int
    graph_sets: tuple[GraphSet, ...]
    has_tokenizer: bool
    files: Mapping[str, FileRecord]
    built_with: Mapping[str, str]
    parity: Mapping[str, Mapping[str, Any]] | None = field(default=None)

    def to_json(self) -> dict[str, Any]:
        """A JSON object, the format version first."""
        return {"format_version": BUNDLE_FORMAT, **asdict(self)}

    @property
    def graph_names(self) -> tuple[str, ...]:
        """Every graph that a set of this bundle has."""
        draft = None if self.draft_model is None else self.draft_model.shares_tables
        return graph_names(
            self.num_passes, self.shortlists, sampling=self.sampling, base_head=self.base_head, draft_model_shares_tables=draft
        )

    def with_parity(self, parity: Mapping[str, Mapping[str, Any]]) -> Manifest:
        """With the results of these sets, those of others kept."""
        return replace(self, parity={**(self.parity or {}), **parity})

    def graph_set(self, name: str) -> GraphSet:
        """The set of that name; BundleError lists what there is."""
        for graph_set in self.graph_sets:
            if graph_set.name == name:
                return graph_set
        names = ", ".join(graph_set.name for graph_set in self.graph_sets)
        precision = name.partition("-")[0]
        raise BundleError(f"the bundle holds no graph set {name} (it holds: {names}); build it again with --precision {precision}")


def read_manifest(fields: Fields) -> Manifest:
    """Check and convert a parsed ``bundle.json``; BundleError names the field that is wrong."""
    version = fields.integer("format_version")
    if version != BUNDLE_FORMAT:
        age = "newer" if version > BUNDLE_FORMAT else "older"
        raise BundleError(
            f"{fields.origin}: bundle format {version} is {age} than this runtime reads ({BUNDLE_FORMAT}); "
            "use the release that built it, or build the bundle again"
        )
    manifest = Manifest(
        target=_target(fields.nested("target")),
        drafter=_drafter(fields.nested("drafter")),
        draft_model=_draft_model(fields.nested("draft_model")) if "draft_model" in fields else None,
        num_passes=fields.integers("num_passes"),
        shortlists=fields.integers("shortlists"),
        sampling=fields.boolean("sampling"),
        base_head=fields.boolean("base_head"),
        capacity=fields.integer("capacity", 1),
        cache_rows=fields.integer("cache_rows", 1),
        prefill_chunk=fields.integer("prefill_chunk", 1),
        batch=fields.integer("batch", 1),
        graph_sets=tuple(_graph_set(entry) for entry in fields.objects("graph_sets")),
        has_tokenizer=fields.boolean("has_tokenizer"),
        files={name: _file(entry) for name, entry in fields.nested("files").entries()},
        built_with=_texts(fields.nested("built_with")),
        parity=_parity(fields.nested("parity")) if "parity" in fields else None,
    )
    _check(manifest, fields.origin)
    return manifest


def _check(manifest: Manifest, origin: str) -> None:
    target, drafter, num_proposals = manifest.target, manifest.drafter, manifest.drafter.num_proposals
    if 0 not in manifest.num_passes or max(manifest.num_passes) > num_proposals:
        raise BundleError(f"{origin}: num_passes {list(manifest.num_passes)} must contain 0 and stay at most {num_proposals}")
    for what, numbers in (("num_passes", manifest.num_passes), ("shortlists", manifest.shortlists)):
        if len(set(numbers)) != len(numbers):
            raise BundleError(f"{origin}: {what} {list(numbers)} names a number twice")
    if drafter.head is None and max(manifest.num_passes):
        raise BundleError(f"{origin}: num_passes {list(manifest.num_passes)} needs a head, and the drafter's head is none")
    if manifest.draft_model is not None and manifest.draft_model.layers == ():
        raise BundleError(f"{origin}: draft_model: layers is empty, expected at least one")
    if manifest.cache_rows < manifest.capacity + manifest.prefill_chunk + manifest.drafter.block_size:
        raise BundleError(f"{origin}: {manifest.cache_rows} cache rows cannot hold a capacity of {manifest.capacity} tokens")
    for what, token in (("mask_token_id", drafter.mask_token_id), *(("stop_token_ids", token) for token in target.stop_token_ids)):
        if token >= target.vocab_size:
            raise BundleError(f"{origin}: {what} has token {token}, expected less than the target's vocab_size {target.vocab_size}")
    if not manifest.shortlists or max(manifest.shortlists) > target.vocab_size:
        raise BundleError(
            f"{origin}: shortlists {list(manifest.shortlists)} must name at least one, "
            f"each at most the target's vocab_size {target.vocab_size}"
        )
    if not manifest.graph_sets:
        raise BundleError(f"{origin}: field 'graph_sets' is empty, expected at least one set of graphs")
    for graph_set in manifest.graph_sets:
        for name in manifest.graph_names:
            if name not in graph_set.graphs:
                raise BundleError(f"{origin}: graph {name} of set {graph_set.name} is missing")
        for name, graph in graph_set.graphs.items():
            if graph.file not in manifest.files:
                raise BundleError(f"{origin}: graph {name} of set {graph_set.name} is in {graph.file!r}, which is not among 'files'")


def _target(fields: Fields) -> TargetRecord:
    return TargetRecord(
        origin=_origin(fields.nested("origin")),
        model_type=fields.text("model_type"),
        hidden_size=fields.integer("hidden_size", 1),
        vocab_size=fields.integer("vocab_size", 1),
        max_positions=fields.integer("max_positions", 1),
        stop_token_ids=fields.integers("stop_token_ids"),
        caches=_caches(fields.nested("caches")),
    )


def _drafter(fields: Fields) -> DrafterRecord:
    return DrafterRecord(
        origin=_origin(fields.nested("origin")),
        block_size=fields.integer("block_size", 2),
        mask_token_id=fields.integer("mask_token_id"),
        tap_layers=fields.integers("tap_layers"),
        head=fields.choice("head", HEADS) if "head" in fields else None,
        head_rank=fields.integer("head_rank", 1) if "head_rank" in fields else None,
        trained_with_thinking=fields.boolean("trained_with_thinking") if "trained_with_thinking" in fields else None,
        anchor_predecessor=fields.choice("anchor_predecessor", ANCHOR_PREDECESSORS),
        max_positions=fields.integer("max_positions", 1),
        draft_vocab_size=fields.integer("draft_vocab_size", 1),
        caches=_caches(fields.nested("caches")),
    )


def _draft_model(fields: Fields) -> DraftModelRecord:
    return DraftModelRecord(
        origin=_origin(fields.nested("origin")),
        layers=fields.integers("layers") if "layers" in fields else None,
        hidden_size=fields.integer("hidden_size", 1),
        vocab_size=fields.integer("vocab_size", 1),
        shares_tables=fields.boolean("shares_tables"),
        caches=_caches(fields.nested("caches")),
    )


def _origin(fields: Fields) -> Origin:
    return Origin(
        source=fields.text("source"),
        revision=fields.text("revision") if "revision" in fields else None,
        licence=fields.text("licence") if "licence" in fields else None,
        identity=fields.text("identity"),
    )


def _caches(fields: Fields) -> CacheShape:
    return CacheShape(fields.integer("num_layers", 1), fields.integer("num_kv_heads", 1), fields.integer("head_dim", 1))


def _graph_set(fields: Fields) -> GraphSet:
    graphs = {
        name: GraphRecord(entry.text("file"), _counts(entry.nested("operators"))) for name, entry in fields.nested("graphs").entries()
    }
    precision = fields.choice("precision", [precision.value for precision in Precision])
    return GraphSet(precision, fields.choice("attention_form", [form.value for form in AttentionForm]), graphs)


def _parity(fields: Fields) -> Mapping[str, Mapping[str, Any]]:
    """As it is, but for what is shown of it."""
    for _, result in fields.entries():
        result.boolean("passed")
        result.nested("graphs")
        result.nested("generation").integer("tokens")
    return fields.values


def _file(fields: Fields) -> FileRecord:
    return FileRecord(fields.integer("bytes", maximum=2**63), fields.text("sha256"))


def _counts(fields: Fields) -> dict[str, int]:
    return {name: fields.integer(name) for name in fields}


def _texts(fields: Fields) -> dict[str, str]:
    return {name: fields.text(name) for name in fields}
