"""whole_store: keys and values as bytes with one float32 step per token and head. The form and its arithmetic; every op reads it here.

A vector x of D channels (of one token and head) is kept as whole numbers n in -127..127 and a step, x ~ step * n:
    largest = max |x|;  step = largest / 127;  n = x * (127 / largest), to nearest, half to even
A vector whose largest value is below 2^-100 has step 0 and numbers 0; one that is not finite has step NaN and numbers 0.

Bytes are n + 128, as the linear layer keeps its weights. 16 tokens of one head are a block: what one instruction of a vector or matrix unit
reads is one line of 64 bytes.
    keys    [D/4][16 tokens][4 channels] bytes, then 16 steps: 16 tokens are to a query what 16 outputs of a matrix are to a row
    values  [4][D][4 tokens] bytes, then 16 steps: 16 channels are the outputs, tokens the inputs
    store_k, store_v uint8 [pages, Hkv, page_size/16, 16 * (D + 4)] of one layer
so a page holds whole blocks and D is a multiple of 4. Beyond 512 channels a score would not be a whole number of 32 bits.
"""

BLOCK = 16  # tokens
MOST_CHANNELS = 512


def why_not(head_dim: int, page_size: int) -> str | None:
    """Why heads of that size cannot be kept as bytes in such pages; None when they can."""
    if page_size % BLOCK:
        return f"keys and values of 8 bits need pages of {BLOCK}, {2 * BLOCK}, ... tokens, not {page_size}"
    if head_dim % 4 or not 0 < head_dim <= MOST_CHANNELS:
        return f"keys and values of 8 bits need heads of a multiple of 4 and at most {MOST_CHANNELS} channels, not {head_dim}"
    return None
