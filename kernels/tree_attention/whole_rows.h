// Rows of whole numbers by lines of bytes in a paged store: what queries and weights, keys and values have in common in attention.
//
// Knows blocks of 16 tokens (kernels/whole_store), tiles of lines and the linear layer's sums of them; refuses to know chunks and softmax.
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

}  // namespace fs::FS_ISA
