// tree_accept: walk each row's tree along the tokens the target chose. The contract is in __init__.py beside this file.
#pragma once

#include <cstdint>

#include "lanes.h"

namespace fs::FS_ISA {

inline void tree_accept_rows(const int32_t* input_ids, const int32_t* target_ids, const int32_t* parents, const int32_t* row_ptr, int rows,
                             int max_depth, int32_t* path, int32_t* num_accepted, int32_t* next_ids) {
    for (int s = 0; s < rows; ++s) {
        const int base = row_ptr[s], nodes = row_ptr[s + 1] - base;
        int32_t* row_path = path + static_cast<size_t>(s) * static_cast<size_t>(max_depth);
        for (int i = 0; i < max_depth; ++i) row_path[i] = -1;
        int current = 0, depth = 0;
        // A parent comes before its children, so one pass over the nodes meets the path in order.
        for (int child = 1; child < nodes && depth < max_depth; ++child) {
            if (parents[base + child] == current && input_ids[base + child] == target_ids[base + current]) {
                row_path[depth++] = child;
                current = child;
            }
        }
        num_accepted[s] = depth;
        next_ids[s] = target_ids[base + current];
    }
}

}  // namespace fs::FS_ISA
