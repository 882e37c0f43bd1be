"""How a checkpoint is shown on a terminal: what it is, its layers, and whether it can be built."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from xpress_export.checkpoints.explain import Explanation

_FACTORS = ("embedding_scale", "residual_scale", "logit_scale")
_CAPS = ("attention_cap", "logit_cap")


def shown_checkpoint(found: Explanation) -> str:
    """A few lines; each fact that is the same everywhere or changes nothing is left out."""
    facts = found.facts
    revision = f" at {found.revision}" if found.revision else ""
    lines = [f"{found.kind.ljust(9)} {found.source}{revision} (licence: {found.licence or 'not stated'})"]
    if "stated" in facts:
        stated = ", ".join(f"{name} {_text(value)}" for name, value in facts["stated"].items())
        lines.append(f"stated    {stated or 'nothing'}")
    else:
        lines += _sizes(facts)
        lines += _drafter(facts) if found.kind == "drafter" else _target(facts)
    if facts.get("identity"):
        lines.append(f"identity  {facts['identity']}")
    judged = " (judged by config.json alone)" if found.config_alone else ""
    lines.append("can be built" + judged if found.problem is None else f"cannot be built: {found.problem}")
    if found.target is not None:
        lines.append(f"fits target {found.target}" if found.mismatch is None else f"does not fit target {found.target}: {found.mismatch}")
    return "\n".join(lines)


def _sizes(facts: Mapping[str, Any]) -> list[str]:
    heads = f"{facts['num_heads']} heads of {facts['head_dim']}, {facts['num_kv_heads']} for keys and values"
    lines = [
        f"format    {facts['format']}, family {facts['family']}",
        f"sizes     {facts['num_layers']} layers, hidden {facts['hidden_size']}, inner {facts['intermediate_size']}, {heads}",
        f"          vocabulary {facts['vocab_size']}, {facts['max_positions']} positions",
    ]
    counted = Counter(_layer(layer, facts["head_dim"]) for layer in facts["layers"])
    lines += [f"layers    {count} × {kind}" for kind, count in counted.items()]
    usual = facts["head_dim"] ** -0.5
    scaled = [] if abs(facts["attention_scale"] - usual) < 1e-9 else [f"attention scale {facts['attention_scale']:g}"]
    changes = scaled + [f"{name.replace('_', ' ')} {facts[name]:g}" for name in _FACTORS if facts[name] != 1]
    changes += [f"{name.replace('_', ' ')} {facts[name]:g}" for name in _CAPS if facts[name] is not None]
    return lines + ([f"factors   {', '.join(changes)}"] if changes else [])


def _layer(layer: Mapping[str, Any], head_dim: int) -> str:
    rope = "no rotary embedding"
    if layer["rope"] is not None:
        part = "" if layer["rope"]["rotary_dim"] == head_dim else f" of {layer['rope']['rotary_dim']} dims"
        rope = f"rotary embedding {layer['rope']['type']}{part} (base {layer['rope']['theta']:g})"
    window = "all positions" if layer["window"] is None else f"the last {layer['window']} positions"
    return f"{window}, {'causal' if layer['causal'] else 'both ways within the block'}, {rope}"


def _target(facts: Mapping[str, Any]) -> list[str]:
    tied = "tied to the embedding" if facts["tied_embeddings"] else "its own table"
    limits = [] if facts["engines"] else ["no engines: its attention scores are bounded, which TensorRT's are not"]
    limits += [] if facts["fp16"] else ["bf16 in the place of fp16"]
    head = f"head      {tied}; stop tokens {_text(facts['stop_token_ids'])}"
    return [head, *([f"limits    {'; '.join(limits)}"] if limits else [])]


def _drafter(facts: Mapping[str, Any]) -> list[str]:
    head, target = facts["head"], facts["target"]
    if head is None:
        refiner = "none (bare DFlash)"
    elif head["kind"] == "markov":
        refiner = f"Markov head, rank {head['rank']}"
    else:
        shortlist = head["shortlist"] or "off"
        predecessor = {"previous": "the real previous token", "anchor": "the anchor itself"}[head["anchor_predecessor"]]
        refiner = f"xPress, rank {head['rank']}, MLP {head['mlp_hidden']}, {head['num_passes']} passes, shortlist {shortlist}; "
        refiner += f"before the anchor stands {predecessor}"
    drafted = "all tokens" if facts["draft_vocab_size"] == facts["vocab_size"] else f"{facts['draft_vocab_size']} of the tokens"
    thinking = {None: "not stated", True: "on", False: "off"}[facts["trained_with_thinking"]]
    depth = f"{target['num_layers']} layers" if target["num_layers"] is not None else f"at least {target['min_num_layers']} layers"
    sizes = f"hidden {target['hidden_size']}, vocabulary {target['vocab_size']}, {depth}"
    return [
        f"block     {facts['block_size']} slots, mask id {facts['mask_token_id']}, taps {_text(facts['tap_layers'])}",
        f"refiner   {refiner}",
        f"drafts    {drafted}, through {'a head of its own' if facts['has_own_head'] else 'the head of the target'}",
        f"trained   to {facts['max_positions']} positions; thinking {thinking}",
        f"target    {target['name'] or 'not named'}: {sizes}",
    ]


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
