"""Noise that is a function of what it is for: request, place in the text, slot of the block, token. Nothing is drawn, so nothing is stored.

For each (request key, position, slot) a keyed permutation of the integers below a prime gives four coefficients; the noise of a token is
the cubic polynomial with these coefficients at the token's own point. A random cubic makes any four of its values independent and uniform,
and the points are scattered, so that neighbouring ids share no pattern. All of it is integer arithmetic that every backend has and computes
exactly: products stay below 2^63.

Sizes: B rows, S slots, V vocabulary, C candidates. Knows nothing about what the noise decides.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from xpress_runtime.sampling import KEY_NUMBERS, NOISE_PRIME

# Cubing permutes the integers below it, since 3 does not divide PRIME - 1.
PRIME = NOISE_PRIME
NUM_COEFFICIENTS = KEY_NUMBERS
_NUM_ROUNDS = 8
# A counter is position · _SLOTS + slot. Slot 0 is the token that follows the accepted drafts, 1 … P-1 are the drafted ones (P ≤ 256).
_SLOTS = 512
FINAL_SLOT = 0
# The uniform number that slot k is accepted or rejected with has slot ACCEPTANCE_SLOT + k.
ACCEPTANCE_SLOT = 256
# Digits of pi: round constants with nothing up the sleeve.
_DIGITS = "31415926535897932384626433832795028841971693993751058209749445923078164062862089986280348253421170679"
_CONSTANTS = [int(_DIGITS[3 * i : 3 * i + 9]) for i in range(_NUM_ROUNDS)]
# Below, -log(1 - u) is taken from its series: 1 - u has lost the digits that tell small values apart.
_SMALL = 2.0**-10
_LARGEST = 1 - 2.0**-24


def permuted(values: Tensor, keys: Tensor) -> Tensor:
    """values [..., n] below PRIME, keys [..., 4] below PRIME → [..., n, 4]: four keyed permutations of each value."""
    state = values[..., None]
    for index, constant in enumerate(_CONSTANTS):
        turned = torch.cat([keys[..., index % 4 :], keys[..., : index % 4]], dim=-1)
        moved = state + ((turned + constant) % PRIME)[..., None, :]
        state = moved * moved % PRIME * moved % PRIME
    return state


class TokenNoise(nn.Module):
    """Noise for every token of a vocabulary."""

    points: Tensor
    squares: Tensor
    cubes: Tensor

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        points = permuted(torch.arange(1, vocab_size + 1), torch.zeros(NUM_COEFFICIENTS, dtype=torch.int64))[:, 0]
        squares = points * points % PRIME
        self.register_buffer("points", points)
        self.register_buffer("squares", squares)
        self.register_buffer("cubes", squares * points % PRIME)

    def coefficients(self, noise_key: Tensor, position: Tensor, slots: Tensor) -> Tensor:
        """noise_key [B, 4], position [B] (the anchor's), slots [S], all int64 → [B, S, 4] int64."""
        return permuted(position[:, None] * _SLOTS + slots[None, :], noise_key)

    def exponential(self, coefficients: Tensor, candidates: Tensor | None = None) -> Tensor:
        """coefficients [B, S, 4] → Exponential(1) noise [B, S, V], or [B, S, C] of the ``candidates``' token ids."""
        first, second, third, fourth = (coefficients[..., index, None] for index in range(NUM_COEFFICIENTS))
        points, squares, cubes = (table if candidates is None else table[candidates] for table in (self.points, self.squares, self.cubes))
        value = (first + second * points + third * squares + fourth * cubes) % PRIME
        uniform = _uniform(value)
        return torch.where(uniform < _SMALL, uniform + 0.5 * uniform * uniform, -torch.log(1 - uniform))

    def gumbel(self, coefficients: Tensor, candidates: Tensor | None = None) -> Tensor:
        """As :meth:`exponential`, Gumbel(0, 1): the argmax of logits + noise is a draw from their softmax."""
        return -torch.log(self.exponential(coefficients, candidates))

    def draw(
        self, logits: Tensor, slot: Tensor, noise_key: Tensor, position: Tensor, inverse_temperature: Tensor, sampled: Tensor
    ) -> Tensor:
        """Logits [B, 1, V] of one ``slot`` [1] → token [B, 1]: drawn, or the best in rows of ``sampled`` [B] = 0."""
        noise = self.gumbel(self.coefficients(noise_key, position, slot)) * sampled[:, None, None].float()
        return (logits * inverse_temperature[:, None, None] + noise).argmax(dim=-1)


def uniform_of(coefficients: Tensor) -> Tensor:
    """coefficients [B, S, 4] → one number over 0 and below 1 each, [B, S] fp32."""
    return _uniform(coefficients[..., 0])


def _uniform(value: Tensor) -> Tensor:
    # fp32 has 24 digits, most of them where they matter: near 0.
    return ((value.float() + 0.5) * (1 / PRIME)).clamp(max=_LARGEST)


class BlockNoise:
    """The frozen noise of one drafted block: the same for the seed and for every pass.

    ``inverse_temperature`` [B] fp32; ``sampled`` [B] int64: rows with 0 are greedy, to the last bit (inverse temperature 1, noise 0).
    """

    def __init__(
        self, noise: TokenNoise, noise_key: Tensor, position: Tensor, inverse_temperature: Tensor, sampled: Tensor, block_size: int
    ) -> None:
        self._noise = noise
        slots = torch.arange(1, block_size, device=position.device)
        self._coefficients = noise.coefficients(noise_key, position, slots)
        self._inverse_temperature = inverse_temperature[:, None, None]
        self._sampled = sampled[:, None, None].float()
        self._drawn: dict[tuple[int, int], Tensor] = {}

    def scale(self, scores: Tensor) -> Tensor:
        """Logits [B, S, V or C] over the temperature: what q is the softmax of."""
        return scores * self._inverse_temperature

    def perturb(self, scores: Tensor, slots: slice, candidates: Tensor | None = None) -> Tensor:
        """Logits of the 0-based ``slots`` [B, S, V], or [B, S, C] of their ``candidates``, scaled and with the slots' noise."""
        key = (slots.start, slots.stop)
        if key not in self._drawn:
            self._drawn[key] = self._noise.gumbel(self._coefficients[:, slots], candidates) * self._sampled
        return self.scale(scores) + self._drawn[key]
