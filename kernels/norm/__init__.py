"""norm: rms_norm(x [..., H] float32, weight [H] float32, eps) -> x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich 2019).

add_rms_norm(x, residual, weight, eps) -> (normed, x + residual): the fused neighbour. A row's sum order is fixed.
"""
