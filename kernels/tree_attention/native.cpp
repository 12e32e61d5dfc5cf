// tree_attention: one unit of the plan after the other. The contract is in __init__.py beside this file.
//
// Scores of the committed keys (and of a causal row's own keys) are computed where they lie, 16 keys a vector. The keys of a tree's
// own nodes are scored where they lie too, then each node picks those of its path in order of depth, so a key's score and its
// place in every sum depend on its absolute position only.
#pragma once

#include "kernels/tree_attention/plan.h"
#include "kernels/tree_attention/tiles.h"

namespace fs::FS_ISA {

constexpr int kFewQueries = 4 * kQueryTile;  // that read keys and values where they lie; more are worth float32 copies
constexpr int kTreeScores = kMaxTree + 16;

struct AttentionScratch {
    Buffer<float> scores;   // [queries][kChunk]
    Buffer<float> tree;     // [queries][kTreeScores]
    Buffer<float> partial;  // one chunk's result
    Buffer<float> joined;   // the result so far
    Buffer<float> keys;     // [kKeyTile][D][16] keys as float32
    Buffer<float> values;   // [kChunk][D] values as float32

    void reserve(int queries, int padded, int d) {
        grow(scores, static_cast<size_t>(queries) * kChunk);
        grow(tree, static_cast<size_t>(queries) * kTreeScores);
        grow(partial, partial_floats(queries, padded));
        grow(joined, partial_floats(queries, padded));
        grow(keys, static_cast<size_t>(kKeyTile * d) * 16);
        grow(values, static_cast<size_t>(kChunk * d));
    }
};

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

// One layer, row and key/value head of the store, addressed by logical key index.
template <class T>
struct HeadView {
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

// Whether the keys of a node's path lie by position: a causal row, or a path without branches before it (a plain step's one node, a chain).
inline bool lies_by_position(const fs_step& step, int row, int node) {
    const auto word = static_cast<uint64_t>(step.words[node]);
    return step.causal[row] != 0 || (word & (word + 1)) == 0;
}

// Which positions of a chunk each node of a unit sees, clipped to the chunk.
struct Visible {
    static constexpr int kMost = 256;
    int low[kMost];    // first key
    int dense[kMost];  // end of the keys used where they lie by position
    int high[kMost];   // end of all keys; those from `dense` on are the node's own path in a tree
    int dense_low, dense_high;  // what any node sees by position
    int joint_low, joint_high;  // what every node sees by position
    bool tree = false;

