// top_shares: the best tokens of a row and their probabilities in two sweeps, no sort. The contract is in __init__.py beside this file.
#pragma once

#include <cmath>

#include "lanes.h"

namespace fs::FS_ISA {

// Puts (x, id) into a list of k, best first; ids come in ascending order, so an equal value goes behind.
inline void insert_best(float x, int32_t id, int k, float* values, int32_t* ids) {
    int at = k - 1;
    for (; at > 0 && values[at - 1] < x; --at) {
        values[at] = values[at - 1];
        ids[at] = ids[at - 1];
    }
    values[at] = x;
    ids[at] = id;
}

inline void top_shares_row(const float* logits, int n, int k, float temperature, int32_t* ids, float* shares) {
    const float infinity = __builtin_inff();
    for (int i = 0; i < k; ++i) {
        shares[i] = -infinity;
        ids[i] = i;
    }
    M sound{first(16)};
    F least = set1(-infinity);
    int filled = 0;  // the first k tokens go in whatever they are
    for (int i = 0; i < n; i += 16) {
        const F x = load_part(logits + i, n - i);
        sound = both(sound, less(x, set1(infinity)));
        uint32_t bits = bits_of(both(first(n - i), less(least, x)));
        for (; bits != 0; bits &= bits - 1) {
            const int id = i + __builtin_ctz(bits);
            if (!(logits[id] > shares[k - 1])) continue;
            insert_best(logits[id], id, k, shares, ids);
            filled += filled < k;
            if (filled == k) least = set1(shares[k - 1]);
        }
    }
    const float top = shares[0];
    if (!all(sound) || !std::isfinite(top)) {
        for (int i = 0; i < k; ++i) shares[i] = __builtin_nanf("");
        return;
    }
    const F m = set1(top), t = set1(temperature);
    F sum = zero();
    for (int i = 0; i < n; i += 16) sum = add(sum, select(first(n - i), exp_lanes(div(sub(load_part(logits + i, n - i), m), t)), zero()));
    const float total = reduce_add(sum);
    for (int i = 0; i < k; ++i) shares[i] = std::exp((shares[i] - top) / temperature) / total;
}

}  // namespace fs::FS_ISA
