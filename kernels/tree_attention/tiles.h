// The inner loops of attention: scores of blocks of 16 keys, softmax of one row of scores, weighted sums of values.
//
// Knows tiles of queries and keys in registers; refuses to know rows, trees and pages. Each score is one chain of fused
// multiply-adds over the channels, each weighted sum one chain over the keys in ascending order, whatever the tile sizes.
#pragma once

#include <algorithm>

#include "kernels/tree_attention/plan.h"
#include "lanes.h"

namespace fs::FS_ISA {

#if defined(__AVX512F__)
constexpr int kQueryTile = 6, kKeyTile = 4;
#else
constexpr int kQueryTile = 2, kKeyTile = 2;
#endif

inline F load_lanes(const float* p) { return load(p); }
inline F load_lanes(const uint16_t* p) { return load_bf16(p); }
inline F load_lanes_part(const float* p, int n) { return load_part(p, n); }
inline F load_lanes_part(const uint16_t* p, int n) {
    alignas(64) uint16_t full[16] = {};
    std::memcpy(full, p, static_cast<size_t>(std::min(n, 16)) * 2);
    return load_bf16(full);
}
inline float load_one(const float* p) { return *p; }
inline float load_one(const uint16_t* p) {
    const uint32_t bits = static_cast<uint32_t>(*p) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

// What will be read next: per key block the next keys and the values of these ones, `step` bytes of each per channel.
struct Ahead {
    const char* keys[kKeyTile];
    const char* values[kKeyTile];
    size_t step;
};

// out[t][16 b ..] = q[t] . key(16 b ..), one lane per key. `ahead`, when given, is asked for from memory along the way.
template <class T, int Q, int B>
inline void score_tile(const float* const* q, const T* const* keys, size_t key_step, int d, const Ahead* ahead, float* out, size_t out_stride) {
    F acc[Q][B];
    for (int t = 0; t < Q; ++t) {
        for (int b = 0; b < B; ++b) acc[t][b] = zero();
    }
    for (int c = 0; c < d; ++c) {
        const size_t at = static_cast<size_t>(c) * key_step;
        F k[B];
#pragma GCC unroll 8
        for (int b = 0; b < B; ++b) k[b] = load_lanes(keys[b] + at);
        if constexpr (B == kKeyTile) {
            if (ahead != nullptr) {
#pragma GCC unroll 8
                for (int b = 0; b < B; ++b) {
                    prefetch(ahead->keys[b] + static_cast<size_t>(c) * ahead->step);
                    prefetch(ahead->values[b] + static_cast<size_t>(c) * ahead->step);
                }
            }
        }
#pragma GCC unroll 8
        for (int t = 0; t < Q; ++t) {
            const F x = set1(q[t][c]);
#pragma GCC unroll 8
            for (int b = 0; b < B; ++b) acc[t][b] = fma(x, k[b], acc[t][b]);
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < Q; ++t) {
#pragma GCC unroll 8
        for (int b = 0; b < B; ++b) store(out + static_cast<size_t>(t) * out_stride + 16 * b, acc[t][b]);
    }
}

template <class T, int B>
inline void score_queries(const float* const* q, int queries, const T* const* keys, size_t key_step, int d, const Ahead* ahead, float* out,
                          size_t out_stride) {
    for (; queries > 0; queries -= kQueryTile, q += kQueryTile, out += kQueryTile * out_stride, ahead = nullptr) {
        switch (std::min(queries, kQueryTile)) {
            case 1: score_tile<T, 1, B>(q, keys, key_step, d, ahead, out, out_stride); break;
            case 2: score_tile<T, std::min(2, kQueryTile), B>(q, keys, key_step, d, ahead, out, out_stride); break;
            case 3: score_tile<T, std::min(3, kQueryTile), B>(q, keys, key_step, d, ahead, out, out_stride); break;
            case 4: score_tile<T, std::min(4, kQueryTile), B>(q, keys, key_step, d, ahead, out, out_stride); break;
            case 5: score_tile<T, std::min(5, kQueryTile), B>(q, keys, key_step, d, ahead, out, out_stride); break;
            default: score_tile<T, kQueryTile, B>(q, keys, key_step, d, ahead, out, out_stride); break;
        }
    }
}

// Up to kKeyTile blocks at once.
template <class T>
inline void score_blocks(const float* const* q, int queries, const T* const* keys, int blocks, size_t key_step, int d, const Ahead* ahead,
                         float* out, size_t out_stride) {
    int done = 0;
    if (blocks == kKeyTile) {
        score_queries<T, kKeyTile>(q, queries, keys, key_step, d, ahead, out, out_stride);
        return;
    }
    for (; done + 2 <= blocks; done += 2) score_queries<T, 2>(q, queries, keys + done, key_step, d, nullptr, out + 16 * done, out_stride);
    if (done < blocks) score_queries<T, 1>(q, queries, keys + done, key_step, d, nullptr, out + 16 * done, out_stride);
}

// scores[low..high) become exp(score - maximum), every other lane of the touched vectors 0.
inline void softmax_range(float* scores, int low, int high, float* maximum, float* mass) {
    const int begin = low / 16 * 16;
    F top = set1(-__builtin_inff());
    for (int i = begin; i < high; i += 16) {
        F s = load(scores + i);
        if (i < low || i + 16 > high) {
            s = select(both(first(high - i), not_(first(low - i))), s, set1(-__builtin_inff()));
            store(scores + i, s);
        }
        top = max(s, top);
    }
    *maximum = reduce_max(top);
    const F m = set1(*maximum);
    F total = zero();
    for (int i = begin; i < high; i += 16) {
        const F w = exp_lanes(sub(load(scores + i), m));
        store(scores + i, w);
        total = add(total, w);
    }
    *mass = reduce_add(total);
}

// Values that lie behind each other.
template <class T>
struct Run {
    const T* values;
    int n;
};

// sums[t][0..16 V) += w[t][i] * value i [0..16 V) over all runs, in ascending order, from channel c on.
template <class T, int Q, int V>
inline void value_tile(const float* w, size_t w_stride, const Run<T>* runs, int count, int c, size_t value_step, float* sums, size_t sums_stride) {
    F acc[Q][V];
#pragma GCC unroll 8
    for (int t = 0; t < Q; ++t) {
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) acc[t][v] = load(sums + static_cast<size_t>(t) * sums_stride + 16 * v);
    }
    for (int r = 0; r < count; ++r) {
        const T* values = runs[r].values + c;
        const float* end = w + runs[r].n;
        for (; w != end; ++w, values += value_step) {
            F x[V];
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) x[v] = load_lanes(values + 16 * v);
#pragma GCC unroll 8
            for (int t = 0; t < Q; ++t) {
                const F p = set1(w[static_cast<size_t>(t) * w_stride]);
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v) acc[t][v] = fma(p, x[v], acc[t][v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < Q; ++t) {
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) store(sums + static_cast<size_t>(t) * sums_stride + 16 * v, acc[t][v]);
    }
}

template <class T, int V>
inline void value_queries(const float* w, size_t w_stride, int queries, const Run<T>* runs, int count, int c, size_t step, float* sums,
                          size_t sums_stride) {
    for (; queries > 0; queries -= kQueryTile, w += kQueryTile * w_stride, sums += kQueryTile * sums_stride) {
        switch (std::min(queries, kQueryTile)) {
            case 1: value_tile<T, 1, V>(w, w_stride, runs, count, c, step, sums, sums_stride); break;
            case 2: value_tile<T, std::min(2, kQueryTile), V>(w, w_stride, runs, count, c, step, sums, sums_stride); break;
            case 3: value_tile<T, std::min(3, kQueryTile), V>(w, w_stride, runs, count, c, step, sums, sums_stride); break;
            case 4: value_tile<T, std::min(4, kQueryTile), V>(w, w_stride, runs, count, c, step, sums, sums_stride); break;
            case 5: value_tile<T, std::min(5, kQueryTile), V>(w, w_stride, runs, count, c, step, sums, sums_stride); break;
            default: value_tile<T, kQueryTile, V>(w, w_stride, runs, count, c, step, sums, sums_stride); break;
        }
    }
}

// All d channels of the values of some runs.
template <class T>
inline void value_runs(const float* w, size_t w_stride, int queries, const Run<T>* runs, int count, int d, float* sums, size_t sums_stride) {
    const auto step = static_cast<size_t>(d);
    int c = 0;
    for (; c + 16 * kKeyTile <= d; c += 16 * kKeyTile) {
        value_queries<T, kKeyTile>(w, w_stride, queries, runs, count, c, step, sums + c, sums_stride);
    }
    for (; c + 16 <= d; c += 16) value_queries<T, 1>(w, w_stride, queries, runs, count, c, step, sums + c, sums_stride);
    if (c == d) return;
    for (int t = 0; t < queries; ++t) {
        F acc = load(sums + static_cast<size_t>(t) * sums_stride + c);
        const float* p = w + static_cast<size_t>(t) * w_stride;
        for (int r = 0; r < count; ++r) {
            for (int i = 0; i < runs[r].n; ++i) acc = fma(set1(*p++), load_lanes_part(runs[r].values + static_cast<size_t>(i) * step + c, d - c), acc);
        }
        store(sums + static_cast<size_t>(t) * sums_stride + c, acc);
    }
}

// One chunk's result for some queries: sums [queries][padded], then [queries] maxima and [queries] masses, padded to 16.
struct Partial {
    float* sums;
    float* top;
    float* mass;
    int padded;

    Partial(float* base, int queries, int padded_)
        : sums(base), top(base + queries * padded_), mass(top + (queries + 15) / 16 * 16), padded(padded_) {}
};

// joined = joined and next, online softmax (Milakov & Gimelshein 2018). A side without keys has mass 0 and changes nothing. `power`: what
// weights are of scores, for numbers up to 0.
template <class Power>
inline void join_partial(const Partial& joined, const Partial& next, int queries, Power&& power) {
    const F lowest = set1(-__builtin_inff());
    for (int first_query = 0; first_query < queries; first_query += 16) {
        const int n = std::min(16, queries - first_query);
        const F old_top = load_part(joined.top + first_query, n), next_top = load_part(next.top + first_query, n);
        const F top = max(old_top, next_top);
        const F anchor = select(less(lowest, top), top, zero());  // both sides empty: any finite number will do
        alignas(64) float keep[16], take[16];
        const F k = power(sub(old_top, anchor)), t = power(sub(next_top, anchor));
        store(keep, k);
        store(take, t);
        store_part(joined.top + first_query, top, n);
        const F mass = fma(load_part(joined.mass + first_query, n), k, mul(load_part(next.mass + first_query, n), t));
        store_part(joined.mass + first_query, mass, n);
        for (int i = 0; i < n; ++i) {
            const F a = set1(keep[i]), b = set1(take[i]);
            float* target = joined.sums + (first_query + i) * joined.padded;
            const float* source = next.sums + (first_query + i) * next.padded;
            for (int c = 0; c < joined.padded; c += 16) store(target + c, fma(load(target + c), a, mul(load(source + c), b)));
        }
    }
}

}  // namespace fs::FS_ISA
