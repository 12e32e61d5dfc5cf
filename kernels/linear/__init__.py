"""linear: y[N, out] = x[N, in] @ W[out, in]^T + bias, and the weight forms it takes.

Promise of every implementation: row i of y depends on row i of x and on W only, bit for bit, whatever N is.

Quantised arithmetic (weights in `BlockWeight`): each row of x is cut into blocks of 32; per block
``a = max|x| / LARGEST[activation_bits]`` (0 gives codes 0), ``q = round_half_even(x / a)`` as an integer, ``sum = sum(q)``. With weight codes c,
scale d and minimum m of the same block: ``y += (d * a) * dot(c, q) + m * (a * sum)``, blocks in ascending order in
float32. The dot product is an exact integer of 32 bits, rounded once when it becomes a float.

Activations have 8 bits, or more where a matrix is worth it, as two parts of one byte, so that the same byte products give the exact
dot. 16 bits: ``q = 255 * high + low`` with both parts within -127..127. 12 bits, for weights of 4 bits: ``q = 16 * high + low`` with low in
-8..7; ``16 * c`` is still a byte, so ``dot(16 c, high) + dot(c, low)`` is one product of twice the length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.linear.formats import PublishedWeight

BLOCK = 32
LARGEST = {8: 127, 12: 127 * 16 + 7, 16: 255 * 127 + 127}  # largest activation code by activation_bits


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A plain matrix. dtype float32, bfloat16 or float16; accumulation is float32 in one fixed order."""

    values: torch.Tensor  # [out, in]
    bias: torch.Tensor | None = None  # [out] float32

    @property
    def out_features(self) -> int:
        return self.values.shape[0]

    @property
    def in_features(self) -> int:
        return self.values.shape[1]


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A matrix in blocks of 32 along `in`: value = scale * code + minimum. `in` is a multiple of 32.

    bits 4: codes uint8 [out, in/32, 16]; byte j holds element j in its low and element j+16 in its high nibble, 0..15.
    bits 8: codes uint8 [out, in/32, 32], 0..255 (a signed int8 weight w of scale d is stored as w + 128 with minimum -128 d).
    """

    bits: int  # 4 or 8
    codes: torch.Tensor  # uint8, see above
    scale: torch.Tensor  # [out, in/32] float16
    minimum: torch.Tensor  # [out, in/32] float16 (bits 4) or float32
    bias: torch.Tensor | None = None  # [out] float32
    activation_bits: int = 8  # 8, 16 or, with 4-bit codes, 12: how finely the rows of x are quantised

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        return self.codes.shape[1] * BLOCK


Weight = DenseWeight | BlockWeight  # every implementation reads these, and the vocabulary's matrices are always one of them
LayerWeight = Weight | PublishedWeight  # a layer's matrix: the published forms of `kernels.linear.formats` too, not in C++
