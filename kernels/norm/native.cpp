// norm: RMSNorm of one row. The formula is in __init__.py beside this file.
#pragma once

#include <cmath>

#include "lanes.h"

namespace fs::FS_ISA {

// Sum of squares: four lane sets taken in turn, then folded ((0 + 1) + (2 + 3)), then lanes folded in halves.
inline float sum_of_squares(const float* x, int n) {
    F sum[4] = {zero(), zero(), zero(), zero()};
    int i = 0;
    for (int j = 0; i + 16 <= n; i += 16, j = (j + 1) & 3) {
        const F v = load(x + i);
        sum[j] = fma(v, v, sum[j]);
    }
    if (i < n) {
        const F v = load_part(x + i, n - i);
        const int j = (i / 16) & 3;
        sum[j] = fma(v, v, sum[j]);
    }
    return reduce_add(add(add(sum[0], sum[1]), add(sum[2], sum[3])));
}

// out may be x.
inline void rms_norm_row(const float* x, const float* weight, int n, float eps, float* out) {
    const float mean = sum_of_squares(x, n) / static_cast<float>(n);
    const F scale = set1(1.0f / std::sqrt(mean + eps));
    int i = 0;
    for (; i + 16 <= n; i += 16) store(out + i, mul(mul(load(x + i), scale), load(weight + i)));
    if (i < n) store_part(out + i, mul(mul(load_part(x + i, n - i), scale), load_part(weight + i, n - i)), n - i);
}

// residual_out = x + residual, out = rms_norm(residual_out).
inline void add_rms_norm_row(const float* x, const float* residual, const float* weight, int n, float eps, float* out, float* residual_out) {
    for (int i = 0; i < n; i += 16) store_part(residual_out + i, add(load_part(x + i, n - i), load_part(residual + i, n - i)), n - i);
    rms_norm_row(residual_out, weight, n, eps, out);
}

}  // namespace fs::FS_ISA
