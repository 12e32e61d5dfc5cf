// Keys and values that are bytes with a step per token and head (kernels/whole_store): scores, softmax and values of one chunk.
//
// A block of 16 keys is to the queries what a tile of 16 outputs is to the rows of a linear layer, and so are 16 channels of the chunk's values
// to the weights of the softmax. Rows become whole numbers, their sums are exact in any order, and one fixed chain of float operations is behind
// each. So it does not matter which unit multiplies, nor that a tree's values are taken as they lie, with weight 0 for nodes that do not see them.
#pragma once

#include "kernels/tree_attention/whole_rows.h"

namespace fs::FS_ISA {

// Scores of logical keys [begin, end), begin a multiple of 16; whole vectors of 16 are written, lanes past `end` hold anything.
inline void whole_scores(const ByteView& head, const WholeQueries& q, int begin, int end, float* out, size_t out_stride, WholeScratch& scratch) {
    const uint8_t* tiles[kMostBlocks];
    const float* steps[kMostBlocks];
    const int count = (end - begin + 15) / 16;
    for (int b = 0; b < count; ++b) {
        tiles[b] = head.keys(begin + 16 * b);
        steps[b] = head.steps(tiles[b]);
        if (head.d % kSpan == 0) continue;
        // Lines behind the last channel are multiplied by zeros: they may be anything, but must be there.
        uint8_t* copy = scratch.keys.data() + static_cast<size_t>(b * head.spans()) * kSpanBytes;
        std::memcpy(copy, tiles[b], static_cast<size_t>(head.d) * 16);
        tiles[b] = copy;
    }
    tile_sums(tiles, count, head.spans(), q.rows, q.n, [&](int tile, int row, F sums) __attribute__((always_inline)) {
        store(out + static_cast<size_t>(row) * out_stride + 16 * tile, mul(mul(load(steps[tile]), set1(q.rows.fields[row].step)), sums));
    });
}

// Scores of all keys any node sees in the chunk, by position.
inline void chunk_scores(const AttentionLayer& a, const ByteView& head, const AttentionUnit& u, const Visible& seen, int base, const WholeQueries& q,
                         WholeScratch& scratch) {
    if (seen.dense_high > seen.dense_low) {
        const int begin = seen.dense_low / 16 * 16;
        whole_scores(head, q, begin, seen.dense_high, scratch.scores.data() + (begin - base), kChunk, scratch);
    }
    if (!seen.tree) return;
    const int committed = a.step->kv_lens[u.row], tree_base = committed / 16 * 16;
    const int row_nodes = a.step->row_ptr[u.row + 1] - a.step->row_ptr[u.row];
    whole_scores(head, q, tree_base, committed + row_nodes, scratch.tree.data(), kTreeScores, scratch);
    pick_paths(a, u, seen, base, tree_base, scratch);
}

inline __attribute__((always_inline)) void ask_for(const uint8_t* block, size_t bytes) {
    for (size_t byte = 0; byte < bytes; byte += kLineBytes) prefetch(block + byte);
}

// The logical keys whose values a chunk needs: those by position, and behind them (or alone) a tree's nodes.
struct ValueRange {
    int begin, end;

    ValueRange(const AttentionLayer& a, const AttentionUnit& u, const Visible& seen) {
        const int committed = a.step->kv_lens[u.row], nodes = a.step->row_ptr[u.row + 1] - a.step->row_ptr[u.row];
        const bool dense = seen.dense_high > seen.dense_low;
        begin = (dense ? seen.dense_low : committed) / 16 * 16;
        end = seen.tree ? committed + nodes : seen.dense_high;
        end = std::max(begin, end);
    }
};

// Values as tiles of lines, one for 16 channels, and their steps. Returns whether all of these are finite.
inline bool gather_values(const ByteView& head, const ValueRange& range, int spans, uint8_t* tiles, float* steps) {
    const int line = 4 * head.d;
    I most = set1(0);
    for (int index = range.begin; index < range.end; index += 16) {
        const uint8_t* block = head.values(index);
        const int at = index - range.begin;
        const F own = load(head.steps(block));
        store(steps + at, own);
        most = max(most, magnitude_bits(own));
        uint8_t* to = tiles + static_cast<size_t>(at) * 16;
        int c = 0;
        for (; c + static_cast<int>(kLineBytes) <= line; c += static_cast<int>(kLineBytes), to += static_cast<size_t>(spans) * kSpanBytes) {
            for (int g = 0; g < 4; ++g) std::memcpy(to + static_cast<size_t>(g) * kLineBytes, block + g * line + c, kLineBytes);
        }
        for (int g = 0; c < line && g < 4; ++g) std::memcpy(to + static_cast<size_t>(g) * kLineBytes, block + g * line + c, static_cast<size_t>(line - c));
    }
    return reduce_max(most) < kInfinityBits;
}

// What a chunk's values are multiplied with.
struct ChunkWeights {
    const ValueRange& range;
    int base;   // first position of the chunk
    int width;  // of a row, in keys of the range
    const float* steps;
    bool finite;  // all steps are numbers

