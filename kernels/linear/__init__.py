"""linear: y[N, out] = x[N, in] @ W[out, in]^T + bias, and the weight forms it takes.

Promise of every implementation: row i of y depends on row i of x and on W only, bit for bit, whatever N is.

Quantised arithmetic (weights in `BlockWeight`), all in whole numbers of two bytes by one byte:

- A row of x has one step, ``a = max|x| / LARGEST`` (rows whose values are all below `LEAST` count as zeros, with step 0), and codes
  ``q = round_half_even(x * (LARGEST / max|x|))``, taken apart as ``q = 256 * high + low`` with both parts within -127..127: a
  code whose low part would be -128 is one larger.
- A row of W has one step, ``s = max|w| / 127``, and one byte per input. With 8 bits that is ``w / s`` to nearest, half to even. With 4 bits it
  is looked up by the code c in a table per block: ``(c * factor + offset) >> 8`` with ``factor = round(scale / s * 256)`` and
  ``offset = round(minimum / s * 256) + 128``: within 0.53 of ``(scale * c + minimum) / s``. max|w| is then the largest that the row's
  tables can hold, at code 0 or code 15. The matrix itself is never stored but with 4 bits.
- ``y = (s * a) * (256 * sum(byte * high) + sum(byte * low))``: the sums are exact in any order, which is why a row's bits cannot depend on
  its neighbours, the instruction set or the number of threads; each becomes a float32 once, and nothing
  behind them is fused.

The sums have 32 bits, which hold 65,536 inputs of the largest numbers; C++ refuses wider matrices. A row of x that holds an infinity or a NaN gives NaN everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.linear.formats import PublishedWeight

BLOCK = 32
LARGEST = 256 * 127 + 127  # largest code of a row
LEAST = 2.0**-100  # rows of smaller values count as zeros
TABLE_SHIFT = 8  # fraction bits of factor and offset


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

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        return self.codes.shape[1] * BLOCK


Weight = DenseWeight | BlockWeight  # every implementation reads these, and the vocabulary's matrices are always one of them
LayerWeight = Weight | PublishedWeight  # a layer's matrix: the published forms of `kernels.linear.formats` too, not in C++
