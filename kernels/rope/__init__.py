"""rope: rotary position embedding (Su et al. 2021), halves convention: channel i pairs with i + D/2.

rope(x [N, H, D] float32, positions [N] int32, cos [max_position, D/2] float32, sin [max_position, D/2] float32) -> [N, H, D]
"""
