"""Weight forms of published quantised checkpoints, as a device reads them: y[N, out] = x[N, in] @ W[out, in]^T + bias.

Three forms are weight-only: a tile of the matrix becomes numbers inside the kernel and meets the rows as they are (rounded to bfloat16
for the tensor cores). `Int8Weight` quantises the rows too. Loaders bring every published layout into one of these; on the CPU
they are turned into the two forms of the package above (`kernels.linear`), which its kernels read.

Integers, weight-only (GPTQ: Frantar et al. 2022; AWQ: Lin et al. 2023)   W = scale * (code - zero)         `GroupWeight`
8-bit floats (Micikevicius et al. 2022)                                   W = scale * e4m3                  `Float8Weight`
4-bit floats, shared powers of two (OCP Microscaling 1.0)                 W = 2^(exponent - 127) * e2m1     `MxWeight`
8-bit integers times 8-bit rows (SmoothQuant: Xiao et al. 2022)           W = scale * code                  `Int8Weight`

The last one's arithmetic is part of the contract: per row a = max|x| / 127 (0 gives codes 0), q = round_half_even(x / a), and
y = (scale * a) * dot(code, q) + bias with an exact integer dot, so a row's bits depend on nothing but the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MX_BLOCK = 32  # values that share one exponent
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # value of the three low bits; bit 3 is the sign
INT8_LARGEST = 127.0


@dataclass(frozen=True, slots=True)
class GroupWeight:
    """W[o, order[j]] = scale[g, o] * (code[o, j] - zero[g, o]) with g = j // group.

    `order` is for checkpoints whose columns were quantised in order of importance (GPTQ's desc_act): stored columns lie
    group by group, and column j multiplies x[order[j]].
    """

    bits: int  # 4 or 8
    codes: torch.Tensor  # uint8 [out, in * bits / 8]; 4 bits: byte j holds column 2j in its low and 2j + 1 in its high nibble
    scale: torch.Tensor  # [groups, out] float16, bfloat16 or float32
    zero: torch.Tensor  # [groups, out] int16
    group: int  # columns of a group; the last one may be shorter
    order: torch.Tensor | None = None  # int32 [in]; None: column j multiplies x[j]
    bias: torch.Tensor | None = None  # [out] float32

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        return self.codes.shape[1] * 8 // self.bits


@dataclass(frozen=True, slots=True)
class Float8Weight:
    """W[o, i] = scale[o // rows, i // columns] * values[o, i]. One scale: rows = out, columns = in; one a row: rows = 1."""

    values: torch.Tensor  # float8_e4m3fn [out, in]
    scale: torch.Tensor  # float32 [ceil(out / rows), ceil(in / columns)]
    rows: int
    columns: int
    bias: torch.Tensor | None = None  # [out] float32

    @property
    def out_features(self) -> int:
        return self.values.shape[0]

    @property
    def in_features(self) -> int:
        return self.values.shape[1]


@dataclass(frozen=True, slots=True)
class MxWeight:
    """W[o, i] = 2^(exponent[o, i // 32] - 127) * e2m1(code[o, i]); `in` is a multiple of 32."""

    codes: torch.Tensor  # uint8 [out, in / 2]; byte j holds column 2j in its low and 2j + 1 in its high nibble
    exponent: torch.Tensor  # uint8 [out, in / 32], 0..254
    bias: torch.Tensor | None = None  # [out] float32

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        return self.codes.shape[1] * 2


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """W[o, i] = scale[o] * codes[o, i]; the rows of x are quantised to 8 bits, one step a row. See the package's head."""

    codes: torch.Tensor  # int8 [out, in], -127..127
    scale: torch.Tensor  # float32 [out]
    bias: torch.Tensor | None = None  # [out] float32

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        return self.codes.shape[1]


PublishedWeight = GroupWeight | Float8Weight | MxWeight | Int8Weight

_LEAST_STEP, _MOST_STEP = 16, 64  # columns of one product on tensor cores


def step_columns(weight: PublishedWeight) -> int:
    """Columns that a device multiplies at once, a power of two that never leaves a group. 0: its groups allow none that a device takes."""
    if isinstance(weight, MxWeight):
        return MX_BLOCK
    group = weight.in_features
    if isinstance(weight, GroupWeight):
        group = weight.group
    elif isinstance(weight, Float8Weight):
        group = weight.columns
    step = _MOST_STEP if group >= weight.in_features else min(_MOST_STEP, group & -group)
    return step if step >= _LEAST_STEP else 0
