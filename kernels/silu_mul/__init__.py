"""silu_mul: silu_mul(gate [N, I] float32, up [N, I] float32) -> gate / (1 + exp(-gate)) * up (SwiGLU, Shazeer 2020).

A row's bits depend on that row only.
"""
