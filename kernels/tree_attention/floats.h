// Keys and values that are numbers of 16 or 32 bits: scores, softmax and values of one chunk.
//
// Scores of the committed keys (and of a causal row's own keys) are computed where they lie, 16 keys a vector. The keys of a tree's
// own nodes are scored where they lie too, then each node picks those of its path in order of depth, so a key's score and its
// place in every sum depend on its absolute position only.
#pragma once

#include "kernels/tree_attention/unit.h"

namespace fs::FS_ISA {

constexpr int kFewQueries = 4 * kQueryTile;  // that read keys and values where they lie; more are worth float32 copies

struct FloatScratch : ScoreScratch {
    Buffer<float> keys;    // [kKeyTile][D][16] keys as float32
    Buffer<float> values;  // [kChunk][D] values as float32

    void reserve(int queries, int d) {
        ScoreScratch::reserve(queries);
        grow(keys, static_cast<size_t>(kKeyTile * d) * 16);
        grow(values, static_cast<size_t>(kChunk * d));
    }
};

// Queries need no preparing.
struct AsTheyAre {
    template <class View>
    AsTheyAre(const AttentionLayer&, const View&, const AttentionUnit&) {}
};

// One layer, row and key/value head of the store, addressed by logical key index.
template <class T>
struct HeadView {
    using Scratch = FloatScratch;
    using Queries = AsTheyAre;
    static F power(F x) { return exp_lanes(x); }
    const T* k;
    const T* v;
    const int32_t* table;  // pages of the row
    size_t page_step;      // elements from page to page
    int page_size;
    int d;

