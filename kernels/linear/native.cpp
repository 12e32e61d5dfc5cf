// linear: tiles of 16 outputs by up to 16 rows. The formula is in __init__.py beside this file.
//
// A row's result is a fixed chain of float operations over the blocks (or, for dense matrices, over the inputs) in ascending
// order; the tile sizes below decide only which rows travel together, so they never change a bit of it.
#pragma once

#include <algorithm>

#include "buffer.h"
#include "kernels/linear/activations.h"
#include "lanes.h"
#include "weights.h"

namespace fs::FS_ISA {

template <Kind K, int R, int Step>
FS_INLINE void block_dots(const Codes& w, const uint8_t* rows, I* dot) {
    if constexpr (K <= Kind::Q4Offset) {
        dot_nibbles<R, Step>(w, reinterpret_cast<const int8_t*>(rows), dot);
    } else {
        dot_bytes<R, Step>(w, reinterpret_cast<const int8_t*>(rows), dot);
    }
}

// Dot products of R rows whose codes and fields begin here, whole numbers. High and low codes of a row in parts are two rows to the
// instruction, and neither waits for the other.
template <Kind K, int R, Fine A>
FS_INLINE void whole_dots(const Codes& w, const uint8_t* rows, const uint8_t* fields, I (&dot)[R]) {
    const auto whole = [fields](size_t offset, int r) { return *reinterpret_cast<const int32_t*>(fields + offset + kActField * static_cast<size_t>(r)); };
    const auto start = [&](int r) {
        if constexpr (K == Kind::Q4Offset) return set1(whole(kActMinus8, r));
        if constexpr (K == Kind::Q8Min) return set1(kBytesShift == 0 ? 0 : -whole(kActMinus128, r));
        if constexpr (K == Kind::Q8Offset) return set1(kBytesShift == 0 ? whole(kActMinus128, r) : 0);
        return set1(0);
    };
    if constexpr (in_parts(A)) {
        I parts[2 * R];
        each<R>([&](auto r) __attribute__((always_inline)) {
            parts[2 * r] = set1(0);
            parts[2 * r + 1] = start(r);
        });
        block_dots<K, 2 * R, kActLow>(w, rows, parts);
        each<R>([&](auto r) __attribute__((always_inline)) { dot[r] = join_parts<A>(parts[2 * r], parts[2 * r + 1]); });
    } else {
        each<R>([&](auto r) __attribute__((always_inline)) { dot[r] = start(r); });
        block_dots<K, R, kActRow>(w, rows, dot);
    }
}

// `rows`: the first row's codes, `fields`: its fields in the same record. Rows in parts go four at a time: that many sums stay in registers.
template <Kind K, int R, Fine A>
FS_INLINE void quantised_block(const uint8_t* codes, const uint8_t* scale, const uint8_t* minimum, const uint8_t* rows, const uint8_t* fields,
                               F (&acc)[R]) {
    Codes w;
    if constexpr (K <= Kind::Q4Offset) {
        unpack_nibbles(codes, w);
    } else {
        unpack_bytes(codes, w);
    }
    const F d = load_half(reinterpret_cast<const uint16_t*>(scale));
    F m = zero();
    if constexpr (K == Kind::Q4Min) m = load_half(reinterpret_cast<const uint16_t*>(minimum));
    if constexpr (K == Kind::Q8Min) m = load(reinterpret_cast<const float*>(minimum));
    constexpr int kStep = in_parts(A) ? 4 : 8;
    each<(R + kStep - 1) / kStep>([&](auto group) __attribute__((always_inline)) {
        constexpr int kFirst = group * kStep, kCount = R - kFirst < kStep ? R - kFirst : kStep;
        const uint8_t* own = fields + kActField * kFirst;
        I dot[kCount];
        whole_dots<K, kCount, A>(w, rows + kActRow * kFirst, own, dot);
        each<kCount>([&](auto r) __attribute__((always_inline)) {
            const auto* real = reinterpret_cast<const float*>(own + kActField * static_cast<size_t>(r));
            F& sum = acc[kFirst + r];
            sum = fma(mul(d, set1(real[0])), to_float(dot[r]), sum);
            if constexpr (K == Kind::Q4Min || K == Kind::Q8Min) sum = fma(m, set1(real[1]), sum);
        });
    });
}

// Bytes ahead of the reader that are asked for: far ahead into the second-level cache, then into the first. (One distance for both costs
// 5 to 10 % of a one-row pass; leaving it to the hardware 25 %.)
constexpr size_t kPrefetchFar = 7680, kPrefetchNear = 1280;

// R rows; `rows` and `fields` are the first one's in its group's first record.
template <Kind K, int R, Fine A>
void quantised_tile(const uint8_t* w, int pairs, const uint8_t* rows, const uint8_t* fields, F* out) {
    constexpr size_t codes = code_bytes(K), record = record_bytes(K);
    constexpr size_t minimum_bytes = K == Kind::Q8Min ? 64 : 32;
    F acc[R];
    for (int r = 0; r < R; ++r) acc[r] = zero();
    for (int p = 0; p < pairs; ++p, w += record, rows += 2 * kActRecord, fields += 2 * kActRecord) {
        if constexpr (R <= 8) {
#pragma GCC unroll 20
            for (size_t line = 0; line < record; line += 64) {
                prefetch_far(w + kPrefetchFar + line);
                prefetch(w + kPrefetchNear + line);
            }
        }
        const uint8_t* scale = w + 2 * codes;
        quantised_block<K, R, A>(w, scale, scale + 64, rows, fields, acc);
        quantised_block<K, R, A>(w + codes, scale + 32, scale + 64 + minimum_bytes, rows + kActRecord, fields + kActRecord, acc);
    }
    for (int r = 0; r < R; ++r) out[r] = acc[r];
}

template <Kind K>
inline F load_dense(const uint8_t* w, size_t at) {
    if constexpr (K == Kind::F32) return load(reinterpret_cast<const float*>(w) + at);
    if constexpr (K == Kind::F16) return load_half(reinterpret_cast<const uint16_t*>(w) + at);
    return load_bf16(reinterpret_cast<const uint16_t*>(w) + at);
}

template <Kind K, int R>
void dense_tile(const uint8_t* w, int in, const float* x, size_t stride, F* out) {
    F acc[R];
    for (int r = 0; r < R; ++r) acc[r] = zero();
    for (int k = 0; k < in; ++k) {
        const F v = load_dense<K>(w, static_cast<size_t>(k) * kTile);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) acc[r] = fma(v, set1(x[static_cast<size_t>(r) * stride + static_cast<size_t>(k)]), acc[r]);
    }
    for (int r = 0; r < R; ++r) out[r] = acc[r];
}

