"""Whether Triton kernels are interpreted here. Knows Triton's two kernel classes; refuses to know any kernel."""

from __future__ import annotations

import triton


def interpreted(kernel: object) -> bool:
    """True where `kernel` runs in Triton's interpreter. Its tl.dot multiplies bfloat16's bit patterns as integers, so kernels
    widen such operands first when this is so.
    """
    return not isinstance(kernel, triton.JITFunction)
