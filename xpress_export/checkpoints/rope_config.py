"""Rotary embedding of a config.json, in the old layout (``rope_theta``, ``rope_scaling``) or the new (``rope_parameters``).

It knows which parameters a kind takes and their ranges; what they do to the frequencies is transformers' (models/rope.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from xpress_export.checkpoints.families import Family
from xpress_export.checkpoints.locate import shown
from xpress_export.models.rope import SUPPORTED_ROPE_TYPES, Parameter, RopeConfig
from xpress_runtime.errors import CheckpointError
from xpress_runtime.fields import Fields

MAX_POSITIONS = 2**26
FULL, SLIDING = "full_attention", "sliding_attention"
PARTIAL = "partial_rotary_factor"


@dataclass(frozen=True)
class _Parameter:
    read: Callable[[Fields, str], Parameter]
    required: bool


def _number(minimum: float, maximum: float) -> Callable[[Fields, str], Parameter]:
    return lambda fields, name: fields.number(name, minimum, maximum)


def _factors(fields: Fields, name: str) -> tuple[float, ...]:
    return fields.numbers(name, 1e-3, 1e6)


_FACTOR = _Parameter(_number(1.0, 1e6), required=True)
_BAND = _Parameter(_number(1e-3, 1e6), required=False)
_SCALE = _Parameter(_number(0.0, 1e3), required=False)
# Cosines and sines are multiplied with it: 0 would leave nothing of queries and keys.
_ATTENTION = _Parameter(_number(1e-3, 1e3), required=False)
# Absent, transformers takes max_position_embeddings: allowed, and done by transformers itself.
_ORIGINAL = _Parameter(lambda fields, name: fields.integer(name, 1, MAX_POSITIONS), required=False)

PARAMETERS: Mapping[str, Mapping[str, _Parameter]] = {
    "default": {},
    "linear": {"factor": _FACTOR},
    "llama3": {
        "factor": _FACTOR,
        "low_freq_factor": _Parameter(_number(1e-3, 1e6), required=True),
        "high_freq_factor": _Parameter(_number(1e-3, 1e6), required=True),
        "original_max_position_embeddings": _ORIGINAL,
    },
    "yarn": {
        "factor": _FACTOR,
        "original_max_position_embeddings": _ORIGINAL,
        "attention_factor": _ATTENTION,
        "beta_fast": _BAND,
        "beta_slow": _BAND,
        "mscale": _SCALE,
        "mscale_all_dim": _SCALE,
        "truncate": _Parameter(lambda fields, name: fields.boolean(name), required=False),
    },
    "longrope": {
        "short_factor": _Parameter(_factors, required=True),
        "long_factor": _Parameter(_factors, required=True),
        "factor": _Parameter(_number(1.0, 1e6), required=False),
        "attention_factor": _ATTENTION,
        # Where the long factors begin.
        "original_max_position_embeddings": _Parameter(lambda fields, name: fields.integer(name, 2, MAX_POSITIONS), required=True),
    },
}
# Phi-3 was published with these names.
LONGROPE_ALIASES = ("su",)


def read_rope(fields: Fields, family: Family, head_dim: int, max_positions: int) -> RopeConfig:
    """The rotary embedding that a config describes; both layouts may be there when they agree.

    Gemma 3, whose layers with a window have one of their own, nests the new layout by kind of layer: this is that of the others.
    """
    nested = family.local_theta is not None
    described = []
    if fields.values.get("rope_scaling"):
        described.append(_read_parameters(fields.nested("rope_scaling"), fields, family))
    if fields.values.get("rope_parameters"):
        parameters = fields.nested("rope_parameters")
        if nested:
            _refuse_flat(parameters)
        if not nested or FULL in parameters:
            described.append(_read_parameters(parameters.nested(FULL) if nested else parameters, fields, family))
    kind, scaling = described[0][:2] if described else ("default", ())
    if any((kind, scaling) != other[:2] for other in described[1:]):
        raise CheckpointError(f"{fields.origin}: rope_scaling and rope_parameters contradict each other; remove the one that is stale")
    thetas = [theta for *_, theta in described if theta is not None]
    if "rope_theta" in fields:
        thetas.append(_theta(fields))
    elif len(thetas) == 1 and len(described) > 1 and not nested:
        # transformers looks at one of the two, and would assume a base where that one names none.
        raise CheckpointError(
            f"{fields.origin}: of rope_scaling and rope_parameters one alone names rope_theta; remove the one that is stale"
        )
    rotary_dim = _rotary_dim(fields, family, head_dim)
    rope = RopeConfig(rotary_dim, _agreed(fields, "rope_theta", thetas, family.theta), max_positions, kind, scaling)
    for name, value in scaling:
        if isinstance(value, tuple) and len(value) != rotary_dim // 2:
            raise CheckpointError(
                f"{fields.origin}: field '{name}' has {len(value)} numbers, expected {rotary_dim // 2}, one for each pair of dims"
            )
    return rope


def read_local_rope(fields: Fields, theta: float, head_dim: int, max_positions: int) -> RopeConfig:
    """The rotary embedding of Gemma 3's layers with a window: a base of their own, ``theta`` where none is named, and no scaling."""
    thetas = []
    if fields.values.get("rope_parameters") and SLIDING in (parameters := fields.nested("rope_parameters")):
        local = parameters.nested(SLIDING)
        for name in local:
            if name not in ("rope_theta", "rope_type", "type") or (name != "rope_theta" and local.values[name] not in (None, "default")):
                raise CheckpointError(
                    f"{local.origin}: field '{shown(name)}' ({shown(local.values[name])}) is not supported, expected a base alone"
                )
        if "rope_theta" in local:
            thetas.append(_theta(local))
    if "rope_local_base_freq" in fields:
        thetas.append(fields.number("rope_local_base_freq", 2.0, 1e12))
    return RopeConfig(head_dim, _agreed(fields, "rope_local_base_freq", thetas, theta), max_positions)


