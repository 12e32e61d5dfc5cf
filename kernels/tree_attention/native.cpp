// tree_attention: scores, softmax and weighted values of one unit of the plan. The contract is in __init__.py beside this file.
//
// Scores of the committed keys (and of a causal row's own keys) are computed where they lie, 16 keys a vector. The keys of a tree's
// own nodes are scored where they lie too, then each node picks those of its path in order of depth, so a key's score and its
// place in every sum depend on its absolute position only.
#pragma once

#include "lanes.h"
#include "kernels/tree_attention/plan.h"

namespace fs::FS_ISA {

#if defined(__AVX512F__)
constexpr int kQueryTile = 4, kKeyTile = 4;
#else
constexpr int kQueryTile = 2, kKeyTile = 2;
#endif

constexpr int kTreeScores = kMaxTree + 16;

struct AttentionScratch {
    std::vector<float> scores;  // [queries][kChunk]
    std::vector<float> tree;    // [queries][kTreeScores]
    std::vector<float> sums;    // [queries][stride], as in a partial result
    std::vector<float> joined;  // [queries][stride]
    std::vector<float> keys;    // [kKeyTile][D][16] gathered keys of odd page sizes

    void reserve(int queries, int stride, int d) {
        const auto q = static_cast<size_t>(queries);
        if (scores.size() < q * kChunk) scores.resize(q * kChunk);
        if (tree.size() < q * kTreeScores) tree.resize(q * kTreeScores);
        if (sums.size() < q * static_cast<size_t>(stride)) sums.resize(q * static_cast<size_t>(stride));
        if (joined.size() < q * static_cast<size_t>(stride)) joined.resize(q * static_cast<size_t>(stride));
        const size_t keys_size = static_cast<size_t>(kKeyTile) * static_cast<size_t>(d) * 16;
        if (keys.size() < keys_size) keys.resize(keys_size);
    }
};

// One layer and one row and one key/value head of the store, addressed by logical key index.
template <class T>
struct HeadView {
    const T* k;
    const T* v;
    const int32_t* table;  // pages of the row
    size_t page_step;      // elements from page to page
    int page_size;
    int d;

