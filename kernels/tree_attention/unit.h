// What the attention of one unit works on: rows, heads and what each node sees. Knows positions; refuses to know values.
#pragma once

#include "buffer.h"
#include "kernels/tree_attention/plan.h"
#include "kernels/tree_attention/tiles.h"

namespace fs::FS_ISA {

constexpr int kTreeScores = kMaxTree + 16;

// A thread's room for scores.
struct ScoreScratch {
    Buffer<float> scores;  // [queries][kChunk] by position
    Buffer<float> tree;    // [queries][kTreeScores] of a tree's own nodes, as they lie

    void reserve(int queries) {
        grow(scores, static_cast<size_t>(queries) * kChunk);
        grow(tree, static_cast<size_t>(queries) * kTreeScores);
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
    const uint8_t* whole;  // queries as whole numbers, where the store is of bytes (whole.h)
};

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

// Each node's scores of its own path in a tree, from where they lie (keys from `tree_base` on) to their positions.
inline void pick_paths(const AttentionLayer& a, const AttentionUnit& u, const Visible& seen, int base, int tree_base, ScoreScratch& scratch) {
    const fs_step& step = *a.step;
    const int per_group = a.q_heads / a.store->kv_heads, committed = step.kv_lens[u.row];
    int path[kMaxTree];
    for (int i = 0; i < u.node_end - u.node_begin; ++i) {
        if (seen.high[i] <= seen.dense[i]) continue;
        spell_path(static_cast<uint64_t>(step.words[u.node_begin + i]), path);
        for (int t = i * per_group; t < (i + 1) * per_group; ++t) {
            const float* from = scratch.tree.data() + static_cast<size_t>(t) * kTreeScores + (committed - tree_base);
            float* to = scratch.scores.data() + static_cast<size_t>(t) * kChunk;
            for (int p = seen.dense[i]; p < seen.high[i]; ++p) to[p - base] = from[path[p - committed]];
        }
    }
}

}  // namespace fs::FS_ISA
