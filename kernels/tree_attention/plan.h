// How the attention of one step is cut into units of work. Knows rows, nodes and key counts; refuses to know values.
//
// Arithmetic is fixed by absolute position alone: keys are taken in chunks of kChunk positions; inside a chunk the softmax is plain
// (maximum, exponentials, sum), and chunks are joined in ascending order. A unit is either all chunks of some nodes or, when
// there are few nodes, one chunk of them, so that the threads share long contexts; the bits are the same.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "api.h"
#include "buffer.h"

namespace fs {

constexpr int kChunk = 128;   // positions per softmax chunk, a multiple of 16
constexpr int kMaxQueries = 96;  // query vectors (nodes x heads of a group) of one unit, more only when a group alone is larger
constexpr int kMaxTree = 64;  // nodes of a tree row

inline int bits(uint64_t word) { return __builtin_popcountll(word); }

struct AttentionUnit {
    int row;
    int head;         // key/value head
    int node_begin;   // nodes of the whole batch
    int node_end;
    int chunk_begin;  // chunks of absolute positions
    int chunk_end;
    int group;        // units that are joined at the end, -1 when the unit is alone
    int tile;         // of nodes
};

// Nodes of one row whose queries travel together.
struct NodeTile {
    int begin;
    int end;
};

struct AttentionGroup {
    int chunk_begin;
    int chunk_end;
    size_t partial;  // offset in floats of the first chunk's partial results
};

struct AttentionPlan {
    std::vector<AttentionUnit> units;
    std::vector<AttentionGroup> groups;
    std::vector<NodeTile> tiles;
    std::vector<int> tile_of_node;
    Buffer<float> partial;  // per group and chunk: a Partial (tiles.h)
    std::unique_ptr<std::atomic<int>[]> finished;  // per group
    size_t finished_size = 0;
    int max_queries = 1;
    int padded = 0;  // head dimension rounded up to whole vectors
};

// Keys node `node` sees: positions [0, seen). Window aside.
inline int keys_seen(const fs_step& step, int row, int node) {
    const int local = node - step.row_ptr[row];
    if (step.causal[row] != 0) return step.kv_lens[row] + local + 1;
    return step.kv_lens[row] + bits(static_cast<uint64_t>(step.words[node]));
}

// Floats of one chunk's result for some queries; see Partial in tiles.h.
inline size_t partial_floats(int queries, int padded) { return static_cast<size_t>(queries * padded + 2 * ((queries + 15) / 16 * 16)); }

inline int first_key(int seen, int window) { return window > 0 && seen > window ? seen - window : 0; }

inline void plan_attention(const fs_step& step, int q_heads, int kv_heads, int head_dim, int window, int threads, AttentionPlan* plan) {
    const int per_group = q_heads / kv_heads;
    const int nodes_per_unit = std::max(1, kMaxQueries / per_group);
    plan->units.clear();
    plan->groups.clear();
    plan->tiles.clear();
    plan->tile_of_node.clear();
    plan->max_queries = nodes_per_unit * per_group;
    plan->padded = (head_dim + 15) / 16 * 16;
    int tiles = 0;
    for (int s = 0; s < step.rows; ++s) tiles += (step.row_ptr[s + 1] - step.row_ptr[s] + nodes_per_unit - 1) / nodes_per_unit * kv_heads;
    const bool split = threads > 1 && tiles < 8 * threads;
    size_t partial = 0;
    for (int s = 0; s < step.rows; ++s) {
        for (int begin = step.row_ptr[s]; begin < step.row_ptr[s + 1]; begin += nodes_per_unit) {
            const int end = std::min(begin + nodes_per_unit, step.row_ptr[s + 1]);
            const auto tile = static_cast<int>(plan->tiles.size());
            plan->tiles.push_back({begin, end});
            plan->tile_of_node.insert(plan->tile_of_node.end(), static_cast<size_t>(end - begin), tile);
            int low = INT32_MAX, high = 0;
            for (int i = begin; i < end; ++i) {
                const int seen = keys_seen(step, s, i);
                low = std::min(low, first_key(seen, window));
                high = std::max(high, seen);
            }
            const int chunk_begin = low / kChunk, chunk_end = (high + kChunk - 1) / kChunk;
            if (!split || chunk_end - chunk_begin == 1) {
                for (int h = 0; h < kv_heads; ++h) plan->units.push_back({s, h, begin, end, chunk_begin, chunk_end, -1, tile});
                continue;
            }
            const auto group = static_cast<int>(plan->groups.size());
            for (int h = 0; h < kv_heads; ++h) {
                plan->groups.push_back({chunk_begin, chunk_end, partial});
                partial += static_cast<size_t>(chunk_end - chunk_begin) * partial_floats((end - begin) * per_group, plan->padded);
            }
            // The heads of a page lie behind each other, so all of them take a chunk before the next one is read.
            for (int c = chunk_begin; c < chunk_end; ++c) {
                for (int h = 0; h < kv_heads; ++h) plan->units.push_back({s, h, begin, end, c, c + 1, group + h, tile});
            }
        }
    }
    if (plan->partial.size() < partial) plan->partial.resize(partial);
    if (plan->finished_size < plan->groups.size()) {
        plan->finished_size = plan->groups.size();
        plan->finished = std::make_unique<std::atomic<int>[]>(plan->finished_size);
    }
    for (size_t g = 0; g < plan->finished_size; ++g) plan->finished[g].store(0, std::memory_order_relaxed);
}

}  // namespace fs
