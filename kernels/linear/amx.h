// Tiles of 16 outputs by 16 rows on the matrix unit (AMX int8): the integer dot products of a block of 32 inputs in one instruction.
//
// The integers are exact and the float part is the same chain as in native.cpp, so the results are the same bits. Weight codes are
// unpacked to signed or unsigned bytes once per tile and then used for all rows.
#pragma once

#include "matrix_unit.h"

#if defined(FS_AMX)

#include "buffer.h"
#include "lanes.h"
#include "weights.h"

namespace fs::FS_ISA {

// Tiles 0, 1, 6: sums (16 rows of 16 int32). 2, 3, 7: activations (16 rows of 32 bytes). 4, 5: weights (8 rows of 16 x 4 bytes).
inline void amx_configure_linear() {
    TileShapes shapes;
    for (int tile : {0, 1, 6}) shapes.set(tile, 16, 64);
    for (int tile : {2, 3, 7}) shapes.set(tile, 16, 32);
    for (int tile : {4, 5}) shapes.set(tile, 8, 64);
    amx_configure(shapes);
}

constexpr size_t kUnpackedBlock = 512;  // 8 lines of 4 inputs by 16 outputs

inline size_t unpacked_bytes(const Packed& w) { return static_cast<size_t>(w.pairs) * 2 * kUnpackedBlock; }

// One block's codes as bytes: unsigned for Q8Min, signed with the offset taken off for the kinds that have one, 0..15 for Q4Min.
template <Kind K>
inline void unpack_block(const uint8_t* w, uint8_t* out) {
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

template <Kind K>
void unpack_tile_as(const uint8_t* w, int pairs, uint8_t* out) {
    for (int p = 0; p < pairs; ++p, w += record_bytes(K), out += 2 * kUnpackedBlock) {
        for (size_t line = 0; line < record_bytes(K); line += 64) prefetch_far(w + kPrefetchFar + line);
        unpack_block<K>(w, out);
        unpack_block<K>(w + code_bytes(K), out + kUnpackedBlock);
    }
}

inline void unpack_tile(const Packed& w, int tile, uint8_t* out) {
    switch (w.kind) {
        case Kind::Q4Min: unpack_tile_as<Kind::Q4Min>(w.tile(tile), w.pairs, out); break;
        case Kind::Q4Offset: unpack_tile_as<Kind::Q4Offset>(w.tile(tile), w.pairs, out); break;
        case Kind::Q8Min: unpack_tile_as<Kind::Q8Min>(w.tile(tile), w.pairs, out); break;
        default: unpack_tile_as<Kind::Q8Offset>(w.tile(tile), w.pairs, out); break;
    }
}

// `dots`: the sums, behind them those of the low parts where rows are wide.
template <Kind K, bool Wide>
inline void amx_float_part(const uint8_t* scale, const uint8_t* minimum, const uint8_t* rows, const int32_t* dots, F (&acc)[kGroup]) {
    const F d = load_half(reinterpret_cast<const uint16_t*>(scale));
    F m = zero();
    if constexpr (K == Kind::Q4Min) m = load_half(reinterpret_cast<const uint16_t*>(minimum));
    if constexpr (K == Kind::Q8Min) m = load(reinterpret_cast<const float*>(minimum));
#pragma GCC unroll 16
    for (int r = 0; r < kGroup; ++r) {
        const auto* fields = reinterpret_cast<const float*>(rows + kActRow * static_cast<size_t>(r) + kActScale);
        I dot = load(dots + 16 * r);
        if constexpr (Wide) dot = add(times255(dot), load(dots + 256 + 16 * r));
        acc[r] = fma(mul(d, set1(fields[0])), to_float(dot), acc[r]);
        if constexpr (K == Kind::Q4Min || K == Kind::Q8Min) acc[r] = fma(m, set1(fields[1]), acc[r]);
    }
}

// The dot products of one block, in tiles Sums, Rows and Columns; those of the low parts in tiles 6 and 7.
template <Kind K, bool Wide, int Sums, int Rows, int Columns>
inline void amx_block(const uint8_t* group, const uint8_t* codes, size_t part, int block, int32_t* dots) {
    const uint8_t* rows = group + static_cast<size_t>(block) * kActRecord;
    tile_zero<Sums>();
    tile_load<Rows>(rows, kActRow);
    tile_load<Columns>(codes + static_cast<size_t>(block) * kUnpackedBlock, 64);
    tile_dot<Sums, Rows, Columns, K == Kind::Q8Min>();
    tile_store<Sums>(dots, 64);
    if constexpr (Wide) {
        tile_zero<6>();
        tile_load<7>(rows + part, kActRow);
        tile_dot<6, 7, Columns, K == Kind::Q8Min>();
        tile_store<6>(dots + 256, 64);
    }
}

// One tile of outputs by one group of 16 rows (rows that are not there are zeros). The matrix unit works one block ahead of the float part. `codes` is the tile as
// unpack_tile left it. (Unpacking each block right before its product costs 20 ns more a block: the unit then waits for the stores.)
template <Kind K, bool Wide>
void amx_tile_as(const uint8_t* w, const uint8_t* codes, int pairs, const uint8_t* group, size_t part, F* out) {
    constexpr size_t record = record_bytes(K), minimum_bytes = K == Kind::Q8Min ? 64 : 32;
    alignas(64) int32_t even[Wide ? 512 : 256], odd[Wide ? 512 : 256];
    F acc[kGroup];
    for (int r = 0; r < kGroup; ++r) acc[r] = zero();
    const auto dot_even = [&](int block) { amx_block<K, Wide, 0, 2, 4>(group, codes, part, block, even); };
    const auto dot_odd = [&](int block) { amx_block<K, Wide, 1, 3, 5>(group, codes, part, block, odd); };
    dot_even(0);
    for (int p = 0; p < pairs; ++p) {
        const uint8_t* here = w + static_cast<size_t>(p) * record;
        const uint8_t* scale = here + 2 * code_bytes(K);
        const uint8_t* rows = group + static_cast<size_t>(2 * p) * kActRecord;
        dot_odd(2 * p + 1);
        amx_float_part<K, Wide>(scale, scale + 64, rows, even, acc);
        if (p + 1 < pairs) dot_even(2 * p + 2);
        amx_float_part<K, Wide>(scale + 32, scale + 64 + minimum_bytes, rows + kActRecord, odd, acc);
    }
    for (int r = 0; r < kGroup; ++r) out[r] = acc[r];
}

template <Kind K>
inline void amx_tile_of(const Packed& w, int tile, const uint8_t* codes, const uint8_t* group, F* out) {
    if (w.wide) {
        amx_tile_as<K, true>(w.tile(tile), codes, w.pairs, group, act_part_bytes(w.in), out);
    } else {
        amx_tile_as<K, false>(w.tile(tile), codes, w.pairs, group, 0, out);
    }
}

inline void amx_tile(const Packed& w, int tile, const uint8_t* codes, const uint8_t* group, F* out) {
    switch (w.kind) {
        case Kind::Q4Min: amx_tile_of<Kind::Q4Min>(w, tile, codes, group, out); break;
        case Kind::Q4Offset: amx_tile_of<Kind::Q4Offset>(w, tile, codes, group, out); break;
        case Kind::Q8Min: amx_tile_of<Kind::Q8Min>(w, tile, codes, group, out); break;
        default: amx_tile_of<Kind::Q8Offset>(w, tile, codes, group, out); break;
    }
}

}  // namespace fs::FS_ISA

#endif
