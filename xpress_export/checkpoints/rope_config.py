"""Rotary embedding of a config.json, in the old layout (``rope_theta``, ``rope_scaling``) or the new (``rope_parameters``).

It knows which parameters a kind takes and their ranges; what they do to the frequencies is transformers' (models/rope.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from xpress_export.checkpoints.locate import shown
from xpress_export.models.rope import SUPPORTED_ROPE_TYPES, RopeConfig
from xpress_runtime.errors import CheckpointError
from xpress_runtime.fields import Fields

# What transformers' config classes assume when a config names no base.
DEFAULT_THETA = 10_000.0
MAX_POSITIONS = 2**26

Number = float | int | bool


@dataclass(frozen=True)
class _Parameter:
    read: Callable[[Fields, str], Number]
    required: bool


def _number(minimum: float, maximum: float) -> Callable[[Fields, str], Number]:
    return lambda fields, name: fields.number(name, minimum, maximum)


_FACTOR = _Parameter(_number(1.0, 1e6), required=True)
_BAND = _Parameter(_number(1e-3, 1e6), required=False)
_SCALE = _Parameter(_number(0.0, 1e3), required=False)
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
        "attention_factor": _SCALE,
        "beta_fast": _BAND,
        "beta_slow": _BAND,
        "mscale": _SCALE,
        "mscale_all_dim": _SCALE,
        "truncate": _Parameter(lambda fields, name: fields.boolean(name), required=False),
    },
}


def read_rope(fields: Fields, head_dim: int, max_positions: int) -> RopeConfig:
    """The rotary embedding that a config describes; both layouts may be there when they agree."""
    described = [_read_parameters(fields.nested(name), fields) for name in ("rope_scaling", "rope_parameters") if fields.values.get(name)]
    kind, scaling = described[0][:2] if described else ("default", {})
    if any((kind, scaling) != other[:2] for other in described[1:]):
        raise CheckpointError(f"{fields.origin}: rope_scaling and rope_parameters contradict each other; remove the one that is stale")
    thetas = [theta for *_, theta in described if theta is not None]
    if "rope_theta" in fields:
        thetas.append(_theta(fields))
    if len(set(thetas)) > 1:
        raise CheckpointError(
            f"{fields.origin}: field 'rope_theta' is given as {thetas[0]:g} and as {thetas[-1]:g}; remove the one that is stale"
        )
    theta = thetas[0] if thetas else DEFAULT_THETA
    return RopeConfig(head_dim=head_dim, theta=theta, max_positions=max_positions, rope_type=kind, scaling=scaling)


def _theta(fields: Fields) -> float:
    return fields.number("rope_theta", 2.0, 1e12)


def _read_parameters(rope: Fields, config: Fields) -> tuple[str, dict[str, Number], float | None]:
    """Kind, scaling parameters and base of one of the two objects."""
    kinds = {rope.text(name) for name in ("rope_type", "type") if name in rope}
    if len(kinds) > 1:
        raise CheckpointError(f"{rope.origin}: rope_type and type differ ({shown(' and '.join(sorted(kinds)))})")
    kind = kinds.pop() if kinds else "default"
    if kind not in SUPPORTED_ROPE_TYPES:
        raise CheckpointError(f"{rope.origin}: rope type '{shown(kind)}' is not supported, expected {', '.join(SUPPORTED_ROPE_TYPES)}")
    parameters = PARAMETERS[kind]
    for name in rope:
        known = name in parameters or name in ("rope_type", "type", "rope_theta")
        # 1 is what its absence means.
        neutral = rope.values[name] is None or (name == "partial_rotary_factor" and rope.values[name] == 1)
        if not known and not neutral:
            raise CheckpointError(f"{rope.origin}: field '{shown(name)}' ({shown(rope.values[name])}) is not supported for type '{kind}'")
    scaling: dict[str, Number] = {}
    for name, parameter in parameters.items():
        if name == "original_max_position_embeddings" and name in config:
            # As transformers reads it: beside the scaling parameters it outranks the one among them.
            scaling[name] = parameter.read(config, name)
        elif parameter.required or name in rope:
            scaling[name] = parameter.read(rope, name)
    _check_order(rope, scaling, "low_freq_factor", "high_freq_factor")
    _check_order(rope, scaling, "beta_slow", "beta_fast")
    return kind, scaling, _theta(rope) if "rope_theta" in rope else None


def _check_order(rope: Fields, scaling: Mapping[str, Number], low: str, high: str) -> None:
    if low in scaling and high in scaling and scaling[low] >= scaling[high]:
        raise CheckpointError(f"{rope.origin}: field '{low}' is {scaling[low]:g}, expected less than {high} ({scaling[high]:g})")
