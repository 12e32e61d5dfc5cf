// Keys and values that are bytes with a step per token and head (kernels/whole_store): scores, softmax and values of one chunk.
//
// A block of 16 keys is to the queries what a tile of 16 outputs is to the rows of a linear layer, and so are 16 channels of the chunk's values
// to the weights of the softmax. Rows become whole numbers, their sums are exact in any order, and one fixed chain of float operations is behind
// each. So it does not matter which unit multiplies, nor that a tree's values are taken as they lie, with weight 0 for nodes that do not see them.
#pragma once

#include "kernels/linear/native.cpp"
#include "kernels/tree_attention/unit.h"

namespace fs::FS_ISA {

constexpr int kMostKeys = kChunk + kMaxTree;  // of one chunk's values: those by position, then a tree's
constexpr int kMostBlocks = kMostKeys / 16;
constexpr int kMostChannels = 512;

inline int rounded_up(int n, int to) { return (n + to - 1) / to * to; }

struct WholeScratch : ScoreScratch {
    Buffer<uint8_t> weights;  // the softmax's weights times the values' steps, as whole numbers
    Buffer<float> folded;     // [kGroup][kMostKeys] the same before
    Buffer<uint8_t> keys;     // [kMostBlocks] tiles of lines, when a head's are no whole spans
    Buffer<uint8_t> values;   // [D/16] tiles of lines

    void reserve(int queries, int d) {
        ScoreScratch::reserve(queries);
        grow(weights, rows_bytes(kMostKeys, queries));
        grow(folded, static_cast<size_t>(kGroup * kMostKeys));
        grow(keys, static_cast<size_t>(kMostBlocks * rounded_up(d, kSpan)) * 16);
        grow(values, static_cast<size_t>(rounded_up(d, 16) * kMostKeys));
    }
};

// 2^x for x <= 0, to 1e-7 of it. What is smaller than 2^-60 of the largest weight counts as that, which vanishes in every sum.
inline F power_of_two(F x) {
    x = max(x, set1(-60.0f));
    const F n = round_even(x), r = sub(x, n);
    F y = set1(0.0013264726f);
    y = fma(y, r, set1(0.009671513f));
    y = fma(y, r, set1(0.055507336f));
    y = fma(y, r, set1(0.24022242f));
    y = fma(y, r, set1(0.693147f));
    y = fma(y, r, set1(1.0f));
    return scale_by_power(y, n);
}

struct WholeQueries;

// One layer, row and key/value head of the store: blocks of 16 tokens, addressed by the logical key index of the first.
struct ByteView {
    using Scratch = WholeScratch;
    using Queries = WholeQueries;
    static F power(F x) { return power_of_two(x); }
    const uint8_t* k;
    const uint8_t* v;
    const int32_t* table;  // pages of the row
    size_t page_bytes;     // from page to page, all heads
    size_t block_bytes;
    int page_size;
    int d;

    ByteView(const AttentionLayer& a, const AttentionUnit& u) : page_size(a.store->page_size), d(a.store->head_dim) {
        block_bytes = static_cast<size_t>(d + 4) * 16;
        const size_t head_bytes = block_bytes * static_cast<size_t>(page_size / 16);
        page_bytes = head_bytes * static_cast<size_t>(a.store->kv_heads);
        const size_t base = static_cast<size_t>(a.layer) * static_cast<size_t>(a.store->pages) * page_bytes + head_bytes * static_cast<size_t>(u.head);
        k = static_cast<const uint8_t*>(a.store->k) + base;
        v = static_cast<const uint8_t*>(a.store->v) + base;
        table = a.step->page_table + static_cast<size_t>(u.row) * static_cast<size_t>(a.step->pages);
    }
    size_t block(int index) const {
        return static_cast<size_t>(table[index / page_size]) * page_bytes + static_cast<size_t>(index % page_size / 16) * block_bytes;
    }
    const uint8_t* keys(int index) const { return k + block(index); }
    const uint8_t* values(int index) const { return v + block(index); }
    const float* steps(const uint8_t* block) const { return reinterpret_cast<const float*>(block + static_cast<size_t>(d) * 16); }
    int spans() const { return (d + kSpan - 1) / kSpan; }
};

// Bytes of the queries of one tile of nodes and one key/value head.
inline size_t query_bytes(const AttentionPlan& plan, int d) { return rows_bytes(rounded_up(d, kBlock), plan.max_queries); }

inline void reserve_queries(const AttentionPlan& plan, const fs_store& store, Buffer<uint8_t>& whole) {
    if (store.kind == FS_STORE_BYTES) grow(whole, plan.tiles.size() * static_cast<size_t>(store.kv_heads) * query_bytes(plan, store.head_dim));
}

// The queries of one node that read key/value head `head`, rotated and scaled, as whole numbers; their steps are in powers of two.
inline void write_queries(const AttentionPlan& plan, const fs_store& store, int node, int head, int per_group, const float* q, Buffer<uint8_t>& whole) {
    const int d = store.head_dim, width = rounded_up(d, kBlock), tile = plan.tile_of_node[static_cast<size_t>(node)];
    const NodeTile& nodes = plan.tiles[static_cast<size_t>(tile)];
    const RowLayout layout(width, (nodes.end - nodes.begin) * per_group);
    uint8_t* to = whole.data() + static_cast<size_t>(tile * store.kv_heads + head) * query_bytes(plan, d);
    auto* fields = reinterpret_cast<RowFields*>(to + layout.code_bytes());
    for (int g = 0; g < per_group; ++g, q += d) {
        alignas(64) float row[kMostChannels];
        if (width != d) {
            std::memcpy(row, q, static_cast<size_t>(d) * sizeof(float));
            std::fill(row + d, row + width, 0.0f);
        }
        const int t = (node - nodes.begin) * per_group + g;
        quantise_row(width != d ? row : q, width, t, layout, to);
        fields[t].step *= 1.44269504f;
    }
}

// A unit's queries; while it lives, the matrix unit is set up for as many rows.
struct WholeQueries {
    Rows rows;
    int n;