template <Kind K, int R>
inline void tile_rows(const Packed& w, int tile, const Rows& x, int row, F* acc) {
    if constexpr (K <= Kind::Q8Offset) {
        const auto in_group = static_cast<size_t>(row % kGroup);
        const uint8_t* group = x.quantised + x.group_bytes * static_cast<size_t>(row / kGroup);
        const uint8_t *rows = group + kActRow * in_group, *fields = group + kActFields + kActField * in_group;
        if (w.fine == Fine::Bits8) {
            quantised_tile<K, R, Fine::Bits8>(w.tile(tile), w.pairs, rows, fields, acc);
        } else if (w.fine == Fine::Bits12) {
            quantised_tile<K, R, kMiddle<K>>(w.tile(tile), w.pairs, rows, fields, acc);
        } else {
            quantised_tile<K, R, Fine::Bits16>(w.tile(tile), w.pairs, rows, fields, acc);
        }
    } else {
        dense_tile<K, R>(w.tile(tile), w.in, x.values + x.stride * static_cast<size_t>(row), x.stride, acc);
    }
}

template <Kind K>
void tile_any(const Packed& w, int tile, const Rows& x, int row, int rows, F* acc) {
    while (rows > 0) {
        int step;
        if (rows >= kRowTileWide && !in_parts(w.fine)) {  // rows in parts need twice the registers
            tile_rows<K, kRowTileWide>(w, tile, x, row, acc);
            step = kRowTileWide;
        } else if (rows >= kRowTile) {
            tile_rows<K, kRowTile>(w, tile, x, row, acc);
            step = kRowTile;
        } else {
            step = rows;
            switch (rows) {
                case 1: tile_rows<K, 1>(w, tile, x, row, acc); break;
                case 2: tile_rows<K, 2>(w, tile, x, row, acc); break;
                case 3: tile_rows<K, 3>(w, tile, x, row, acc); break;
                case 4: tile_rows<K, 4>(w, tile, x, row, acc); break;
                case 5: tile_rows<K, 5>(w, tile, x, row, acc); break;
                case 6: tile_rows<K, 6>(w, tile, x, row, acc); break;
                default: tile_rows<K, 7>(w, tile, x, row, acc); break;
            }
        }
        row += step;
        rows -= step;
        acc += step;
    }
}

}  // namespace fs::FS_ISA

