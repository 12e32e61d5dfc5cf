"""tree_accept: walk each row's tree along the tokens the target chose.

tree_accept(input_ids [N] int32, target_ids [N] int32, parents [N] int32 (row-local, root -1), row_ptr [S+1] int32,
            max_depth: int) -> (path [S, max_depth] int32, num_accepted [S] int32, next_ids [S] int32)

Starting at the root, while the current node has a child whose input id equals the current node's target id, go there (the
first such child). `path` lists the accepted nodes (row-local indices, root not listed, padded with -1); `next_ids` is the
target id at the last accepted node.
"""