    WholeQueries(const AttentionLayer& a, const ByteView& head, const AttentionUnit& u) {
        n = (u.node_end - u.node_begin) * (a.q_heads / a.store->kv_heads);
        const uint8_t* from = a.whole + static_cast<size_t>(u.tile * a.store->kv_heads + u.head) * query_bytes(*a.plan, head.d);
        rows.read(from, RowLayout(rounded_up(head.d, kBlock), n));
#if defined(FS_AMX)
        if (n >= kMatrixRows) amx_configure_linear(n);
#endif
    }
    ~WholeQueries() {
#if defined(FS_AMX)
        if (n >= kMatrixRows) amx_release();
#endif
    }
    WholeQueries(const WholeQueries&) = delete;
    WholeQueries& operator=(const WholeQueries&) = delete;
};

// Whole sums over 256 * high + low, as floats. (A set that takes bytes as they are has summed 128 too much for each number.)
FS_INLINE F whole_sums(const RowFields& row, I high, I low) {
    const I sums = add(times_256(high), low);
    return to_float(kLineShift == 0 ? add(sums, set1(256 * row.high + row.low)) : sums);
}

// sink(tile, row, sums) for n rows by `count` tiles of lines.
template <class Sink>
FS_INLINE void tile_sums(const uint8_t* const* tiles, int count, int spans, const Rows& x, int n, Sink&& sink) {
#if defined(FS_AMX)
    if (n >= kMatrixRows) {
        alignas(64) int32_t sums[4 * 256];
        const auto settle_tile = [&](int tile, int row, const int32_t* high) {
            const int32_t* low = high + (n <= kTogether ? 16 * n : 256);
            for (int r = 0; r < std::min(kGroup, n - row); ++r) sink(tile, row + r, whole_sums(x.fields[row + r], load(high + 16 * r), load(low + 16 * r)));
        };
        for (int row = 0; row < n; row += kGroup) {
            for (int tile = 0; tile < count; tile += 2) {
                if (tile + 1 < count) {
                    const AmxTiles<2> two{{tiles[tile], tiles[tile + 1]}, {}, 0, spans};
                    amx_group(Kind::Q8, two, false, n, x.row(row), x.part, sums);
                    settle_tile(tile + 1, row, sums + 512);
                } else {
                    const AmxTiles<1> one{{tiles[tile]}, {}, 0, spans};
                    amx_group(Kind::Q8, one, false, n, x.row(row), x.part, sums);
                }
                settle_tile(tile, row, sums);
            }
        }
        return;
    }
#endif
    for (int tile = 0; tile < count; ++tile) {
        for (int row = 0; row < n; row += kGroup) {
            row_steps(std::min(kGroup, n - row), [&](auto step, int at) {
                constexpr int R = decltype(step)::value;
                I high[R], low[R];
                line_sums<R, false>(tiles[tile], spans, x.row(row + at), x.part, high, low);
                for (int r = 0; r < R; ++r) sink(tile, row + at + r, whole_sums(x.fields[row + at + r], high[r], low[r]));
            });
        }
    }
}

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
