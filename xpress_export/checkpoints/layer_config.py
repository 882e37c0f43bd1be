"""What each layer of a config.json sees and how it rotates: sliding windows, layers without rotary embedding, bases of their own.

It knows the fields that say so and what a family assumes where they are absent; what a rotary embedding is made of is rope_config.py's.
"""

from __future__ import annotations

from xpress_export.checkpoints.families import Family
from xpress_export.checkpoints.locate import shown
from xpress_export.checkpoints.rope_config import FULL, MAX_POSITIONS, SLIDING, read_local_rope, read_rope
from xpress_export.models.decoder import LayerConfig
from xpress_runtime.errors import CheckpointError
from xpress_runtime.fields import Fields

_SMOLLM3_FIELDS = ("no_rope_layers", "no_rope_layer_interval")


def read_layers(fields: Fields, family: Family, num_layers: int, head_dim: int, max_positions: int) -> tuple[LayerConfig, ...]:
    """One record a layer; CheckpointError where fields contradict each other or ask for what is not computed."""
    rope = read_rope(fields, family, head_dim, max_positions)
    local = rope if family.local_theta is None else read_local_rope(fields, family.local_theta, head_dim, max_positions)
    rotates = _rotating(fields, family, num_layers)
    window = _window(fields, family)
    layers = []
    for kind, rotated in zip(_kinds(fields, family, num_layers, window, rotates), rotates, strict=True):
        sliding = kind == SLIDING
        layers.append(LayerConfig((local if sliding else rope) if rotated else None, window if sliding else None))
    return tuple(layers)


def _window(fields: Fields, family: Family) -> int | None:
    """The window of the layers that have one; None: no layer has."""
    name = "sliding_window"
    if family.windows == "never":
        if name in fields:
            raise CheckpointError(
                f"{fields.origin}: field '{name}' is {shown(fields.values[name])}, but this family has no windows; set it to null"
            )
        return None
    if family.windows == "switched" and not ("use_sliding_window" in fields and fields.boolean("use_sliding_window")):
        return None
    if name in fields:
        return fields.integer(name, 1, MAX_POSITIONS)
    # An explicit null means none.
    return None if name in fields.values else family.window


def _kinds(fields: Fields, family: Family, num_layers: int, window: int | None, rotates: list[bool]) -> list[str]:
    """``layer_types``, or what the family makes of the other fields."""
    if "layer_types" not in fields:
        return [SLIDING if window is not None and _slides(fields, family, layer, rotates[layer]) else FULL for layer in range(num_layers)]
    kinds = fields.required("layer_types")
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise CheckpointError(f"{fields.origin}: field 'layer_types' must be a list of num_hidden_layers ({num_layers}) kinds")
    for layer, kind in enumerate(kinds):
        where = f"{fields.origin}: layer_types[{layer}] is '{shown(kind)}'"
        if kind not in (FULL, SLIDING):
            raise CheckpointError(f"{where}; only {FULL} and {SLIDING} are supported")
        if kind == SLIDING and window is None:
            raise CheckpointError(f"{where}, but no window is switched on: sliding_window must say how many positions such a layer sees")
        # transformers does not look at the field in these families.
        if family.windows == "all" and window is not None and kind == FULL:
            raise CheckpointError(
                f"{where}, but sliding_window ({window}) holds for every layer of this family; remove the one that is stale"
            )
    return kinds


def _slides(fields: Fields, family: Family, layer: int, rotated: bool) -> bool:
    """Whether a layer has the window, where ``layer_types`` does not say."""
    if family.windows == "switched":
        if family.no_rope_interval is not None:
            return not rotated
        first = fields.integer("max_window_layers", 0, 1024) if "max_window_layers" in fields else family.max_window_layers
        return layer >= first
    if family.windows == "alternating":
        return layer % 2 == 0
    if family.windows == "pattern":
        pattern = fields.integer("sliding_window_pattern", 1, 1024) if "sliding_window_pattern" in fields else 6
        return (layer + 1) % pattern != 0
    return True


def _rotating(fields: Fields, family: Family, num_layers: int) -> list[bool]:
    """Which layers have a rotary embedding."""
    if family.no_rope_interval is None:
        return [True] * num_layers
    listed, interval = _SMOLLM3_FIELDS
    if listed in fields:
        # Named for layers without, and says 1 for those with.
        flags = fields.integers(listed, 0, 1)
        if len(flags) < num_layers:
            raise CheckpointError(f"{fields.origin}: field '{listed}' has {len(flags)} entries, expected num_hidden_layers ({num_layers})")
        return [bool(flag) for flag in flags[:num_layers]]
    every = fields.integer(interval, 1, 1024) if interval in fields else family.no_rope_interval
    return [(layer + 1) % every != 0 for layer in range(num_layers)]
