// Tiles of 16 outputs by 16 rows on the matrix unit (AMX int8): 64 inputs of a row's parts in one instruction, sums kept in the unit over all inputs.
//
// Weights of 4 bits are expanded to lines of bytes along with the first group of rows, while the weights behind them come from memory, and then
// used for the others. Up to eight rows both parts of all of them are one tile: a tree of drafts costs little more than its root.
#pragma once

#include "matrix_unit.h"

#if defined(FS_AMX)

#include "buffer.h"
#include "lanes.h"
#include "weights.h"

namespace fs::FS_ISA {

constexpr int kMatrixRows = 3;         // fewer are faster on the vector unit
constexpr int kTogether = kGroup / 2;  // up to so many rows, high and low parts share a tile
constexpr int kGroupsAtOnce = 16;      // their rows stay in the second-level cache while the tiles pass by

// Spans that are expanded ahead of their products: the unit cannot read what has just been stored without waiting for it.
constexpr int kAhead = 3, kRing = 4;
static_assert(kRing > kAhead);

// Tiles 0..3: sums of weight w's part p in 2 w + p. 4, 5: parts of rows. 6, 7: lines of weights.
inline void amx_configure_linear(int n) {
    const int rows = n <= kTogether ? 2 * n : std::min(n, kGroup);
    TileShapes shapes;
    for (int tile : {0, 1, 2, 3, 4, 5}) shapes.set(tile, rows, 64);
    for (int tile : {6, 7}) shapes.set(tile, 16, 64);
    amx_configure(shapes);
}

// One or two weight tiles side by side, as records and as lines.
template <int W>
struct AmxTiles {
    const uint8_t* record[W];
    uint8_t* lines[W];
    int mask;  // slot of span c in `lines` = c & mask
    int spans;
};

// sums[256 * (2 w + p)...]: part p of the rows by the 16 outputs of weight w; with one part, high and low rows behind each other.
// `First`: lines are made along the way, and the weights behind them asked for; else they lie there from the group before.
template <Kind K, int W, int Parts, bool First>
void amx_sums(const AmxTiles<W>& tiles, const uint8_t* rows, size_t part, int32_t* sums) {
    const auto slot = [&](int w, int c) __attribute__((always_inline)) { return tiles.lines[w] + static_cast<size_t>(c & tiles.mask) * kSpanBytes; };
    const auto expand = [&](int c) __attribute__((always_inline)) {
        if constexpr (K != Kind::Q4 || !First) return;
        if (c >= tiles.spans) return;
        each<W>([&](auto w) __attribute__((always_inline)) { expand_span(tiles.record[w] + static_cast<size_t>(c) * record_bytes(K), slot(w, c)); });
    };
    each<W * Parts>([&](auto i) __attribute__((always_inline)) { tile_zero<2 * (i / Parts) + i % Parts>(); });
    for (int c = 0; c < kAhead; ++c) expand(c);
    for (int c = 0; c < tiles.spans; ++c, rows += 2 * part) {
        if constexpr (First) {
            each<W>([&](auto w) __attribute__((always_inline)) {
                ask_ahead<record_bytes(K)>(tiles.record[w] + static_cast<size_t>(c) * record_bytes(K), kPrefetchNear + (K == Kind::Q4 ? kAhead * record_bytes(K) : 0));
            });
        }
        tile_load<4>(rows);
        if constexpr (Parts == 2) tile_load<5>(rows + part);
        each<W>([&](auto w) __attribute__((always_inline)) {
            tile_load<6 + w>(K == Kind::Q8 ? tiles.record[w] + static_cast<size_t>(c) * kSpanBytes : slot(w, c));
            tile_dot<2 * w, 4, 6 + w, true>();
            if constexpr (Parts == 2) tile_dot<2 * w + 1, 5, 6 + w, true>();
        });
        expand(c + kAhead);
    }
    each<W * Parts>([&](auto i) __attribute__((always_inline)) {
        constexpr int at = 2 * (i / Parts) + i % Parts;
        tile_store<at>(sums + 256 * at);
    });
}

template <int W>
inline void amx_group(Kind kind, const AmxTiles<W>& tiles, bool first, int n, const uint8_t* rows, size_t part, int32_t* sums) {
    const auto run = [&](auto is_first) {
        constexpr bool kFirst = decltype(is_first)::value;
        if (n <= kTogether) {
            if (kind == Kind::Q4) amx_sums<Kind::Q4, W, 1, kFirst>(tiles, rows, part, sums);
            if (kind == Kind::Q8) amx_sums<Kind::Q8, W, 1, kFirst>(tiles, rows, part, sums);
        } else {
            if (kind == Kind::Q4) amx_sums<Kind::Q4, W, 2, kFirst>(tiles, rows, part, sums);
            if (kind == Kind::Q8) amx_sums<Kind::Q8, W, 2, kFirst>(tiles, rows, part, sums);
        }
    };
    if (first) {
        run(std::true_type{});
    } else {
        run(std::false_type{});
    }
}

// The sums of weight w as outputs of rows [0, rows).
inline void amx_settle(const Packed& w, int tile, const int32_t* sums, int n, const RowFields* fields, int rows, F* acc) {
    const F step = load(w.step.data() + tile * kTile);
    const int32_t* low = sums + (n <= kTogether ? 16 * n : 256);
    for (int r = 0; r < rows; ++r) {
        acc[r] = settle(step, fields[r], add(load(sums + 16 * r), set1(fields[r].high)), add(load(low + 16 * r), set1(fields[r].low)));
    }
    add_bias(w, tile, rows, acc);
}

// Tiles side by side: of both matrices, or the next two of one.
template <class Sink>
inline void linear_tiles_amx(const Packed& a, const Packed* b, const Rows& x, int n, int begin, int end, LinearScratch (&scratch)[2], Sink&& sink) {
    const int mask = n <= kGroup ? kRing - 1 : -1;
    for (LinearScratch& s : scratch) grow(s.lines, static_cast<size_t>(std::max(a.spans, kRing)) * kSpanBytes);
    alignas(64) int32_t sums[4 * 256];
    F first[kGroup], second[kGroup];
    amx_configure_linear(n);
    for (int from = 0; from < n; from += kGroupsAtOnce * kGroup) {
        const int to = std::min(from + kGroupsAtOnce * kGroup, n);
        for (int tile = begin; tile < end; tile += b == nullptr ? 2 : 1) {
            const bool two = b != nullptr || tile + 1 < end;
            const Packed& other = b != nullptr ? *b : a;
            const int other_tile = b != nullptr ? tile : tile + 1;
            for (int row = from; row < to; row += kGroup) {
                const int rows = std::min(kGroup, n - row);
                if (two) {
                    const AmxTiles<2> tiles{{a.tile(tile), other.tile(other_tile)}, {scratch[0].lines.data(), scratch[1].lines.data()}, mask, a.spans};
                    amx_group(a.kind, tiles, row == from, n, x.row(row), x.part, sums);
                    amx_settle(other, other_tile, sums + 512, n, x.fields + row, rows, second);
                } else {
                    const AmxTiles<1> tiles{{a.tile(tile)}, {scratch[0].lines.data()}, mask, a.spans};
                    amx_group(a.kind, tiles, row == from, n, x.row(row), x.part, sums);
                }
                amx_settle(a, tile, sums, n, x.fields + row, rows, first);
                sink(tile, row, rows, first, second);
                if (two && b == nullptr) sink(tile + 1, row, rows, second, first);
            }
        }
    }
    amx_release();
}

}  // namespace fs::FS_ISA

#endif