def _refuse_flat(parameters: Fields) -> None:
    for name in parameters:
        if name not in (FULL, SLIDING):
            raise CheckpointError(
                f"{parameters.origin}: field '{shown(name)}' is not supported, expected {FULL} and {SLIDING} with a base each"
            )


def _agreed(fields: Fields, name: str, thetas: list[float], default: float) -> float:
    if len(set(thetas)) > 1:
        raise CheckpointError(
            f"{fields.origin}: field '{name}' is given as {thetas[0]:g} and as {thetas[-1]:g}; remove the one that is stale"
        )
    return thetas[0] if thetas else default


def _rotary_dim(fields: Fields, family: Family, head_dim: int) -> int:
    """Dims of a head that are rotated."""
    if not family.reads_partial_rotary:
        return head_dim
    places = [fields] + [fields.nested(name) for name in ("rope_scaling", "rope_parameters") if fields.values.get(name)]
    factors = {place.number(PARTIAL, 1e-3, 1.0) for place in places if PARTIAL in place}
    if len(factors) > 1:
        raise CheckpointError(
            f"{fields.origin}: field '{PARTIAL}' is given as {' and as '.join(f'{factor:g}' for factor in sorted(factors))}"
        )
    rotary_dim = int(head_dim * factors.pop()) if factors else head_dim
    if rotary_dim < 2 or rotary_dim % 2:
        raise CheckpointError(
            f"{fields.origin}: field '{PARTIAL}' leaves {rotary_dim} of {head_dim} dims to rotate, expected an even number"
        )
    return rotary_dim


def _theta(fields: Fields) -> float:
    return fields.number("rope_theta", 2.0, 1e12)


def _read_parameters(rope: Fields, config: Fields, family: Family) -> tuple[str, tuple[tuple[str, Parameter], ...], float | None]:
    """Kind, scaling parameters and base of one of the two objects."""
    kinds = {rope.text(name) for name in ("rope_type", "type") if name in rope}
    if len(kinds) > 1:
        raise CheckpointError(f"{rope.origin}: rope_type and type differ ({shown(' and '.join(sorted(kinds)))})")
    kind = kinds.pop() if kinds else "default"
    kinds_here: tuple[str, ...] = SUPPORTED_ROPE_TYPES
    if family.reads_partial_rotary:
        # Phi-3's class knows no other.
        kinds_here = ("default", "longrope")
        kind = "longrope" if kind in LONGROPE_ALIASES else kind
    if kind not in kinds_here:
        raise CheckpointError(f"{rope.origin}: rope type '{shown(kind)}' is not supported, expected {', '.join(kinds_here)}")
    parameters = PARAMETERS[kind]
    for name in rope:
        known = name in parameters or name in ("rope_type", "type", "rope_theta")
        # 1 is what its absence means.
        neutral = rope.values[name] is None or (name == PARTIAL and (family.reads_partial_rotary or rope.values[name] == 1))
        if not known and not neutral:
            raise CheckpointError(f"{rope.origin}: field '{shown(name)}' ({shown(rope.values[name])}) is not supported for type '{kind}'")
    scaling: dict[str, Parameter] = {}
    for name, parameter in parameters.items():
        if name == "original_max_position_embeddings" and name in config:
            # As transformers reads it: beside the scaling parameters it outranks the one among them.
            scaling[name] = parameter.read(config, name)
        elif parameter.required or name in rope:
            scaling[name] = parameter.read(rope, name)
    _check_order(rope, scaling, "low_freq_factor", "high_freq_factor")
    _check_order(rope, scaling, "beta_slow", "beta_fast")
    return kind, tuple(sorted(scaling.items())), _theta(rope) if "rope_theta" in rope else None


def _check_order(rope: Fields, scaling: Mapping[str, Parameter], low: str, high: str) -> None:
    smaller, larger = scaling.get(low), scaling.get(high)
    if isinstance(smaller, float) and isinstance(larger, float) and smaller >= larger:
        raise CheckpointError(f"{rope.origin}: field '{low}' is {smaller:g}, expected less than {high} ({larger:g})")
