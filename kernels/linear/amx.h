// Tiles of 16 outputs by 16 rows on the matrix unit (AMX int8): the integer dot products of a block of 32 inputs in one instruction.
//
// The integers are exact and the float part is the same chain as in native.cpp, so the results are the same bits. Weight codes are
// unpacked to signed or unsigned bytes along with the first group of rows, while the weights behind them come from memory, and then used for the others.
#pragma once

#include "matrix_unit.h"

#if defined(FS_AMX)

#include "buffer.h"
#include "lanes.h"
#include "weights.h"

namespace fs::FS_ISA {

// Tiles 0, 1, 6: sums (16 rows of 16 int32). 2, 3, 7: activations (16 rows of 32 bytes). 4, 5: weights (8 rows of 16 x 4 bytes).
// Rows of 12 bits and their weights are twice as long: high codes against 16 times the weights, then low codes against the weights.
inline void amx_configure_linear(Fine fine, int rows = kGroup) {
    const bool twice = fine == Fine::Bits12;
    TileShapes shapes;
    for (int tile : {0, 1, 6}) shapes.set(tile, rows, 64);
    for (int tile : {2, 3, 7}) shapes.set(tile, rows, twice ? 64 : 32);
    for (int tile : {4, 5}) shapes.set(tile, twice ? 16 : 8, 64);
    amx_configure(shapes);
}

constexpr size_t kUnpackedBlock = 512;  // 8 lines of 4 inputs by 16 outputs
constexpr size_t unpacked_block(Fine fine) { return fine == Fine::Bits12 ? 2 * kUnpackedBlock : kUnpackedBlock; }
inline size_t unpacked_bytes(const Packed& w) { return static_cast<size_t>(w.pairs) * 2 * unpacked_block(w.fine); }

// Whether the codes that `unpack_block` writes are unsigned.
constexpr bool unpacks_unsigned(Kind kind, Fine fine) { return kind == Kind::Q8Min || (kind == Kind::Q4Min && fine == Fine::Bits12); }

// Codes of 4 bits as bytes behind 16 times the codes: of the upper ones these are there already.
template <Kind K>
inline void unpack_block_twice(const uint8_t* w, uint8_t* out) {
    const __m512i lower = _mm512_set1_epi8(15), upper = _mm512_set1_epi8(-16);
    const auto put = [&](int line, __m512i code, __m512i times16) {
        if constexpr (K == Kind::Q4Offset) {
            code = _mm512_sub_epi8(code, _mm512_set1_epi8(8));
            times16 = _mm512_xor_si512(times16, _mm512_set1_epi8(-128));  // 16 * (code - 8), as signed bytes
        }
        _mm512_store_si512(out + 64 * line, times16);
        _mm512_store_si512(out + kUnpackedBlock + 64 * line, code);
    };
    for (int j = 0; j < 4; ++j) {
        const __m512i raw = _mm512_loadu_si512(w + 64 * j);
        const __m512i low = _mm512_and_si512(raw, lower), high = _mm512_and_si512(raw, upper);
        put(j, low, _mm512_slli_epi16(low, 4));
        put(j + 4, _mm512_srli_epi16(high, 4), high);
    }
}

// One block's codes as bytes: unsigned for Q8Min, signed with the offset taken off for the kinds that have one, 0..15 for Q4Min.
// For rows of 12 bits 16 times the codes lie before them.
template <Kind K, Fine A>
inline void unpack_block(const uint8_t* w, uint8_t* out) {
    if constexpr (A == Fine::Bits12) return unpack_block_twice<K>(w, out);
    Codes codes;
    if constexpr (K <= Kind::Q4Offset) {
        unpack_nibbles(w, codes);
    } else {
        unpack_bytes(w, codes);
    }
    const __m512i offset = _mm512_set1_epi8(K == Kind::Q4Offset ? 8 : -128);
    for (int j = 0; j < 8; ++j) {
        __m512i line = codes.c[j];
        if constexpr (K == Kind::Q4Offset || K == Kind::Q8Offset) line = _mm512_sub_epi8(line, offset);
        _mm512_store_si512(out + 64 * j, line);
    }
}

// `dots`: the sums; of rows of 16 bits those of the high parts, behind them those of the low.
template <Kind K, Fine A, int N>
FS_INLINE void amx_float_part(const uint8_t* scale, const uint8_t* minimum, const uint8_t* fields, const int32_t* dots, F (&acc)[N]) {
    const F d = load_half(reinterpret_cast<const uint16_t*>(scale));
    F m = zero();
    if constexpr (K == Kind::Q4Min) m = load_half(reinterpret_cast<const uint16_t*>(minimum));
    if constexpr (K == Kind::Q8Min) m = load(reinterpret_cast<const float*>(minimum));
    each<N>([&](auto r) __attribute__((always_inline)) {
        const auto* row = reinterpret_cast<const float*>(fields + kActField * static_cast<size_t>(r));
        I dot = load(dots + 16 * r);
        if constexpr (A == Fine::Bits16) dot = join_parts<A>(dot, load(dots + 256 + 16 * r));
        acc[r] = fma(mul(d, set1(row[0])), to_float(dot), acc[r]);
        if constexpr (K == Kind::Q4Min || K == Kind::Q8Min) acc[r] = fma(m, set1(row[1]), acc[r]);
    });
}

// The dot products of one block (`codes` are its own), in tiles Sums, Rows and Columns; those of low parts of 16 bits in tiles 6 and 7.
template <Kind K, Fine A, int Sums, int Rows, int Columns>
FS_INLINE void amx_block(const uint8_t* group, const uint8_t* codes, int block, int32_t* dots) {
    constexpr bool is_unsigned = unpacks_unsigned(K, A);
    const uint8_t* rows = group + static_cast<size_t>(block) * kActRecord;
    tile_zero<Sums>();
    tile_load<Rows>(rows);
    tile_load<Columns>(codes);
    tile_dot<Sums, Rows, Columns, is_unsigned>();
    tile_store<Sums>(dots);
    if constexpr (A == Fine::Bits16) {
        tile_zero<6>();
        tile_load<7>(rows + kActLow);
        tile_dot<6, 7, Columns, is_unsigned>();
        tile_store<6>(dots + 256);
    }
}

// Pairs of blocks that are unpacked ahead of their products: the unit cannot read what has just been stored without waiting for it.
constexpr int kAhead = 3;

// Where a tile's codes are unpacked to: all of them, for groups to come, or a ring of the pairs in use.
struct Unpacked {
    uint8_t* codes;
    int mask;  // slot of pair p = p & mask

