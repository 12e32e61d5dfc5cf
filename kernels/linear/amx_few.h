// Tiles of 16 outputs by 2 to 8 rows on the matrix unit: a tree of drafts costs little more than its root.
//
// A product of the unit costs the same for one row as for eight, so a pair of blocks is one product: the rows stand in the tile twice,
// once with the codes of the first block and zeros behind, once with zeros ahead of the codes of the second. The low codes of rows in parts
// follow as more rows of the same tile where sixteen are enough. Weights are unpacked a few pairs ahead into a ring: the unit cannot read
// what has just been stored without waiting for it. The integers are exact and the float part is the chain of native.cpp: the same bits.
#pragma once

#include "matrix_unit.h"

namespace fs::FS_ISA {

constexpr int kFewRows = 8;
#if defined(FS_AMX)
// Fewer rows are faster on the vector unit.
constexpr int fewest(Fine fine) { return fine == Fine::Bits8 ? 5 : (fine == Fine::Bits12 ? 3 : 2); }
inline bool is_few(int n, Fine fine) { return n >= fewest(fine) && n <= kFewRows; }
#else
inline bool is_few(int, Fine) { return false; }
#endif

// More than four rows of 12 bits are read where they were quantised: high and low codes of a row are one line.
inline bool has_image(int n, Fine fine) { return fine != Fine::Bits12 || n <= 4; }

// The image of up to eight quantised rows: per pair of blocks 2n lines of codes (4n for rows in parts), then per block n scales and n scaled sums.
inline size_t few_lines(int n, Fine fine) { return static_cast<size_t>(n) * (in_parts(fine) ? 4 : 2); }
inline size_t few_bytes(int in, int n, Fine fine) {
    const size_t pairs = static_cast<size_t>(in + 2 * kBlock - 1) / (2 * kBlock);
    return pairs * (few_lines(n, fine) * 64 + static_cast<size_t>(n) * 16);
}

inline void few_image(const uint8_t* act, int in, int n, Fine fine, uint8_t* image) {
    const size_t pairs = static_cast<size_t>(in + 2 * kBlock - 1) / (2 * kBlock), rows = static_cast<size_t>(n);
    auto* scales = reinterpret_cast<float*>(image + pairs * few_lines(n, fine) * 64);
    const uint8_t none[kBlock] = {};
    for (size_t block = 0; block < 2 * pairs; ++block, act += kActRecord) {
        for (size_t low = 0; low < (in_parts(fine) ? 2 : 1); ++low) {
            for (size_t r = 0; r < rows; ++r, image += 64) {
                const uint8_t* codes = act + low * kActLow + kActRow * r;
                std::memcpy(image, block % 2 == 0 ? codes : none, kBlock);
                std::memcpy(image + kBlock, block % 2 == 0 ? none : codes, kBlock);
            }
        }
        for (size_t r = 0; r < rows; ++r) {
            const uint8_t* fields = act + kActFields + kActField * r;
            std::memcpy(scales + r, fields + kActScale, 4);
            std::memcpy(scales + rows + r, fields + kActScaledSum, 4);
        }
        scales += 2 * rows;
    }
}

#if defined(FS_AMX)

// Lines of one product: all of a pair's where they fit into a tile, else those of one block.
constexpr int few_tile_rows(int n, Fine fine) { return in_parts(fine) && n <= 4 ? 4 * n : 2 * n; }

// Tiles 0, 1 and 6, 7: sums. 2, 3: activations. 4, 5: weights (16 rows of 16 x 4 bytes: two blocks).
inline void few_configure(int n, Fine fine) {
    if (!has_image(n, fine)) return amx_configure_linear(fine, n);
    TileShapes shapes;
    for (int tile : {0, 1, 2, 3, 6, 7}) shapes.set(tile, few_tile_rows(n, fine), 64);
    for (int tile : {4, 5}) shapes.set(tile, 16, 64);
    amx_configure(shapes);
}

constexpr size_t kPairBytes = 2 * kUnpackedBlock;

// A pair's sums: [block][high, low][n] lines of 16. `Odd`: pairs take turns with two sets of tiles.
template <Kind K, int N, Fine A, bool Odd>
inline void few_product(const uint8_t* lines, const uint8_t* codes, int32_t* sums) {
    constexpr int kRows = few_tile_rows(N, A);
    tile_zero<Odd>();
    tile_load<2 + Odd>(lines);
    tile_load<4 + Odd>(codes);
    tile_dot<Odd, 2 + Odd, 4 + Odd, K == Kind::Q8Min>();
    tile_store<Odd>(sums);
    if constexpr (in_parts(A) && N > 4) {
        tile_zero<6 + Odd>();
        tile_load<2 + Odd>(lines + 64 * kRows);
        tile_dot<6 + Odd, 2 + Odd, 4 + Odd, K == Kind::Q8Min>();
        tile_store<6 + Odd>(sums + 16 * kRows);
    }
}

template <Kind K, int N, Fine A>
FS_INLINE void few_float_part(const uint8_t* scale, const uint8_t* minimum, const float* scales, const int32_t* sums, F (&acc)[N]) {
    const F d = load_half(reinterpret_cast<const uint16_t*>(scale));
    F m = zero();
    if constexpr (K == Kind::Q4Min) m = load_half(reinterpret_cast<const uint16_t*>(minimum));
    if constexpr (K == Kind::Q8Min) m = load(reinterpret_cast<const float*>(minimum));
    each<N>([&](auto r) __attribute__((always_inline)) {
        I dot = load(sums + 16 * r);
        if constexpr (in_parts(A)) dot = join_parts<A>(dot, load(sums + 16 * (N + r)));
        acc[r] = fma(mul(d, set1(scales[r])), to_float(dot), acc[r]);
        if constexpr (K == Kind::Q4Min || K == Kind::Q8Min) acc[r] = fma(m, set1(scales[N + r]), acc[r]);
    });
}

template <Kind K>
inline void few_unpack(const uint8_t* w, uint8_t* ring) {
    unpack_block<K, Fine::Bits8>(w, ring);
    unpack_block<K, Fine::Bits8>(w + code_bytes(K), ring + kUnpackedBlock);
}

template <Kind K, int N, Fine A>
void few_tile(const uint8_t* w, int pairs, const uint8_t* image, F* out) {
    constexpr size_t record = record_bytes(K), minimum_bytes = K == Kind::Q8Min ? 64 : 32;
    constexpr size_t lines = 64 * static_cast<size_t>(N) * (in_parts(A) ? 4 : 2), block_sums = 16 * static_cast<size_t>(N) * (in_parts(A) ? 2 : 1);
    alignas(64) uint8_t ring[kRing * kPairBytes];
    alignas(64) int32_t even[2 * block_sums], odd[2 * block_sums];
    const auto* scales = reinterpret_cast<const float*>(image + static_cast<size_t>(pairs) * lines);
    F acc[N];
    each<N>([&](auto r) __attribute__((always_inline)) { acc[r] = zero(); });
    const auto unpack = [&](int p) __attribute__((always_inline)) {
        if (p < pairs) few_unpack<K>(w + static_cast<size_t>(p) * record, ring + static_cast<size_t>(p % kRing) * kPairBytes);
    };
    const auto product = [&](int p, auto is_odd, int32_t* sums) __attribute__((always_inline)) {
        if (p < pairs) few_product<K, N, A, decltype(is_odd)::value>(image + static_cast<size_t>(p) * lines, ring + static_cast<size_t>(p % kRing) * kPairBytes, sums);
    };
    const auto settle = [&](int p, const int32_t* sums) __attribute__((always_inline)) {
        const uint8_t* here = w + static_cast<size_t>(p) * record;
#pragma GCC unroll 20
        for (size_t line = 0; line < record; line += 64) {
            prefetch_far(here + kPrefetchFar + line);
            prefetch(here + kPrefetchNear + kAhead * record + line);
        }
        unpack(p + kAhead);
        const uint8_t* scale = here + 2 * code_bytes(K);
        const float* fields = scales + static_cast<size_t>(p) * 4 * N;
        few_float_part<K, N, A>(scale, scale + 64, fields, sums, acc);
        few_float_part<K, N, A>(scale + 32, scale + 64 + minimum_bytes, fields + 2 * N, sums + block_sums, acc);
    };
    for (int p = 0; p < kAhead; ++p) unpack(p);
    product(0, std::false_type{}, even);
    for (int p = 0; p < pairs; p += 2) {
        product(p + 1, std::true_type{}, odd);
        settle(p, even);
        if (p + 1 >= pairs) break;
        product(p + 2, std::false_type{}, even);
        settle(p + 1, odd);
    }
    each<N>([&](auto r) __attribute__((always_inline)) { out[r] = acc[r]; });
}

template <Kind K, Fine A>
inline void few_tile_of(const Packed& w, int tile, const uint8_t* image, int n, F* out) {
    switch (n) {
        case 2: few_tile<K, 2, A>(w.tile(tile), w.pairs, image, out); break;
        case 3: few_tile<K, 3, A>(w.tile(tile), w.pairs, image, out); break;
        case 4: few_tile<K, 4, A>(w.tile(tile), w.pairs, image, out); break;
        case 5: few_tile<K, 5, A>(w.tile(tile), w.pairs, image, out); break;
        case 6: few_tile<K, 6, A>(w.tile(tile), w.pairs, image, out); break;
        case 7: few_tile<K, 7, A>(w.tile(tile), w.pairs, image, out); break;
        default: few_tile<K, 8, A>(w.tile(tile), w.pairs, image, out); break;
    }
}

// Rows of 12 bits: a few as an image, more as they lie, block by block.
template <Kind K, int N>
inline void few_tile_fine(const uint8_t* w, int pairs, const uint8_t* group, F* out) {
    alignas(64) uint8_t ring[kRing * 2 * unpacked_block(Fine::Bits12)];
    amx_tile_as<K, Fine::Bits12, N, true>(w, {ring, kRing - 1}, pairs, group, out);
}

template <Kind K>
inline void few_tile_fine_of(const Packed& w, int tile, const uint8_t* group, int n, F* out) {
    switch (n) {
        case 3: few_tile<K, 3, Fine::Bits12>(w.tile(tile), w.pairs, group, out); break;
        case 4: few_tile<K, 4, Fine::Bits12>(w.tile(tile), w.pairs, group, out); break;
        case 5: few_tile_fine<K, 5>(w.tile(tile), w.pairs, group, out); break;
        case 6: few_tile_fine<K, 6>(w.tile(tile), w.pairs, group, out); break;
        case 7: few_tile_fine<K, 7>(w.tile(tile), w.pairs, group, out); break;
        default: few_tile_fine<K, 8>(w.tile(tile), w.pairs, group, out); break;
    }
}

template <Kind K>
inline void few_tile_as(const Packed& w, int tile, const uint8_t* image, int n, F* out) {
    if (w.fine == Fine::Bits8) {
        few_tile_of<K, Fine::Bits8>(w, tile, image, n, out);
    } else if (w.fine == Fine::Bits12) {
        if constexpr (K <= Kind::Q4Offset) few_tile_fine_of<K>(w, tile, image, n, out);
    } else {
        few_tile_of<K, Fine::Bits16>(w, tile, image, n, out);
    }
}

// out[0..n) = the rows of the image (without one: of the group) times the 16 outputs of `tile`.
inline void few_tile_any(const Packed& w, int tile, const uint8_t* image, int n, F* out) {
    switch (w.kind) {
        case Kind::Q4Min: few_tile_as<Kind::Q4Min>(w, tile, image, n, out); break;
        case Kind::Q4Offset: few_tile_as<Kind::Q4Offset>(w, tile, image, n, out); break;
        case Kind::Q8Min: few_tile_as<Kind::Q8Min>(w, tile, image, n, out); break;
        default: few_tile_as<Kind::Q8Offset>(w, tile, image, n, out); break;
    }
}

#endif

}  // namespace fs::FS_ISA
