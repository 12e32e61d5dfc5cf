"""Uniform numbers that are a pure function of who asks: (seed, position, stream, index, step). Knows no state and no tensors.

A generator object would have to be advanced in step with the text, and rejected drafts, preemption or a resume would shift
it. A counter-based function cannot shift: the number of one absolute position is the same however a step came to ask for it.

The function is Philox4x64-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011), which passes
BigCrush; the seed is the key and the four other arguments are the counter, so no two questions share noise.
"""

from __future__ import annotations

from typing import Final

DRAW: Final = 0  # the target's own token at a position (exact rule): index and step are 0
TEST: Final = 1  # accept or reject a drafted node (rejection rule)
RESIDUAL: Final = 2  # the token drawn where a step under the rejection rule ends
DRAFT: Final = 3  # a drafter's own draws; index tells siblings (and drafters) apart

_WORD: Final = (1 << 64) - 1
_ROUNDS: Final = 10
_MULTIPLIER_0: Final = 0xD2E7470EE14C6C93
_MULTIPLIER_1: Final = 0xCA5A826395121157
_WEYL_0: Final = 0x9E3779B97F4A7C15  # golden ratio
_WEYL_1: Final = 0xBB67AE8584CAA73B  # sqrt(3) - 1


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x64-10: four 64-bit words out of four counter words under two key words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        low, high = _MULTIPLIER_0 * c0, _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (high >> 64) ^ c1 ^ k0, high & _WORD, (low >> 64) ^ c3 ^ k1, low & _WORD
        k0, k1 = (k0 + _WEYL_0) & _WORD, (k1 + _WEYL_1) & _WORD
    return c0, c1, c2, c3


def uniform(seed: int, position: int, stream: int = DRAW, index: int = 0, step: int = 0) -> float:
    """A float64 in [0, 1) with 53 random bits.

    `position` is the absolute index (prompt included) of the token being decided. `step` is the sequence length at the step's
    root: under the rejection rule one position can be drafted and tested in several steps, and what became of it in an earlier
    one says something about the noise used there, so every step gets fresh noise. Any seed is taken modulo 2**64.
    """
    word = philox((position & _WORD, stream & _WORD, index & _WORD, step & _WORD), (seed & _WORD, 0))[0]
    return (word >> 11) * 2.0**-53