    bool whole(int low, int dense) const { return finite && low == base && dense == base + kChunk && range.begin == base && width == kChunk; }
};

// One query's weights times steps at the places of the keys, 0 where its node does not see one; their largest magnitude, by its bits.
// `scores` by position, of which [low, high) are seen and [low, dense) lie by position; the others become weights where they are.
inline int32_t fold_weights(const ChunkWeights& c, int low, int dense, int high, float* scores, float* folded, float* top, float* mass) {
    const int begin = low / 16 * 16;
    if (dense <= low) dense = begin;
    const auto inside = [&](int position, int end) { return both(first(end - position), not_(first(low - position))); };
    F highest = set1(-__builtin_inff());
    for (int p = begin; p < high; p += 16) {
        F s = load(scores + (p - c.base));
        if (p < low || p + 16 > high) {
            s = select(inside(p, high), s, set1(-__builtin_inff()));
            store(scores + (p - c.base), s);
        }
        highest = max(s, highest);
    }
    *top = reduce_max(highest);
    const F m = set1(*top);
    F total = zero();
    I most = set1(0);
    int at = 0;
    for (; at < begin - c.range.begin; at += 16) store(folded + at, zero());
    for (int p = begin; p < high; p += 16) {
        const F w = power_of_two(sub(load(scores + (p - c.base)), m));
        total = add(total, w);
        if (p + 16 > dense) store(scores + (p - c.base), w);
        if (p >= dense) continue;
        F f = mul(w, load(c.steps + (p - c.range.begin)));
        if (p < low || p + 16 > dense) f = select(inside(p, dense), f, zero());
        most = max(most, magnitude_bits(f));
        store(folded + at, f);
        at += 16;
    }
    for (; at < c.width; at += 16) store(folded + at, zero());
    *mass = reduce_add(total);
    return reduce_max(most);
}

// The same where all of a whole chunk is seen and lies by position, and all steps are finite: nothing is asked in between, and scores stay in
// registers.
inline int32_t fold_whole_chunk(const float* steps, const float* scores, float* folded, float* top, float* mass) {
    constexpr int kVectors = kChunk / 16;
    F s[kVectors];
    each<kVectors>([&](auto i) __attribute__((always_inline)) { s[i] = load(scores + 16 * i); });
    F highest = set1(-__builtin_inff());
    each<kVectors>([&](auto i) __attribute__((always_inline)) { highest = max(s[i], highest); });
    *top = reduce_max(highest);
    const F m = set1(*top);
    F total = zero(), most = zero();
    each<kVectors>([&](auto i) __attribute__((always_inline)) {
        const F w = power_of_two(sub(s[i], m));
        total = add(total, w);
        const F f = mul(w, load(steps + 16 * i));
        most = max(f, most);
        store(folded + 16 * i, f);
    });
    *mass = reduce_add(total);
    const float largest = reduce_max(most);
    int32_t bits;
    std::memcpy(&bits, &largest, 4);
    return bits;
}

// The same of a tree's node's own path, from position `dense` on: weights to where the keys lie.
inline int32_t fold_path(const ChunkWeights& c, const int* path, int committed, int dense, int high, const float* weights, float* folded, int32_t most) {
    for (int p = dense; p < high; ++p) {
        const int at = committed + path[p - committed] - c.range.begin;
        const float f = weights[p - c.base] * c.steps[at];
        folded[at] = f;
        int32_t bits;
        std::memcpy(&bits, &f, 4);
        most = std::max(most, bits & 0x7FFFFFFF);
    }
    return most;
}

// Scores become weights, and those whole rows in `scratch.weights`; maxima and masses are written to `out`.
inline void chunk_weights(const AttentionLayer& a, const AttentionUnit& u, const Visible& seen, const ChunkWeights& c, int queries, const RowLayout& layout,
                          WholeScratch& scratch, const Partial& out) {
    const int per_group = a.q_heads / a.store->kv_heads, committed = a.step->kv_lens[u.row];
    int32_t most[kGroup];
    int path[kMaxTree];
    for (int group = 0; group < queries; group += kGroup) {
        const int n = std::min(kGroup, queries - group);
        for (int r = 0; r < n; ++r) {
            const int t = group + r, node = t / per_group, low = seen.low[node], dense = seen.dense[node], high = seen.high[node];
            float* scores = scratch.scores.data() + static_cast<size_t>(t) * kChunk;
            float* folded = scratch.folded.data() + r * kMostKeys;
            if (high <= low) {
                std::fill(folded, folded + c.width, 0.0f);
                out.top[t] = -__builtin_inff();
                out.mass[t] = 0.0f;
                most[r] = 0;
                continue;
            }
            if (c.whole(low, dense)) {
                most[r] = fold_whole_chunk(c.steps, scores, folded, &out.top[t], &out.mass[t]);
                continue;
            }
            most[r] = fold_weights(c, low, dense, high, scores, folded, &out.top[t], &out.mass[t]);
            if (high <= dense) continue;
            spell_path(static_cast<uint64_t>(a.step->words[u.node_begin + node]), path);
            most[r] = fold_path(c, path, committed, dense, high, scores, folded, most[r]);
        }
        for (int r = 0; r < n; ++r) quantise_row(scratch.folded.data() + r * kMostKeys, c.width, group + r, layout, scratch.weights.data(), most[r]);
    }
}

inline void attend_chunk(const AttentionLayer& a, const ByteView& head, const AttentionUnit& u, int chunk, const WholeQueries& q, WholeScratch& scratch,
                         const Partial& out) {
    const int base = chunk * kChunk;
    const Visible seen(a, u, base);
    const ValueRange range(a, u, seen);
    for (int index = range.begin; index < range.end; index += 16) ask_for(head.values(index), head.block_bytes);
    chunk_scores(a, head, u, seen, base, q, scratch);
    const int width = rounded_up(range.end - range.begin, kBlock), spans = (width + kSpan - 1) / kSpan, count = out.padded / 16;
    alignas(64) float steps[kMostKeys];
    const bool finite = gather_values(head, range, spans, scratch.values.data(), steps);
    const RowLayout layout(width, q.n);
    chunk_weights(a, u, seen, {range, base, width, steps, finite}, q.n, layout, scratch, out);
    Rows rows;
    rows.read(scratch.weights.data(), layout);
    const uint8_t* tiles[kMostChannels / 16];
    for (int c = 0; c < count; ++c) tiles[c] = scratch.values.data() + static_cast<size_t>(c * spans) * kSpanBytes;
    tile_sums(tiles, count, spans, rows, q.n, [&](int tile, int row, F sums) __attribute__((always_inline)) {
        store(out.sums + static_cast<size_t>(row) * static_cast<size_t>(out.padded) + 16 * tile, mul(set1(rows.fields[row].step), sums));
    });
}

// Asks for the first keys of a unit that this thread will take next.
inline void prefetch_unit(const AttentionLayer& a, const ByteView& head, const AttentionUnit& u) {
    const int begin = u.chunk_begin * kChunk;
    const int end = std::min(begin + 16 * kKeyTile, a.step->kv_lens[u.row]);
    for (int index = begin; index < end; index += 16) {
        ask_for(head.keys(index), head.block_bytes);
    }
}

}  // namespace fs::FS_ISA
