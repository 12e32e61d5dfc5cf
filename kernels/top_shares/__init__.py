"""top_shares: the k most probable tokens of each row of logits and their probabilities; what a drafter asks of its own scores.

top_shares(logits [R, V] float32, k, temperature [R] float32 > 0 or None = 1 everywhere)
    -> token ids [R, k] int32 and shares [R, k] float32, both best first, ties in any order

share = exp((logit - max) / temperature) / sum of the same over the row, -inf logits counting as 0. A row with NaN or +inf, or without a
finite logit, has NaN shares. k is at most V. Drafts need no bitwise promises, so versions may differ in the last bits.
"""
