// linear: tiles of 16 outputs by up to 16 rows. The formula is in __init__.py beside this file.
//
// A quantised row's result is two whole sums, exact in any order, and one fixed chain of float operations behind them; a dense row's a fixed
// chain over the inputs in ascending order. The tile sizes below decide only which rows travel together, so they never change a bit of it.
#pragma once

#include <algorithm>

#include "buffer.h"
#include "kernels/linear/activations.h"
#include "lanes.h"
#include "weights.h"

namespace fs::FS_ISA {

// Bytes ahead of the reader that are asked for: far ahead into the second-level cache, then into the first. (One distance for both costs
// 5 to 10 % of a one-row pass; leaving it to the hardware 25 %.)
constexpr size_t kPrefetchFar = 7680, kPrefetchNear = 1280;

template <size_t Bytes>
FS_INLINE void ask_ahead(const uint8_t* w, size_t near = kPrefetchNear) {
#pragma GCC unroll 16
    for (size_t line = 0; line < Bytes; line += kLineBytes) {
        prefetch_far(w + kPrefetchFar + line);
        prefetch(w + near + line);
    }
}

// A thread's room for weight tiles as lines of bytes.
struct LinearScratch {
    Buffer<uint8_t> lines;
};

// R rows, the first one's codes at `row`, by a tile of lines. Sums of few rows are taken in parts: independent chains hide the latency of the dot
// product, also where a neighbour on the same core leaves half of the window.
template <int R, bool Ahead>
FS_INLINE void line_sums(const uint8_t* lines, int spans, const uint8_t* row, size_t part, I (&high)[R], I (&low)[R]) {
    constexpr int kParts = std::max(kSumSets / R, 1);
    I sums[kParts][2 * R];
    each<kParts * 2 * R>([&](auto i) __attribute__((always_inline)) { sums[i / (2 * R)][i % (2 * R)] = set1(0); });
    for (int c = 0; c < spans; ++c, lines += kSpanBytes, row += 2 * part) {
        if constexpr (Ahead) ask_ahead<kSpanBytes>(lines);
        const auto* q = reinterpret_cast<const int8_t*>(row);
        each<16>([&](auto j) __attribute__((always_inline)) {
            const Line w = load_line(lines + kLineBytes * j);
            each<R>([&](auto r) __attribute__((always_inline)) {
                I(&own)[2 * R] = sums[j % kParts];
                own[2 * r] = FS_DOT_LINE(j, own[2 * r], w, q + kLineBytes * r);
                own[2 * r + 1] = FS_DOT_LINE(j, own[2 * r + 1], w, q + part + kLineBytes * r);
            });
        });
    }
    each<R>([&](auto r) __attribute__((always_inline)) {
        high[r] = sums[0][2 * r];
        low[r] = sums[0][2 * r + 1];
        each<kParts - 1>([&](auto p) __attribute__((always_inline)) {
            high[r] = add(high[r], sums[p + 1][2 * r]);
            low[r] = add(low[r], sums[p + 1][2 * r + 1]);
        });
    });
}

// Sums of bytes -> outputs; sets that take bytes as they are have summed 128 too much for each input.
template <int R>
FS_INLINE void settle_rows(const float* step, const RowFields* fields, const I (&high)[R], const I (&low)[R], F* acc) {
    const F steps = load(step);
    each<R>([&](auto r) __attribute__((always_inline)) {
        const RowFields& own = fields[r];
        acc[r] = kLineShift == 0 ? settle(steps, own, add(high[r], set1(own.high)), add(low[r], set1(own.low))) : settle(steps, own, high[r], low[r]);
    });
}

template <int R, bool Ahead>
void line_rows(const uint8_t* lines, const Packed& w, int tile, const Rows& x, int row, F* acc) {
    I high[R], low[R];
    line_sums<R, Ahead>(lines, w.spans, x.row(row), x.part, high, low);
    settle_rows<R>(w.step.data() + tile * kTile, x.fields + row, high, low, acc);
}

#if defined(FS_LOOK_UP)
// One or two rows straight from codes of 4 bits, four outputs a register: nothing is transposed but the sums.
template <int R>
void look_up_rows(const Packed& w, int tile, const Rows& x, int row, F* acc) {
    const uint8_t *record = w.tile(tile), *codes = x.row(row);
    Quarters high[R], low[R];
    for (int c = 0; c < w.spans; ++c, record += record_bytes(Kind::Q4), codes += x.span) {
        ask_ahead<record_bytes(Kind::Q4)>(record);
        each<8>([&](auto at) __attribute__((always_inline)) {
            constexpr size_t b = at / 4, g = at % 4;
            const Looked found = look_up(record + b * kCodeBytes + g * kLineBytes, record + kFactors + b * kFactorBytes + g * 16);
            each<R>([&](auto r) __attribute__((always_inline)) {
                const uint8_t* q = codes + kLineBytes * r + kBlock * b;
                dot_looked(high[r].v[g], found, q);
                dot_looked(low[r].v[g], found, q + x.part);
            });
        });
    }
    I sums[2][R];
    each<R>([&](auto r) __attribute__((always_inline)) {
        sums[0][r] = join_groups(high[r]);
        sums[1][r] = join_groups(low[r]);
    });
    settle_rows<R>(w.step.data() + tile * kTile, x.fields + row, sums[0], sums[1], acc);
}
#endif

template <Kind K>
inline F load_dense(const uint8_t* w, size_t at) {
    if constexpr (K == Kind::F32) return load(reinterpret_cast<const float*>(w) + at);
    if constexpr (K == Kind::F16) return load_half(reinterpret_cast<const uint16_t*>(w) + at);
    return load_bf16(reinterpret_cast<const uint16_t*>(w) + at);
}

template <Kind K, int R>
void dense_rows(const Packed& w, int tile, const Rows& x, int row, F* out) {
    F acc[R];
    for (int r = 0; r < R; ++r) acc[r] = zero();
    const uint8_t* values = w.tile(tile);
    const float* rows = x.values + x.stride * static_cast<size_t>(row);
    for (int k = 0; k < w.in; ++k) {
        const F v = load_dense<K>(values, static_cast<size_t>(k) * kTile);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) acc[r] = fma(v, set1(rows[static_cast<size_t>(r) * x.stride + static_cast<size_t>(k)]), acc[r]);
    }
    for (int r = 0; r < R; ++r) out[r] = acc[r];
}

