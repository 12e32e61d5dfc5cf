// rope: rotation of one head, halves convention. The formula is in __init__.py beside this file.
#pragma once

#include "lanes.h"

namespace fs::FS_ISA {

// x[0..d) -> out[0..d), scaled; out may be x. cos and sin are the d / 2 entries of the position.
inline void rope_head(const float* x, const float* cos, const float* sin, int d, float scale, float* out) {
    const int half = d / 2;
    const F s = set1(scale);
    for (int i = 0; i < half; i += 16) {
        const int n = half - i;
        const F a = load_part(x + i, n), b = load_part(x + half + i, n);
        const F c = load_part(cos + i, n), t = load_part(sin + i, n);
        const F first_half = sub(mul(a, c), mul(b, t));
        const F second_half = add(mul(b, c), mul(a, t));
        store_part(out + i, mul(first_half, s), n);
        store_part(out + half + i, mul(second_half, s), n);
    }
}

}  // namespace fs::FS_ISA
