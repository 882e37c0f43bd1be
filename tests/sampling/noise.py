"""The noise of a token in Python's integers, which have no width, and double precision: what fp32 graphs must come close to."""

from __future__ import annotations

import math
from collections.abc import Sequence

PRIME = 2**30 - 35
# The decimals of pi, nine from every third place on.
_PI = "314159265358979323846264338327950288419716939937510"
_CONSTANTS = [int(_PI[3 * index : 3 * index + 9]) for index in range(8)]
_UNKEYED = (0, 0, 0, 0)


def permuted(value: int, key: Sequence[int]) -> tuple[int, ...]:
    """Four numbers below PRIME: eight rounds of "add the round's key, cube", each number beginning at another of the key's."""
    results = []
    for first in range(4):
        state = value
        for index, constant in enumerate(_CONSTANTS):
            state = pow(state + (key[(first + index) % 4] + constant) % PRIME, 3, PRIME)
        results.append(state)
    return tuple(results)


def coefficients(key: Sequence[int], position: int, slot: int) -> tuple[int, ...]:
    return permuted(512 * position + slot, key)


def value(polynomial: Sequence[int], token: int) -> int:
    """The cubic at the token's point."""
    point = permuted(token + 1, _UNKEYED)[0]
    return sum(coefficient * point**power for power, coefficient in enumerate(polynomial)) % PRIME


def exponential(number: int) -> float:
    return -math.log1p(-(number + 0.5) / PRIME)


def gumbel(number: int) -> float:
    return -math.log(exponential(number))