    template <Fine A>
    uint8_t* block(int b) const {
        return codes + static_cast<size_t>((b / 2 & mask) * 2 + b % 2) * unpacked_block(A);
    }
};
constexpr int kWhole = -1, kRing = 4;
static_assert(kRing > kAhead);

// N rows of one group (rows that are not there are zeros) by the 16 outputs of a tile. The matrix unit works one block ahead of the float part.
// `Unpack`: the codes are unpacked along the way, and the weights behind them asked for; else they lie there from the group before.
template <Kind K, Fine A, int N, bool Unpack>
void amx_tile_as(const uint8_t* w, Unpacked codes, int pairs, const uint8_t* group, F* out) {
    constexpr size_t record = record_bytes(K), minimum_bytes = K == Kind::Q8Min ? 64 : 32;
    alignas(64) int32_t even[A == Fine::Bits16 ? 512 : 256], odd[A == Fine::Bits16 ? 512 : 256];
    F acc[N];
    each<N>([&](auto r) __attribute__((always_inline)) { acc[r] = zero(); });
    const auto unpack = [&](int p) __attribute__((always_inline)) {
        if (!Unpack || p >= pairs) return;
        const uint8_t* from = w + static_cast<size_t>(p) * record;
        unpack_block<K, A>(from, codes.block<A>(2 * p));
        unpack_block<K, A>(from + code_bytes(K), codes.block<A>(2 * p + 1));
    };
    const auto dot_even = [&](int b) __attribute__((always_inline)) { amx_block<K, A, 0, 2, 4>(group, codes.block<A>(b), b, even); };
    const auto dot_odd = [&](int b) __attribute__((always_inline)) { amx_block<K, A, 1, 3, 5>(group, codes.block<A>(b), b, odd); };
    for (int p = 0; p < kAhead; ++p) unpack(p);
    dot_even(0);
    for (int p = 0; p < pairs; ++p) {
        const uint8_t* here = w + static_cast<size_t>(p) * record;
        const uint8_t *scale = here + 2 * code_bytes(K), *fields = group + static_cast<size_t>(2 * p) * kActRecord + kActFields;
        if constexpr (Unpack) {
#pragma GCC unroll 20
            for (size_t line = 0; line < record; line += 64) {
                prefetch_far(here + kPrefetchFar + line);
                prefetch(here + kPrefetchNear + kAhead * record + line);
            }
        }
        dot_odd(2 * p + 1);
        unpack(p + kAhead);
        amx_float_part<K, A, N>(scale, scale + 64, fields, even, acc);
        if (p + 1 < pairs) dot_even(2 * p + 2);
        amx_float_part<K, A, N>(scale + 32, scale + 64 + minimum_bytes, fields + kActRecord, odd, acc);
    }
    each<N>([&](auto r) __attribute__((always_inline)) { out[r] = acc[r]; });
}

// Row counts are rounded up to what is compiled; up to eight rows are amx_few.h's.
template <Kind K, Fine A>
inline void amx_tile_rows(const uint8_t* w, Unpacked codes, bool unpack, int pairs, const uint8_t* group, int rows, F* out) {
    if (unpack) {
        if (rows <= 12) {
            amx_tile_as<K, A, 12, true>(w, codes, pairs, group, out);
        } else {
            amx_tile_as<K, A, kGroup, true>(w, codes, pairs, group, out);
        }
    } else if (rows <= 4) {
        amx_tile_as<K, A, 4, false>(w, codes, pairs, group, out);
    } else if (rows <= 8) {
        amx_tile_as<K, A, 8, false>(w, codes, pairs, group, out);
    } else {
        amx_tile_as<K, A, kGroup, false>(w, codes, pairs, group, out);
    }
}

template <Kind K>
inline void amx_tile_of(const Packed& w, int tile, Unpacked codes, bool unpack, const uint8_t* group, int rows, F* out) {
    if (w.fine == Fine::Bits8) {
        amx_tile_rows<K, Fine::Bits8>(w.tile(tile), codes, unpack, w.pairs, group, rows, out);
    } else if (w.fine == Fine::Bits12) {
        amx_tile_rows<K, kMiddle<K>>(w.tile(tile), codes, unpack, w.pairs, group, rows, out);
    } else {
        amx_tile_rows<K, Fine::Bits16>(w.tile(tile), codes, unpack, w.pairs, group, rows, out);
    }
}

inline void amx_tile(const Packed& w, int tile, Unpacked codes, bool unpack, const uint8_t* group, int rows, F* out) {
    switch (w.kind) {
        case Kind::Q4Min: amx_tile_of<Kind::Q4Min>(w, tile, codes, unpack, group, rows, out); break;
        case Kind::Q4Offset: amx_tile_of<Kind::Q4Offset>(w, tile, codes, unpack, group, rows, out); break;
        case Kind::Q8Min: amx_tile_of<Kind::Q8Min>(w, tile, codes, unpack, group, rows, out); break;
        default: amx_tile_of<Kind::Q8Offset>(w, tile, codes, unpack, group, rows, out); break;
    }
}

}  // namespace fs::FS_ISA

#endif