// fn(integral_constant<R>, first row, sums) for rows [0, rows) in the largest steps there are.
template <class Fn>
FS_INLINE void row_steps(int rows, Fn&& fn) {
    int row = 0;
    for (; rows - row >= kRowTile; row += kRowTile) fn(std::integral_constant<int, kRowTile>{}, row);
    switch (rows - row) {
        case 1: fn(std::integral_constant<int, 1>{}, row); break;
        case 2: fn(std::integral_constant<int, 2>{}, row); break;
        case 3: fn(std::integral_constant<int, 3>{}, row); break;
#if FS_ROW_TILE > 4
        case 4: fn(std::integral_constant<int, 4>{}, row); break;
        case 5: fn(std::integral_constant<int, 5>{}, row); break;
        case 6: fn(std::integral_constant<int, 6>{}, row); break;
        case 7: fn(std::integral_constant<int, 7>{}, row); break;
#endif
        default: break;
    }
}

template <Kind K>
void dense_tile(const Packed& w, int tile, const Rows& x, int row, int rows, F* acc) {
    row_steps(rows, [&](auto count, int at) { dense_rows<K, decltype(count)::value>(w, tile, x, row + at, acc + at); });
}

// A tile as lines: as it lies, or expanded into the scratch.
inline const uint8_t* lines_of(const Packed& w, int tile, LinearScratch& scratch) {
    if (w.kind == Kind::Q8) return w.tile(tile);
    grow(scratch.lines, static_cast<size_t>(w.spans) * kSpanBytes);
    const uint8_t* record = w.tile(tile);
    for (int c = 0; c < w.spans; ++c, record += record_bytes(Kind::Q4)) {
        ask_ahead<record_bytes(Kind::Q4)>(record);
        expand_span(record, scratch.lines.data() + static_cast<size_t>(c) * kSpanBytes);
    }
    return scratch.lines.data();
}

inline void add_bias(const Packed& w, int tile, int rows, F* acc) {
    if (w.bias.empty()) return;
    const F bias = load(w.bias.data() + tile * kTile);
    for (int r = 0; r < rows; ++r) acc[r] = add(acc[r], bias);
}

// acc[0..rows) = rows row..row+rows of x, all in one group, times the 16 outputs of `tile`; `lines` as lines_of gives them, where it was asked.
inline void accumulate(const Packed& w, int tile, const uint8_t* lines, const Rows& x, int row, int rows, F* acc) {
    switch (w.kind) {
        case Kind::Q4:
#if defined(FS_LOOK_UP)
            if (lines == nullptr) {
                if (rows == 1) look_up_rows<1>(w, tile, x, row, acc);
                if (rows == 2) look_up_rows<2>(w, tile, x, row, acc);
                break;
            }
#endif
            row_steps(rows, [&](auto count, int at) { line_rows<decltype(count)::value, false>(lines, w, tile, x, row + at, acc + at); });
            break;
        case Kind::Q8: row_steps(rows, [&](auto count, int at) { line_rows<decltype(count)::value, true>(lines, w, tile, x, row + at, acc + at); }); break;
        case Kind::F32: dense_tile<Kind::F32>(w, tile, x, row, rows, acc); break;
        case Kind::F16: dense_tile<Kind::F16>(w, tile, x, row, rows, acc); break;
        case Kind::BF16: dense_tile<Kind::BF16>(w, tile, x, row, rows, acc); break;
    }
    add_bias(w, tile, rows, acc);
}

// Whether n rows need a matrix as lines.
inline bool needs_lines(const Packed& w, [[maybe_unused]] int n) {
#if defined(FS_LOOK_UP)
    if (w.kind == Kind::Q4 && n <= 2) return false;
#endif
    return is_quantised(w.kind);
}