    Visible(const AttentionLayer& a, const AttentionUnit& u, int base) {
        const fs_step& step = *a.step;
        dense_low = joint_high = base + kChunk;
        dense_high = joint_low = base;
        const auto clip = [&](int position) { return std::min(std::max(position, base), base + kChunk); };
        for (int i = 0; i < u.node_end - u.node_begin; ++i) {
            const int seen = keys_seen(step, u.row, u.node_begin + i);
            low[i] = clip(first_key(seen, a.window));
            high[i] = std::max(clip(seen), low[i]);
            dense[i] = lies_by_position(step, u.row, u.node_begin + i) ? high[i] : std::max(std::min(clip(step.kv_lens[u.row]), high[i]), low[i]);
            if (dense[i] > low[i]) {
                dense_low = std::min(dense_low, low[i]);
                dense_high = std::max(dense_high, dense[i]);
            }
            joint_low = std::max(joint_low, low[i]);
            joint_high = std::min(joint_high, dense[i]);
            tree |= high[i] > dense[i];
        }
    }
};

// Nodes of the path that `word` spells, root first; their number is not returned, the caller knows it.
inline void spell_path(uint64_t word, int* path) {
    for (; word != 0; word &= word - 1) *path++ = __builtin_ctzll(word);
}

// Scores of all keys any node sees in the chunk, by position: scratch.scores[query][position - base].
template <class T>
void chunk_scores(const AttentionLayer& a, const HeadView<T>& head, const AttentionUnit& u, const Visible& seen, int base, AttentionScratch& scratch) {
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
    int path[kMaxTree];
    for (int i = 0; i < nodes; ++i) {
        if (seen.high[i] <= seen.dense[i]) continue;
        spell_path(static_cast<uint64_t>(step.words[u.node_begin + i]), path);
        for (int t = i * per_group; t < (i + 1) * per_group; ++t) {
            const float* from = scratch.tree.data() + static_cast<size_t>(t) * kTreeScores + (committed - tree_base);
            float* to = scores + static_cast<size_t>(t) * kChunk;
            for (int p = seen.dense[i]; p < seen.high[i]; ++p) to[p - base] = from[path[p - committed]];
        }
    }
}

// Weighted values of the chunk, in order of position: the keys all nodes see are taken for all of them at once.
template <class T>
void chunk_values(const AttentionLayer& a, const HeadView<T>& head, const AttentionUnit& u, const Visible& seen, int base, AttentionScratch& scratch,
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
void prefetch_unit(const AttentionLayer& a, const AttentionUnit& u) {
    const HeadView<T> head(a, u);
    if (head.page_size % 16 != 0) return;
    const int begin = u.chunk_begin * kChunk;
    const int end = std::min(begin + 16 * kKeyTile, a.step->kv_lens[u.row]);
    for (int index = begin; index < end; index += 16) {
        const T* key = head.key(index);
        for (int c = 0; c < head.d; ++c) prefetch(key + static_cast<size_t>(c) * static_cast<size_t>(head.page_size));
    }
}

template <class T>
void attend_chunk(const AttentionLayer& a, const HeadView<T>& head, const AttentionUnit& u, int chunk, AttentionScratch& scratch, const Partial& out) {
    const int base = chunk * kChunk;
    const int per_group = a.q_heads / a.store->kv_heads, queries = (u.node_end - u.node_begin) * per_group;
    const Visible seen(a, u, base);
    chunk_scores(a, head, u, seen, base, scratch);
    for (int c = 0; c < queries * out.padded; c += 16) store(out.sums + c, zero());
    for (int t = 0; t < queries; ++t) {
        const int low = seen.low[t / per_group], high = seen.high[t / per_group];
        out.top[t] = -__builtin_inff();
        out.mass[t] = 0.0f;
        if (high > low) softmax_range(scratch.scores.data() + static_cast<size_t>(t) * kChunk, low - base, high - base, &out.top[t], &out.mass[t]);
    }
    chunk_values(a, head, u, seen, base, scratch, out);
}

inline void write_results(const AttentionLayer& a, const AttentionUnit& u, const Partial& result) {
    const int per_group = a.q_heads / a.store->kv_heads, d = a.store->head_dim;
    for (int i = u.node_begin; i < u.node_end; ++i) {
        for (int g = 0; g < per_group; ++g) {
            const int t = (i - u.node_begin) * per_group + g;
            const F scale = set1(1.0f / result.mass[t]);
            const float* sums = result.sums + t * result.padded;
            float* out = a.out + static_cast<size_t>(i) * a.q_stride + static_cast<size_t>((u.head * per_group + g) * d);
            for (int c = 0; c < d; c += 16) store_part(out + c, mul(load(sums + c), scale), d - c);
        }
    }
}

template <class T>
void attend_unit_as(const AttentionLayer& a, int unit, int end, AttentionScratch& scratch) {
    AttentionPlan& plan = *a.plan;
    const AttentionUnit& u = plan.units[static_cast<size_t>(unit)];
    const HeadView<T> head(a, u);
    const int queries = (u.node_end - u.node_begin) * (a.q_heads / a.store->kv_heads);
    const int padded = plan.padded;
    if (unit + 1 < end) prefetch_unit<T>(a, plan.units[static_cast<size_t>(unit) + 1]);
    if (u.group < 0) {
        const Partial joined(scratch.joined.data(), queries, padded), next(scratch.partial.data(), queries, padded);
        attend_chunk(a, head, u, u.chunk_begin, scratch, joined);
        for (int chunk = u.chunk_begin + 1; chunk < u.chunk_end; ++chunk) {
            attend_chunk(a, head, u, chunk, scratch, next);
            join_partial(joined, next, queries);
        }
        write_results(a, u, joined);
        return;
    }
    const auto index = static_cast<size_t>(u.group);
    const AttentionGroup& group = plan.groups[index];
    const auto part = [&](int chunk) {
        return Partial(plan.partial.data() + group.partial + static_cast<size_t>(chunk - group.chunk_begin) * partial_floats(queries, padded), queries, padded);
    };
    attend_chunk(a, head, u, u.chunk_begin, scratch, part(u.chunk_begin));
    // Whoever finishes a group's last chunk joins them all, in ascending order.
    if (plan.finished[index].fetch_add(1, std::memory_order_acq_rel) != group.chunk_end - group.chunk_begin - 1) return;
    plan.finished[index].store(0, std::memory_order_relaxed);  // ready for the next layer
    for (int chunk = group.chunk_begin + 1; chunk < group.chunk_end; ++chunk) join_partial(part(group.chunk_begin), part(chunk), queries);
    write_results(a, u, part(group.chunk_begin));
}

// Units [begin, end) of the plan.
inline void attend_units(const AttentionLayer& a, int begin, int end, AttentionScratch& scratch) {
    for (int unit = begin; unit < end; ++unit) {
        if (a.store->bf16 != 0) {
            attend_unit_as<uint16_t>(a, unit, end, scratch);
        } else {
            attend_unit_as<float>(a, unit, end, scratch);
        }
    }
}

}  // namespace fs::FS_ISA