    const T* key(int index) const {
        return k + static_cast<size_t>(table[index / page_size]) * page_step + static_cast<size_t>(index % page_size);
    }
    const T* value(int index) const {
        return v + static_cast<size_t>(table[index / page_size]) * page_step + static_cast<size_t>(index % page_size) * static_cast<size_t>(d);
    }
};

inline F load_lanes(const float* p) { return load(p); }
inline F load_lanes(const uint16_t* p) { return load_bf16(p); }
inline float load_one(const float* p) { return *p; }
inline float load_one(const uint16_t* p) {
    const uint32_t bits = static_cast<uint32_t>(*p) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}
inline F load_lanes_part(const float* p, int n) { return load_part(p, n); }
inline F load_lanes_part(const uint16_t* p, int n) {
    alignas(64) uint16_t full[16] = {};
    std::memcpy(full, p, static_cast<size_t>(n) * 2);
    return load_bf16(full);
}

// out[t][16 b ..] = q[t] . key(16 b ..): a chain of fused multiply-adds over the channels, one lane per key.
template <class T, int Q, int B>
inline void score_tile(const float* const* q, const T* const* keys, size_t key_step, int d, float* out, size_t out_stride) {
    F acc[Q][B];
    for (int t = 0; t < Q; ++t) {
        for (int b = 0; b < B; ++b) acc[t][b] = zero();
    }
    for (int c = 0; c < d; ++c) {
        F k[B];
#pragma GCC unroll 8
        for (int b = 0; b < B; ++b) k[b] = load_lanes(keys[b] + static_cast<size_t>(c) * key_step);
#pragma GCC unroll 8
        for (int t = 0; t < Q; ++t) {
            const F x = set1(q[t][c]);
#pragma GCC unroll 8
            for (int b = 0; b < B; ++b) acc[t][b] = fma(x, k[b], acc[t][b]);
        }
    }
    for (int t = 0; t < Q; ++t) {
        for (int b = 0; b < B; ++b) store(out + static_cast<size_t>(t) * out_stride + 16 * b, acc[t][b]);
    }
}

template <class T, int B>
inline void score_queries(const float* const* q, int queries, const T* const* keys, size_t key_step, int d, float* out, size_t out_stride) {
    int t = 0;
    for (; t + kQueryTile <= queries; t += kQueryTile) {
        score_tile<T, kQueryTile, B>(q + t, keys, key_step, d, out + static_cast<size_t>(t) * out_stride, out_stride);
    }
    float* rest = out + static_cast<size_t>(t) * out_stride;
    switch (queries - t) {
        case 1: score_tile<T, 1, B>(q + t, keys, key_step, d, rest, out_stride); break;
        case 2: score_tile<T, 2, B>(q + t, keys, key_step, d, rest, out_stride); break;
        case 3: score_tile<T, 3, B>(q + t, keys, key_step, d, rest, out_stride); break;
        default: break;
    }
}

// Scores of logical keys [begin, end), begin a multiple of 16; whole vectors of 16 are written, lanes past `end` hold anything.
template <class T>
inline void score_range(const HeadView<T>& head, const float* const* q, int queries, int begin, int end, float* out, size_t out_stride,
                        float* gathered) {
    const bool direct = head.page_size % 16 == 0;
    for (int index = begin; index < end;) {
        const int blocks = std::min(kKeyTile, (end - index + 15) / 16);
        if (direct) {
            const T* keys[kKeyTile];
            for (int b = 0; b < blocks; ++b) keys[b] = head.key(index + 16 * b);
            const auto step = static_cast<size_t>(head.page_size);
            float* target = out + (index - begin);
            if (blocks == kKeyTile) {
                score_queries<T, kKeyTile>(q, queries, keys, step, head.d, target, out_stride);
            } else {
                for (int b = 0; b < blocks; ++b) score_queries<T, 1>(q, queries, keys + b, step, head.d, target + 16 * b, out_stride);
            }
        } else {
            for (int b = 0; b < blocks; ++b) {
                for (int i = 0; i < 16; ++i) {
                    const int at = index + 16 * b + i;
                    const T* key = at < end ? head.key(at) : nullptr;
                    for (int c = 0; c < head.d; ++c) {
                        gathered[c * 16 + i] = key != nullptr ? load_one(key + static_cast<size_t>(c) * static_cast<size_t>(head.page_size)) : 0.0f;
                    }
                }
                const float* keys[1] = {gathered};
                score_queries<float, 1>(q, queries, keys, 16, head.d, out + (index - begin) + 16 * b, out_stride);
            }
        }
        index += 16 * blocks;
    }
}

// scores[low..high) become exp(score - maximum), every other lane of the touched vectors 0; returns through `maximum` and `sum`.
inline void softmax_range(float* scores, int low, int high, float* maximum, float* sum) {
    const int begin = low / 16 * 16;
    F top = set1(-__builtin_inff());
    for (int i = begin; i < high; i += 16) {
        const M inside = both(first(high - i), not_(first(low - i)));
        const F s = select(inside, load(scores + i), set1(-__builtin_inff()));
        store(scores + i, s);
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
    *sum = reduce_add(total);
}

// sums[t][0..16 V) += w[t][i] * values[i][0..16 V) for i in [0, n), in ascending order.
template <class T, int Q, int V>
inline void value_tile(const float* w, size_t w_stride, const T* values, size_t value_step, int n, float* sums, size_t sums_stride) {
    F acc[Q][V];
    for (int t = 0; t < Q; ++t) {
        for (int v = 0; v < V; ++v) acc[t][v] = load(sums + static_cast<size_t>(t) * sums_stride + 16 * v);
    }
    for (int i = 0; i < n; ++i) {
        F x[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) x[v] = load_lanes(values + static_cast<size_t>(i) * value_step + 16 * v);
#pragma GCC unroll 8
        for (int t = 0; t < Q; ++t) {
            const F p = set1(w[static_cast<size_t>(t) * w_stride + static_cast<size_t>(i)]);
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) acc[t][v] = fma(p, x[v], acc[t][v]);
        }
    }
    for (int t = 0; t < Q; ++t) {
        for (int v = 0; v < V; ++v) store(sums + static_cast<size_t>(t) * sums_stride + 16 * v, acc[t][v]);
    }
}

template <class T, int V>
inline void value_queries(const float* w, size_t w_stride, int queries, const T* values, size_t step, int n, float* sums, size_t sums_stride) {
    int t = 0;
    for (; t + kQueryTile <= queries; t += kQueryTile) {
        value_tile<T, kQueryTile, V>(w + static_cast<size_t>(t) * w_stride, w_stride, values, step, n, sums + static_cast<size_t>(t) * sums_stride, sums_stride);
    }
    const float* rest_w = w + static_cast<size_t>(t) * w_stride;
    float* rest = sums + static_cast<size_t>(t) * sums_stride;
    switch (queries - t) {
        case 1: value_tile<T, 1, V>(rest_w, w_stride, values, step, n, rest, sums_stride); break;
        case 2: value_tile<T, 2, V>(rest_w, w_stride, values, step, n, rest, sums_stride); break;
        case 3: value_tile<T, 3, V>(rest_w, w_stride, values, step, n, rest, sums_stride); break;
        default: break;
    }
}

// The same for n values that lie `step` apart, all d channels.
template <class T>
inline void value_run(const float* w, size_t w_stride, int queries, const T* values, int d, int n, float* sums, size_t sums_stride) {
    const auto step = static_cast<size_t>(d);
    int c = 0;
    for (; c + 16 * kQueryTile <= d; c += 16 * kQueryTile) {
        value_queries<T, kQueryTile>(w, w_stride, queries, values + c, step, n, sums + c, sums_stride);
    }
    for (; c + 16 <= d; c += 16) value_queries<T, 1>(w, w_stride, queries, values + c, step, n, sums + c, sums_stride);
    if (c == d) return;
    for (int t = 0; t < queries; ++t) {
        float* target = sums + static_cast<size_t>(t) * sums_stride + c;
        F acc = load(target);
        for (int i = 0; i < n; ++i) {
            acc = fma(set1(w[static_cast<size_t>(t) * w_stride + static_cast<size_t>(i)]), load_lanes_part(values + static_cast<size_t>(i) * step + c, d - c), acc);
        }
        store(target, acc);
    }
}

// Values of logical keys [begin, end), page by page.
template <class T>
inline void value_range(const HeadView<T>& head, const float* w, size_t w_stride, int queries, int begin, int end, float* sums, size_t sums_stride) {
    for (int index = begin; index < end;) {
        const int n = std::min(end - index, head.page_size - index % head.page_size);
        value_run(w + (index - begin), w_stride, queries, head.value(index), head.d, n, sums, sums_stride);
        index += n;
    }
}

// What a unit works on, apart from the unit itself.
struct AttentionLayer {
    const fs_step* step;
    const fs_store* store;
    AttentionPlan* plan;
    const float* q;  // [N][q_stride], rotated and scaled
    float* out;      // [N][q_stride]
    size_t q_stride;
    int q_heads;
    int window;
    int layer;
};

// One chunk: positions [chunk * kChunk, ...) of the unit's nodes. sums[query][stride]: weighted values, then maximum and sum.
template <class T>
void attend_chunk(const AttentionLayer& a, const HeadView<T>& head, const AttentionUnit& u, int chunk, AttentionScratch& scratch, float* sums) {
    const fs_step& step = *a.step;
    const int per_group = a.q_heads / a.store->kv_heads;
    const int nodes = u.node_end - u.node_begin, queries = nodes * per_group;
    const int stride = a.plan->stride, padded = stride - 16;
    const bool causal = step.causal[u.row] != 0;
    const int committed = step.kv_lens[u.row];
    const int base = chunk * kChunk;

    const float* q[256];
    int low[256], dense[256], high[256];  // per node, as positions clipped to the chunk: first key, end of keys in place, end of keys
    int joint_low = base, joint_high = base + kChunk, dense_low = base + kChunk, dense_high = base;
    bool tree = false;
    for (int i = 0; i < nodes; ++i) {
        const int node = u.node_begin + i;
        const int seen = keys_seen(step, u.row, node);
        const auto clip = [&](int position) { return std::min(std::max(position, base), base + kChunk); };
        low[i] = clip(first_key(seen, a.window));
        high[i] = std::max(clip(seen), low[i]);
        dense[i] = causal ? high[i] : std::max(std::min(clip(committed), high[i]), low[i]);
        if (dense[i] > low[i]) {
            dense_low = std::min(dense_low, low[i]);
            dense_high = std::max(dense_high, dense[i]);
        }
        joint_low = std::max(joint_low, low[i]);
        joint_high = std::min(joint_high, dense[i]);
        tree |= high[i] > dense[i];
        for (int g = 0; g < per_group; ++g) {
            q[i * per_group + g] = a.q + static_cast<size_t>(node) * a.q_stride + static_cast<size_t>((u.head * per_group + g) * head.d);
        }
    }

    float* scores = scratch.scores.data();
    if (dense_high > dense_low) {
        const int begin = dense_low / 16 * 16;
        score_range(head, q, queries, begin, dense_high, scores + (begin - base), kChunk, scratch.keys.data());
    }
    const int tree_base = committed / 16 * 16;
    const int row_nodes = step.row_ptr[u.row + 1] - step.row_ptr[u.row];
    if (tree) score_range(head, q, queries, tree_base, committed + row_nodes, scratch.tree.data(), kTreeScores, scratch.keys.data());

    int path[kMaxTree];
    for (int i = 0; i < nodes; ++i) {
        if (high[i] > dense[i]) {
            int depth = 0;
            for (uint64_t word = static_cast<uint64_t>(step.words[u.node_begin + i]); word != 0; word &= word - 1) path[depth++] = __builtin_ctzll(word);
        }
        for (int g = 0; g < per_group; ++g) {
            const int t = i * per_group + g;
            float* row = scores + static_cast<size_t>(t) * kChunk;
            const float* tree_row = scratch.tree.data() + static_cast<size_t>(t) * kTreeScores;
            for (int p = std::max(dense[i], low[i]); p < high[i]; ++p) row[p - base] = tree_row[committed + path[p - committed] - tree_base];
            float* sum_row = sums + static_cast<size_t>(t) * static_cast<size_t>(stride);
            for (int c = 0; c < padded; c += 16) store(sum_row + c, zero());
            sum_row[padded] = -__builtin_inff();
            sum_row[padded + 1] = 0.0f;
            if (high[i] > low[i]) softmax_range(row, low[i] - base, high[i] - base, &sum_row[padded], &sum_row[padded + 1]);
        }
    }

    const auto s = static_cast<size_t>(stride);
    const bool joint = joint_high > joint_low;
    if (joint) {
        for (int i = 0; i < nodes; ++i) {
            const size_t t = static_cast<size_t>(i * per_group);
            value_range(head, scores + t * kChunk + (low[i] - base), kChunk, per_group, low[i], joint_low, sums + t * s, s);
        }
        value_range(head, scores + (joint_low - base), kChunk, queries, joint_low, joint_high, sums, s);
    }
    for (int i = 0; i < nodes; ++i) {
        const size_t t = static_cast<size_t>(i * per_group);
        const int from = joint ? joint_high : low[i];
        value_range(head, scores + t * kChunk + (from - base), kChunk, per_group, from, dense[i], sums + t * s, s);
        if (high[i] <= dense[i]) continue;
        int depth = 0;
        for (uint64_t word = static_cast<uint64_t>(step.words[u.node_begin + i]); word != 0; word &= word - 1) path[depth++] = __builtin_ctzll(word);
        for (int p = dense[i]; p < high[i]; ++p) {
            value_run(scores + t * kChunk + (p - base), kChunk, per_group, head.value(committed + path[p - committed]), head.d, 1, sums + t * s, s);
        }
    }
}

// joined = joined and next, online softmax (Milakov & Gimelshein 2018). An empty side leaves the other as it is.
inline void join_chunk(float* joined, const float* next, int padded) {
    const float m_next = next[padded];
    if (next[padded + 1] == 0.0f) return;
    const float m_old = joined[padded];
    if (joined[padded + 1] == 0.0f) {
        std::memcpy(joined, next, static_cast<size_t>(padded + 2) * sizeof(float));
        return;
    }
    const float m = m_old > m_next ? m_old : m_next;
    const F keep = exp_lanes(set1(m_old - m)), take = exp_lanes(set1(m_next - m));
    for (int c = 0; c < padded; c += 16) store(joined + c, fma(load(joined + c), keep, mul(load(next + c), take)));
    alignas(64) float factors[2][16];
    store(factors[0], keep);
    store(factors[1], take);
    joined[padded] = m;
    joined[padded + 1] = __builtin_fmaf(joined[padded + 1], factors[0][0], next[padded + 1] * factors[1][0]);
}

inline void finish_query(const float* joined, int padded, int d, float* out) {
    const F scale = set1(1.0f / joined[padded + 1]);
    for (int c = 0; c < d; c += 16) store_part(out + c, mul(load(joined + c), scale), d - c);
}

template <class T>
void attend_unit_as(const AttentionLayer& a, int unit, AttentionScratch& scratch) {
    AttentionPlan& plan = *a.plan;
    const AttentionUnit& u = plan.units[static_cast<size_t>(unit)];
    const fs_store& store = *a.store;
    const size_t head_elements = static_cast<size_t>(store.head_dim) * static_cast<size_t>(store.page_size);
    const size_t page_step = head_elements * static_cast<size_t>(store.kv_heads);
    const size_t base = static_cast<size_t>(a.layer) * static_cast<size_t>(store.pages) * page_step + head_elements * static_cast<size_t>(u.head);
    const HeadView<T> head{static_cast<const T*>(store.k) + base, static_cast<const T*>(store.v) + base,
                           a.step->page_table + static_cast<size_t>(u.row) * static_cast<size_t>(a.step->pages), page_step, store.page_size, store.head_dim};
    const int per_group = a.q_heads / store.kv_heads;
    const int queries = (u.node_end - u.node_begin) * per_group;
    const auto stride = static_cast<size_t>(plan.stride);
    const int padded = plan.stride - 16;

    const float* result;
    if (u.group < 0) {
        attend_chunk(a, head, u, u.chunk_begin, scratch, scratch.joined.data());
        for (int chunk = u.chunk_begin + 1; chunk < u.chunk_end; ++chunk) {
            attend_chunk(a, head, u, chunk, scratch, scratch.sums.data());
            for (int t = 0; t < queries; ++t) {
                join_chunk(scratch.joined.data() + static_cast<size_t>(t) * stride, scratch.sums.data() + static_cast<size_t>(t) * stride, padded);
            }
        }
        result = scratch.joined.data();
    } else {
        const AttentionGroup& group = plan.groups[static_cast<size_t>(u.group)];
        const size_t chunk_floats = static_cast<size_t>(queries) * stride;
        float* partial = plan.partial.data() + group.partial;
        attend_chunk(a, head, u, u.chunk_begin, scratch, partial + static_cast<size_t>(u.chunk_begin - group.chunk_begin) * chunk_floats);
        const int chunks = group.chunk_end - group.chunk_begin;
        if (plan.finished[static_cast<size_t>(u.group)].fetch_add(1, std::memory_order_acq_rel) != chunks - 1) return;
        plan.finished[static_cast<size_t>(u.group)].store(0, std::memory_order_relaxed);  // ready for the next layer
        for (int chunk = 1; chunk < chunks; ++chunk) {
            for (int t = 0; t < queries; ++t) {
                join_chunk(partial + static_cast<size_t>(t) * stride, partial + static_cast<size_t>(chunk) * chunk_floats + static_cast<size_t>(t) * stride, padded);
            }
        }
        result = partial;
    }
    for (int i = u.node_begin; i < u.node_end; ++i) {
        for (int g = 0; g < per_group; ++g) {
            const int t = (i - u.node_begin) * per_group + g;
            float* out = a.out + static_cast<size_t>(i) * a.q_stride + static_cast<size_t>((u.head * per_group + g) * store.head_dim);
            finish_query(result + static_cast<size_t>(t) * stride, padded, store.head_dim, out);
        }
    }
}

inline void attend_unit(const AttentionLayer& a, int unit, AttentionScratch& scratch) {
    if (a.store->bf16 != 0) {
        attend_unit_as<uint16_t>(a, unit, scratch);
    } else {
        attend_unit_as<float>(a, unit, scratch);
    }
}

}  // namespace fs::FS_ISA