    HeadView(const AttentionLayer& a, const AttentionUnit& u) : page_size(a.store->page_size), d(a.store->head_dim) {
        const size_t head_elements = static_cast<size_t>(d) * static_cast<size_t>(page_size);
        page_step = head_elements * static_cast<size_t>(a.store->kv_heads);
        const size_t base = static_cast<size_t>(a.layer) * static_cast<size_t>(a.store->pages) * page_step + head_elements * static_cast<size_t>(u.head);
        k = static_cast<const T*>(a.store->k) + base;
        v = static_cast<const T*>(a.store->v) + base;
        table = a.step->page_table + static_cast<size_t>(u.row) * static_cast<size_t>(a.step->pages);
    }
    const T* key(int index) const {
        return k + static_cast<size_t>(table[index / page_size]) * page_step + static_cast<size_t>(index % page_size);
    }
    const T* value(int index) const {
        return v + static_cast<size_t>(table[index / page_size]) * page_step + static_cast<size_t>(index % page_size) * static_cast<size_t>(d);
    }
};

// 16 keys from `index` on as float32 [D][16]; keys from `end` on are zeros.
template <class T>
void copy_keys(const HeadView<T>& head, int index, int end, float* out) {
    if (head.page_size % 16 == 0) {
        const T* key = head.key(index);
        for (int c = 0; c < head.d; ++c) store(out + 16 * c, load_lanes(key + static_cast<size_t>(c) * static_cast<size_t>(head.page_size)));
        return;
    }
    for (int i = 0; i < 16; ++i) {
        const T* key = index + i < end ? head.key(index + i) : nullptr;
        for (int c = 0; c < head.d; ++c) {
            out[c * 16 + i] = key != nullptr ? load_one(key + static_cast<size_t>(c) * static_cast<size_t>(head.page_size)) : 0.0f;
        }
    }
}

// The keys after those from `index` on, and the values that belong to these.
template <class T>
Ahead look_ahead(const HeadView<T>& head, int index, int end) {
    Ahead ahead;
    ahead.step = static_cast<size_t>(head.page_size) * sizeof(T);
    for (int b = 0; b < kKeyTile; ++b) {
        const int here = std::min(index + 16 * b, end - 1), next = index + 16 * (b + kKeyTile);
        ahead.keys[b] = reinterpret_cast<const char*>(head.key(next < end ? next : here));
        ahead.values[b] = reinterpret_cast<const char*>(head.value(here));
    }
    return ahead;
}

// Scores of logical keys [begin, end), begin a multiple of 16; whole vectors of 16 are written, lanes past `end` hold anything.
template <class T>
void score_range(const HeadView<T>& head, const float* const* q, int queries, int begin, int end, float* out, size_t out_stride, float* copies) {
    // Keys are used in place when 16 of them are one vector and few queries share them; otherwise as float32 copies.
    const bool vectors = head.page_size % 16 == 0;
    const bool in_place = vectors && (sizeof(T) == 4 || queries <= kFewQueries);
    for (int index = begin; index < end;) {
        const int blocks = std::min(kKeyTile, (end - index + 15) / 16);
        float* target = out + (index - begin);
        Ahead ahead;
        if (vectors) ahead = look_ahead(head, index, end);
        if (in_place) {
            const T* keys[kKeyTile];
            for (int b = 0; b < blocks; ++b) keys[b] = head.key(index + 16 * b);
            score_blocks<T>(q, queries, keys, blocks, static_cast<size_t>(head.page_size), head.d, &ahead, target, out_stride);
        } else {
            const float* keys[kKeyTile];
            for (int b = 0; b < blocks; ++b) {
                float* copy = copies + static_cast<size_t>(b * head.d) * 16;
                copy_keys(head, index + 16 * b, end, copy);
                keys[b] = copy;
            }
            score_blocks<float>(q, queries, keys, blocks, 16, head.d, vectors ? &ahead : nullptr, target, out_stride);
        }
        index += 16 * blocks;
    }
}

// sums += weights * values of logical keys [begin, end).
template <class T>
void value_range(const HeadView<T>& head, const float* w, int queries, int begin, int end, float* sums, size_t sums_stride, float* copies) {
    Run<T> runs[kChunk];
    int count = 0;
    for (int index = begin; index < end;) {
        const int n = std::min(end - index, head.page_size - index % head.page_size);
        runs[count++] = {head.value(index), n};
        index += n;
    }
    if (count == 0) return;
    if (sizeof(T) == 4 || queries <= kFewQueries || head.d % 16 != 0) {
        value_runs(w, kChunk, queries, runs, count, head.d, sums, sums_stride);
        return;
    }
    float* copy = copies;
    for (int r = 0; r < count; ++r) {
        for (int i = 0; i < runs[r].n * head.d; i += 16, copy += 16) store(copy, load_lanes(runs[r].values + i));
    }
    const Run<float> all{copies, end - begin};
    value_runs(w, kChunk, queries, &all, 1, head.d, sums, sums_stride);
}

// Scores of all keys any node sees in the chunk, by position: scratch.scores[query][position - base].
template <class T>
void chunk_scores(const AttentionLayer& a, const HeadView<T>& head, const AttentionUnit& u, const Visible& seen, int base, FloatScratch& scratch) {
    const fs_step& step = *a.step;
    const int per_group = a.q_heads / a.store->kv_heads, nodes = u.node_end - u.node_begin;
    const float* q[Visible::kMost];
    for (int i = 0; i < nodes; ++i) {
        const float* node = a.q + static_cast<size_t>(u.node_begin + i) * a.q_stride + static_cast<size_t>(u.head * per_group * head.d);
        for (int g = 0; g < per_group; ++g) q[i * per_group + g] = node + g * head.d;
    }
    float* scores = scratch.scores.data();
    if (seen.dense_high > seen.dense_low) {
        const int begin = seen.dense_low / 16 * 16;
        score_range(head, q, nodes * per_group, begin, seen.dense_high, scores + (begin - base), kChunk, scratch.keys.data());
    }
    if (!seen.tree) return;
    const int committed = step.kv_lens[u.row], tree_base = committed / 16 * 16;
    const int row_nodes = step.row_ptr[u.row + 1] - step.row_ptr[u.row];
    score_range(head, q, nodes * per_group, tree_base, committed + row_nodes, scratch.tree.data(), kTreeScores, scratch.keys.data());
    pick_paths(a, u, seen, base, tree_base, scratch);
}

// Weighted values of the chunk, in order of position: the keys all nodes see are taken for all of them at once.
template <class T>
void chunk_values(const AttentionLayer& a, const HeadView<T>& head, const AttentionUnit& u, const Visible& seen, int base, FloatScratch& scratch,
                  const Partial& out) {
    const fs_step& step = *a.step;
    const int per_group = a.q_heads / a.store->kv_heads, nodes = u.node_end - u.node_begin;
    const auto stride = static_cast<size_t>(out.padded);
    const float* w = scratch.scores.data() - base;
    float* copies = scratch.values.data();
    const bool joint = seen.joint_high > seen.joint_low;
    const auto one_node = [&](int i, int begin, int end) {
        const auto t = static_cast<size_t>(i * per_group);
        if (begin < end) value_range(head, w + t * kChunk + begin, per_group, begin, end, out.sums + t * stride, stride, copies);
    };
    if (joint) {
        for (int i = 0; i < nodes; ++i) one_node(i, seen.low[i], seen.joint_low);
        value_range(head, w + seen.joint_low, nodes * per_group, seen.joint_low, seen.joint_high, out.sums, stride, copies);
    }
    const int committed = step.kv_lens[u.row];
    int path[kMaxTree];
    Run<T> runs[kMaxTree];
    for (int i = 0; i < nodes; ++i) {
        one_node(i, joint ? seen.joint_high : seen.low[i], seen.dense[i]);
        if (seen.high[i] <= seen.dense[i]) continue;
        spell_path(static_cast<uint64_t>(step.words[u.node_begin + i]), path);
        const int count = seen.high[i] - seen.dense[i];
        for (int k = 0; k < count; ++k) runs[k] = {head.value(committed + path[seen.dense[i] + k - committed]), 1};
        const auto t = static_cast<size_t>(i * per_group);
        value_runs(w + t * kChunk + seen.dense[i], kChunk, per_group, runs, count, head.d, out.sums + t * stride, stride);
    }
}

// Asks for the first keys of a unit that this thread will take next.
template <class T>
void prefetch_unit(const AttentionLayer& a, const HeadView<T>& head, const AttentionUnit& u) {
    if (head.page_size % 16 != 0) return;
    const int begin = u.chunk_begin * kChunk;
    const int end = std::min(begin + 16 * kKeyTile, a.step->kv_lens[u.row]);
    for (int index = begin; index < end; index += 16) {
        const T* key = head.key(index);
        for (int c = 0; c < head.d; ++c) prefetch(key + static_cast<size_t>(c) * static_cast<size_t>(head.page_size));
    }
}

// Scores become weights; `top` and `mass` of queries that see nothing of the chunk are those of no keys.
inline void chunk_softmax(const Visible& seen, int queries, int per_group, int base, float* scores, float* top, float* mass) {
    for (int t = 0; t < queries; ++t) {
        const int low = seen.low[t / per_group], high = seen.high[t / per_group];
        top[t] = -__builtin_inff();
        mass[t] = 0.0f;
        if (high > low) softmax_range(scores + static_cast<size_t>(t) * kChunk, low - base, high - base, &top[t], &mass[t]);
    }
}

template <class T>
void attend_chunk(const AttentionLayer& a, const HeadView<T>& head, const AttentionUnit& u, int chunk, const AsTheyAre&, FloatScratch& scratch,
                  const Partial& out) {
    const int base = chunk * kChunk;
    const int per_group = a.q_heads / a.store->kv_heads, queries = (u.node_end - u.node_begin) * per_group;
    const Visible seen(a, u, base);
    chunk_scores(a, head, u, seen, base, scratch);
    for (int c = 0; c < queries * out.padded; c += 16) store(out.sums + c, zero());
    chunk_softmax(seen, queries, per_group, base, scratch.scores.data(), out.top, out.mass);
    chunk_values(a, head, u, seen, base, scratch, out);
}

}  // namespace fs::FS_ISA