#include "kernels/linear/amx.h"
#include "kernels/linear/amx_few.h"

namespace fs::FS_ISA {

// acc[0..rows) = rows row..row+rows of x times the 16 outputs of `tile`. rows <= 16, all in one group of 16.
inline void accumulate(const Packed& w, int tile, const Rows& x, int row, int rows, F* acc) {
    switch (w.kind) {
        case Kind::Q4Min: tile_any<Kind::Q4Min>(w, tile, x, row, rows, acc); break;
        case Kind::Q4Offset: tile_any<Kind::Q4Offset>(w, tile, x, row, rows, acc); break;
        case Kind::Q8Min: tile_any<Kind::Q8Min>(w, tile, x, row, rows, acc); break;
        case Kind::Q8Offset: tile_any<Kind::Q8Offset>(w, tile, x, row, rows, acc); break;
        case Kind::F32: tile_any<Kind::F32>(w, tile, x, row, rows, acc); break;
        case Kind::F16: tile_any<Kind::F16>(w, tile, x, row, rows, acc); break;
        case Kind::BF16: tile_any<Kind::BF16>(w, tile, x, row, rows, acc); break;
    }
}

inline void add_bias(const Packed& w, int tile, int rows, F* acc) {
    if (w.bias.empty()) return;
    const F bias = load(w.bias.data() + tile * kTile);
    for (int r = 0; r < rows; ++r) acc[r] = add(acc[r], bias);
}

// A thread's room for unpacked weight tiles.
struct LinearScratch {
    Buffer<uint8_t> codes;
};

// Calls sink(tile, row, rows, first, second) for tiles [begin, end) and all n rows, rows in groups of at most 16 so that a group stays
// in the first-level cache while the tiles pass by. `b`, when given, has the shape of `a` and the same input.
template <class Sink>
inline void linear_tiles_plain(const Packed& a, const Packed* b, const Rows& x, int n, int begin, int end, Sink&& sink) {
    F first[kGroup], second[kGroup];
    for (int row = 0; row < n; row += kGroup) {
        const int rows = n - row < kGroup ? n - row : kGroup;
        for (int tile = begin; tile < end; ++tile) {
            accumulate(a, tile, x, row, rows, first);
            add_bias(a, tile, rows, first);
            if (b != nullptr) {
                accumulate(*b, tile, x, row, rows, second);
                add_bias(*b, tile, rows, second);
            }
            sink(tile, row, rows, first, second);
        }
    }
}

#if defined(FS_AMX)
constexpr int kMatrixRows = kFewRows + 1;
constexpr int kGroupsAtOnce = 16;  // their rows stay in the second-level cache while the tiles pass by

template <class Sink>
inline void linear_tiles_amx(const Packed& a, const Packed* b, const Rows& x, int n, int begin, int end, LinearScratch& scratch, Sink&& sink) {
    const size_t size_a = unpacked_bytes(a), size_b = b != nullptr ? unpacked_bytes(*b) : 0;
    const int mask = n <= kGroup ? kRing - 1 : kWhole;
    grow(scratch.codes, size_a + size_b);
    const Unpacked codes_a{scratch.codes.data(), mask}, codes_b{scratch.codes.data() + size_a, mask};
    F first[kGroup], second[kGroup];
    amx_configure_linear(a.fine);
    for (int from = 0; from < n; from += kGroupsAtOnce * kGroup) {
        const int to = std::min(from + kGroupsAtOnce * kGroup, n);
        for (int tile = begin; tile < end; ++tile) {
            for (int row = from; row < to; row += kGroup) {
                const int rows = std::min(kGroup, n - row);
                const uint8_t* group = x.quantised + x.group_bytes * static_cast<size_t>(row / kGroup);
                amx_tile(a, tile, codes_a, row == from, group, rows, first);
                add_bias(a, tile, rows, first);
                if (b != nullptr) {
                    amx_tile(*b, tile, codes_b, row == from, group, rows, second);
                    add_bias(*b, tile, rows, second);
                }
                sink(tile, row, rows, first, second);
            }
        }
    }
    amx_release();
}
#endif

#if defined(FS_AMX)
template <class Sink>
inline void linear_tiles_few(const Packed& a, const Packed* b, const uint8_t* image, int n, int begin, int end, Sink&& sink) {
    F first[kFewRows], second[kFewRows];
    few_configure(n, a.fine);
    for (int tile = begin; tile < end; ++tile) {
        few_tile_any(a, tile, image, n, first);
        add_bias(a, tile, n, first);
        if (b != nullptr) {
            few_tile_any(*b, tile, image, n, second);
            add_bias(*b, tile, n, second);
        }
        sink(tile, 0, n, first, second);
    }
    amx_release();
}
#endif

template <class Sink>
inline void linear_tiles(const Packed& a, const Packed* b, const Rows& x, int n, int begin, int end, LinearScratch& scratch, Sink&& sink) {
#if defined(FS_AMX)
    if (x.image != nullptr && is_quantised(a.kind) && (b == nullptr || is_quantised(b->kind))) {
        linear_tiles_few(a, b, x.image, n, begin, end, sink);
        return;
    }
    if (n >= kMatrixRows && is_quantised(a.kind) && (b == nullptr || is_quantised(b->kind))) {
        linear_tiles_amx(a, b, x, n, begin, end, scratch, sink);
        return;
    }
#else
    (void)scratch;
#endif
    linear_tiles_plain(a, b, x, n, begin, end, sink);
}

// y[n][stride] = rows of x times w; the columns behind the last output are left alone.
inline void linear_store(const Packed& w, const Rows& x, int n, int begin, int end, LinearScratch& scratch, float* y, size_t stride) {
    linear_tiles(w, nullptr, x, n, begin, end, scratch, [&](int tile, int row, int rows, const F* acc, const F*) {
        const int column = tile * kTile;
        for (int r = 0; r < rows; ++r) store_part(y + static_cast<size_t>(row + r) * stride + column, acc[r], w.out - column);
    });
}

// y[n][stride] += rows of x times w: the residual connection.
inline void linear_add(const Packed& w, const Rows& x, int n, int begin, int end, LinearScratch& scratch, float* y, size_t stride) {
    linear_tiles(w, nullptr, x, n, begin, end, scratch, [&](int tile, int row, int rows, const F* acc, const F*) {
        const int column = tile * kTile, width = w.out - column;
        for (int r = 0; r < rows; ++r) {
            float* target = y + static_cast<size_t>(row + r) * stride + column;
            store_part(target, add(load_part(target, width), acc[r]), width);
        }
    });
}

// y[n][stride] = silu(gate(x)) * up(x).
inline void linear_swiglu(const Packed& gate, const Packed& up, const Rows& x, int n, int begin, int end, LinearScratch& scratch, float* y,
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
inline void linear_best(const Packed& w, const Rows& x, int n, int begin, int end, LinearScratch& scratch, Best* best, float* y, size_t stride) {
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
