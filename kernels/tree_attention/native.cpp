// tree_attention: one unit of the plan after the other. The contract is in __init__.py beside this file.
//
// Scores of the committed keys (and of a causal row's own keys) are computed where they lie, 16 keys a vector. The keys of a tree's
// own nodes are scored where they lie too, then each node picks those of its path in order of depth, so a key's score and its
// place in every sum depend on its absolute position only.
#pragma once

#include "kernels/tree_attention/plan.h"
#include "kernels/tree_attention/tiles.h"

namespace fs::FS_ISA {

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

}  // namespace fs::FS_ISA

#include "kernels/tree_attention/amx.h"
#include "kernels/tree_attention/parts.h"

namespace fs::FS_ISA {

constexpr int kTreeScores = kMaxTree + 16;

struct AttentionScratch {
#if defined(FS_AMX)
    MatrixScratch matrix;
    PartsScratch parts;
#endif
    Buffer<float> scores;   // [queries][kChunk]
    Buffer<float> tree;     // [queries][kTreeScores]
    Buffer<float> partial;  // one chunk's result
    Buffer<float> joined;   // the result so far
    Buffer<float> keys;     // [kKeyTile][D][16] keys as float32
    Buffer<float> values;   // [kChunk][D] values as float32

    void reserve(int queries, int padded, int d) {
        const auto rows = static_cast<size_t>((queries + 15) / 16 * 16);  // the matrix unit writes whole tiles
        grow(scores, rows * kChunk);
        grow(tree, rows * kTreeScores);
        grow(partial, partial_floats(queries, padded));
        grow(joined, partial_floats(queries, padded));
        grow(keys, static_cast<size_t>(kKeyTile * d) * 16);
        grow(values, static_cast<size_t>(kChunk * d));
#if defined(FS_AMX)
        matrix.reserve(queries, d);
        parts.reserve(d);
#endif
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
    const bool in_place = vectors && (sizeof(T) == 4 || queries <= kQueryTile);
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
    if (sizeof(T) == 4 || queries <= kQueryTile || head.d % 16 != 0) {
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
            dense[i] = step.causal[u.row] != 0 ? high[i] : std::max(std::min(clip(step.kv_lens[u.row]), high[i]), low[i]);
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

#if defined(FS_AMX)
// Whether attention goes in bfloat16 parts, and whether so few queries are at hand that the vector unit is faster at it.
inline bool in_parts(const AttentionLayer& a, const HeadView<uint16_t>& head) { return amx_fits(head.d, a.q_heads / a.store->kv_heads); }
inline bool few_queries(const HeadView<uint16_t>& head, int queries) { return queries <= kFewQueries && head.page_size % 16 == 0; }

inline void prepare_queries(const HeadView<uint16_t>& head, const float* const* q, int queries, AttentionScratch& scratch) {
    if (few_queries(head, queries)) {
        PartsScratch& s = scratch.parts;
        for (int t = 0; t < queries; ++t) split_wide(q[t], head.d, s.query_high.data() + t * head.d, s.query_low.data() + t * head.d);
        return;
    }
    split_queries(q, queries, head.d, scratch.matrix);
    amx_configure_attention(std::min(16, queries));
}
#endif

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
    const int queries = nodes * per_group;
    const auto range = [&](int begin, int end, float* out, size_t stride) {
#if defined(FS_AMX)
        if constexpr (sizeof(T) == 2) {
            if (in_parts(a, head)) {
                if (few_queries(head, queries)) return score_range_parts(head, queries, begin, end, out, static_cast<int>(stride), scratch.parts);
                return score_range_amx(head, queries, begin, end, out, static_cast<int>(stride), scratch.matrix);
            }
        }
#endif
        score_range(head, q, queries, begin, end, out, stride, scratch.keys.data());
    };
#if defined(FS_AMX)
    if constexpr (sizeof(T) == 2) {
        if (in_parts(a, head)) prepare_queries(head, q, queries, scratch);
    }
#endif
    if (seen.dense_high > seen.dense_low) {
        const int begin = seen.dense_low / 16 * 16;
        range(begin, seen.dense_high, scores + (begin - base), kChunk);
    }
    if (!seen.tree) return;
    const int committed = step.kv_lens[u.row], tree_base = committed / 16 * 16;
    const int row_nodes = step.row_ptr[u.row + 1] - step.row_ptr[u.row];
    range(tree_base, committed + row_nodes, scratch.tree.data(), kTreeScores);
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

#if defined(FS_AMX)
// The same in bfloat16 parts, in blocks of 32 positions. In a tree, the blocks that hold a node's own path are its own.
class ValuesInParts {
  public:
    ValuesInParts(const AttentionLayer& a, const HeadView<uint16_t>& head, const AttentionUnit& u, const Visible& seen, int base,
                  AttentionScratch& scratch, const Partial& out)
        : a_(a), head_(head), u_(u), seen_(seen), base_(base), scratch_(scratch), out_(out), per_group_(a.q_heads / a.store->kv_heads),
          queries_((u.node_end - u.node_begin) * per_group_), few_(few_queries(head, queries_)) {}

    void run() {
        for (int t = 0; t < queries_; ++t) split_query_weights(t, seen_.low[t / per_group_] - base_, seen_.high[t / per_group_] - base_);
        const bool causal = a_.step->causal[u_.row] != 0;
        const int committed = a_.step->kv_lens[u_.row];
        // Blocks that all nodes read by position: [first, shared).
        const int first = seen_.dense_low / kPairBlock * kPairBlock, end = std::max(seen_.dense_high, first);
        const int shared = causal ? end : std::max(std::min(end, committed / kPairBlock * kPairBlock), first);
        const auto by_position = [&](int p) { return p >= seen_.dense_low && p < seen_.dense_high ? head_.value(p) : nullptr; };
        accumulate(0, queries_, first, shared, by_position, true);
        if (causal) return;
        if (!few_) amx_configure_attention(per_group_);
        int path[kMaxTree];
        const int from = std::max(base_, committed / kPairBlock * kPairBlock);
        for (int i = 0; i < u_.node_end - u_.node_begin; ++i) {
            if (seen_.high[i] <= from) continue;
            spell_path(static_cast<uint64_t>(a_.step->words[u_.node_begin + i]), path);
            const auto own = [&](int p) -> const uint16_t* {
                if (p < seen_.low[i] || p >= seen_.high[i]) return nullptr;
                return head_.value(p < committed ? p : committed + path[p - committed]);
            };
            accumulate(i * per_group_, per_group_, from, seen_.high[i], own, false);
        }
    }

  private:
    void split_query_weights(int t, int low, int high) {
        float* scores = scratch_.scores.data() + static_cast<size_t>(t) * kChunk;
        if (!few_) {
            split_weights(scores, low, high, scratch_.matrix.weight_high.data() + t * kChunk, scratch_.matrix.weight_low.data() + t * kChunk);
            return;
        }
        for (int i = 0; i < kChunk; i += 16) {
            if (high <= low || i < low / 16 * 16 || i >= high) store(scores + i, zero());
        }
        split_wide(scores, kChunk, scratch_.parts.weight_high.data() + t * kChunk, scratch_.parts.weight_low.data() + t * kChunk);
    }

    // sums of queries [first_query, + queries) += positions [begin, end), begin a multiple of 32; value(p) is null where there is no key.
    template <class Value>
    void accumulate(int first_query, int queries, int begin, int end, Value&& value, bool fresh) {
        const int d = head_.d, blocks = std::max(0, (end - begin + kPairBlock - 1) / kPairBlock), at = blocks > 0 ? begin - base_ : 0;
        const uint16_t* rows[kPairBlock];
        MatrixScratch& m = scratch_.matrix;
        for (int b = 0; b < blocks; ++b) {
            for (int i = 0; i < kPairBlock; ++i) rows[i] = value(begin + b * kPairBlock + i);
            if (few_) {
                value_block_parts(first_query, queries, at + b * kPairBlock, rows, d, out_.sums, out_.padded, scratch_.parts);
            } else {
                pack_values(rows, d, m.values.data() + b * kPairBlock * d);
            }
        }
        if (few_) return;
        for (int t = first_query; t < first_query + queries; t += 16) {
            value_blocks(m.weight_high.data() + t * kChunk + at, m.weight_low.data() + t * kChunk + at, m.values.data(), blocks, d,
                         out_.sums + t * out_.padded, out_.padded, fresh);
        }
    }

    const AttentionLayer& a_;
    const HeadView<uint16_t>& head_;
    const AttentionUnit& u_;
    const Visible& seen_;
    const int base_;
    AttentionScratch& scratch_;
    const Partial& out_;
    const int per_group_, queries_;
    const bool few_;
};
#endif

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
#if defined(FS_AMX)
    if constexpr (sizeof(T) == 2) {
        if (in_parts(a, head)) return ValuesInParts(a, head, u, seen, base, scratch, out).run();
    }
#endif
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
#if defined(FS_AMX)
    const FlushSubnormals flush;
#endif
    for (int unit = begin; unit < end; ++unit) {
        if (a.store->bf16 != 0) {
            attend_unit_as<uint16_t>(a, unit, end, scratch);
        } else {
            attend_unit_as<float>(a, unit, end, scratch);
        }
    }
#if defined(FS_AMX)
    if (a.store->bf16 != 0) amx_release();
#endif
}

}  // namespace fs::FS_ISA
