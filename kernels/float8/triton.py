"""8-bit floats taken apart and put together by integer operations: the same on every device, and in the interpreter."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def from_e4m3(raw):
    """int32 codes 0..255 -> float32, exactly."""
    tiny = (raw & 7).to(tl.float32) * 0.001953125  # exponent 0 counts in 2^-9
    usual = (((raw & 0x7F) << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    size = tl.where((raw & 0x78) == 0, tiny, usual)
    size = tl.where((raw & 0x7F) == 0x7F, float("nan"), size)
    return tl.where((raw & 0x80) != 0, -size, size)


@triton.jit
def to_e4m3(x):
    """float32 -> uint8 codes, to nearest, halves to even; too large becomes 448, NaN stays NaN."""
    number = tl.where(x == x, x, 0.0)
    bits = number.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Below 2^-6 the step is 2^-9. Adding 1.5 * 2^23 leaves no room for a fraction.
    tiny = ((tl.minimum(tl.abs(number), 1.0) * 512.0 + 12582912.0) - 12582912.0).to(tl.int32)
    # Half a step less one, and one more where the kept part is odd; carries go into the exponent as they should.
    usual = ((size >> 20) + (((size & 0xFFFFF) + 0x7FFFF + ((size >> 20) & 1)) >> 20)) - (120 << 3)
    code = tl.where(tl.abs(number) < 0.015625, tiny, tl.minimum(usual, 0x7E))
    code = tl.where(x == x, code, 0x7F) | ((bits >> 24) & 0x80)
    return code.to(tl.uint8)


@triton.jit
def rounded(x, pointer):
    """float32 as the store behind `pointer` keeps it: bytes mean e4m3."""
    if pointer.dtype.element_ty == tl.uint8:
        return to_e4m3(x)
    return x.to(pointer.dtype.element_ty)