// Calls sink(tile, row, rows, first, second) for tiles [begin, end) and all n rows, at most 16 at a time. `b`, when given, has the shape of `a` and the
// same input.
template <class Sink>
inline void linear_tiles_plain(const Packed& a, const Packed* b, const Rows& x, int n, int begin, int end, LinearScratch (&scratch)[2], Sink&& sink) {
    F first[kGroup], second[kGroup];
    for (int tile = begin; tile < end; ++tile) {
        const uint8_t* lines_a = needs_lines(a, n) ? lines_of(a, tile, scratch[0]) : nullptr;
        const uint8_t* lines_b = b != nullptr && needs_lines(*b, n) ? lines_of(*b, tile, scratch[1]) : nullptr;
        for (int row = 0; row < n; row += kGroup) {
            const int rows = std::min(kGroup, n - row);
            accumulate(a, tile, lines_a, x, row, rows, first);
            if (b != nullptr) accumulate(*b, tile, lines_b, x, row, rows, second);
            sink(tile, row, rows, first, second);
        }
    }
}

}  // namespace fs::FS_ISA

#include "kernels/linear/amx.h"

namespace fs::FS_ISA {

template <class Sink>
inline void linear_tiles(const Packed& a, const Packed* b, const Rows& x, int n, int begin, int end, LinearScratch (&scratch)[2], Sink&& sink) {
#if defined(FS_AMX)
    if (n >= kMatrixRows && is_quantised(a.kind) && (b == nullptr || b->kind == a.kind)) {
        linear_tiles_amx(a, b, x, n, begin, end, scratch, sink);
        return;
    }
#endif
    linear_tiles_plain(a, b, x, n, begin, end, scratch, sink);
}

// y[n][stride] = rows of x times w; the columns behind the last output are left alone.
inline void linear_store(const Packed& w, const Rows& x, int n, int begin, int end, LinearScratch (&scratch)[2], float* y, size_t stride) {
    linear_tiles(w, nullptr, x, n, begin, end, scratch, [&](int tile, int row, int rows, const F* acc, const F*) {
        const int column = tile * kTile;
        for (int r = 0; r < rows; ++r) store_part(y + static_cast<size_t>(row + r) * stride + column, acc[r], w.out - column);
    });
}

// y[n][stride] += rows of x times w: the residual connection.
inline void linear_add(const Packed& w, const Rows& x, int n, int begin, int end, LinearScratch (&scratch)[2], float* y, size_t stride) {
    linear_tiles(w, nullptr, x, n, begin, end, scratch, [&](int tile, int row, int rows, const F* acc, const F*) {
        const int column = tile * kTile, width = w.out - column;
        for (int r = 0; r < rows; ++r) {
            float* target = y + static_cast<size_t>(row + r) * stride + column;
            store_part(target, add(load_part(target, width), acc[r]), width);
        }
    });
}

// y[n][stride] = silu(gate(x)) * up(x).
inline void linear_swiglu(const Packed& gate, const Packed& up, const Rows& x, int n, int begin, int end, LinearScratch (&scratch)[2], float* y,
                          size_t stride) {
    linear_tiles(gate, &up, x, n, begin, end, scratch, [&](int tile, int row, int rows, const F* g, const F* u) {
        const int column = tile * kTile;
        for (int r = 0; r < rows; ++r) store_part(y + static_cast<size_t>(row + r) * stride + column, silu_mul(g[r], u[r]), gate.out - column);
    });
}

// The best output of each row so far, per lane: value and output index.
struct Best {
    F value;
    I index;
};

inline void best_reset(Best* best, int n) {
    for (int r = 0; r < n; ++r) best[r] = {set1(-__builtin_inff()), set1(0)};
}

// Keeps the largest output of each row (the lowest index on ties), and stores all outputs when y is given.
inline void linear_best(const Packed& w, const Rows& x, int n, int begin, int end, LinearScratch (&scratch)[2], Best* best, float* y, size_t stride) {
    linear_tiles(w, nullptr, x, n, begin, end, scratch, [&](int tile, int row, int rows, const F* acc, const F*) {
        const int column = tile * kTile;
        const int width = w.out - column;
        const M inside = first(width);
        const I index = add(iota(), set1(column));
        for (int r = 0; r < rows; ++r) {
            Best& b = best[row + r];
            const M better = both(inside, less(b.value, acc[r]));
            b.value = select(better, acc[r], b.value);
            b.index = select(better, index, b.index);
            if (y != nullptr) store_part(y + static_cast<size_t>(row + r) * stride + column, acc[r], width);
        }
    });
}

// Folds one thread's best into (value, index).
inline void best_fold(const Best& best, float* value, int32_t* index) {
    alignas(64) float values[16];
    alignas(64) int32_t indices[16];
    store(values, best.value);
    store(indices, best.index);
    for (int i = 0; i < 16; ++i) {
        if (values[i] > *value || (values[i] == *value && indices[i] < *index)) {
            *value = values[i];
            *index = indices[i];
        }
    }
}

}  // namespace fs::FS_ISA
