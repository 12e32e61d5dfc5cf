"""tree_attention: attention of every node to the committed keys of its row and to its own ancestors, itself included.

tree_attention(q [N, Hq, D] float32, store_k [pages, Hkv, D, page_size], store_v [pages, Hkv, page_size, D],
               inputs: StepInputs, scale: float, window: int | None) -> out [N, Hq, D] float32

One layer; K and V of this step's nodes are already in the store. Query head h reads key/value head h // (Hq / Hkv).
Keys of node i of row s are, in order of absolute position: logical indices 0 .. kv_lens[s]-1, then (causal row) kv_lens[s] ..
kv_lens[s]+i, or (tree row) kv_lens[s]+j for every set bit j of words[i], ascending (parent before child, so ascending j is
ascending depth). The key at absolute position p takes part with the same arithmetic, in the same grouping by p, whatever
slot it lies in, so a token computed alone, in a chunk or in a tree gets the same bits. `window` keeps the last `window` positions.

A store of bytes (kernels/whole_store) has keys n_k with steps k, values n_v with steps v. A query is whole as a linear layer's row is,
q ~ a * n_q, a score s = (k * (a * log2 e)) * float(n_q . n_k). With the softmax's weights w = 2^(s - largest score) of the CHUNK positions
that begin at a multiple of it, w * v is whole likewise, ~ b * n_w, and the chunk's sum is b * float(sum n_w n_v); chunks are joined in
ascending order, and the mass is the sum of the w themselves.
"""

CHUNK = 128  # positions; kChunk in plan.h
