"""sample: one token per row of logits, from the processed distribution, with a given uniform number.

sample(logits [R, V] float32, temperature [R] float32, top_k [R] int32 (0 = off), top_p [R] float32, min_p [R] float32,
       uniforms [R] float64 in [0, 1)) -> token ids [R] int32
probabilities(same without uniforms) -> [R, V] float32, the processed distribution itself (rejection rule, tests)

Per row: temperature 0 (or so small that 1 / temperature is not finite in float32) = argmax, lowest id on ties. Otherwise
p = softmax((logits - max) / temperature); min_p keeps p >= min_p * max(p); top_k keeps the k best (ties: lower id first);
top_p keeps the shortest run of the best (ties: lower id first) whose mass, relative to what min_p and top_k left, reaches
top_p; at least one token always stays. The draw: tokens kept, in ascending id order, cumulative mass in float64, the
first token whose cumulative mass exceeds uniform * total. -inf logits are never drawn. A row's result depends on that row only.
"""
