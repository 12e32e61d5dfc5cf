// Attention over bfloat16 keys and values on the matrix unit (AMX bf16).
//
// A query (and later a weight) is split into two bfloat16 parts, high + low, which keeps 16 of its 24 bits: far below what the keys lost
// when they were stored. A score is then a fixed chain of products, high and low for each 32 channels in turn; a weighted sum is one of
// high and low for each 32 positions, in blocks at multiples of 32 in absolute position. The unit computes every query's row of a
// product by itself, so, as everywhere, a node's result depends on its own keys by position and on nothing else.
#pragma once

#include "matrix_unit.h"

#if defined(FS_AMX)

namespace fs::FS_ISA {

constexpr int kPairBlock = 32;  // channels or positions of one product

// Whole products only, and the queries of one node in one tile.
inline bool amx_fits(int head_dim, int per_group) { return head_dim % kPairBlock == 0 && per_group <= 16; }

// Tiles 0..3: sums (rows x 16 float32). 4, 5: queries or weights, high and low (rows x 32 bfloat16). 6, 7: keys or values (16 pairs
// of 16). Four sums side by side, because one product waits for the one before on the same sum.
inline void amx_configure_attention(int rows) {
    TileShapes shapes;
    for (int tile = 0; tile < 6; ++tile) shapes.set(tile, rows, 64);
    for (int tile : {6, 7}) shapes.set(tile, 16, 64);
    amx_configure(shapes);
}

inline __m256i half_of(__m256bh x) { return reinterpret_cast<__m256i>(x); }

// high[0..16) + low[0..16) ~ x.
inline void split(F x, uint16_t* high, uint16_t* low) {
    const __m256i h = half_of(_mm512_cvtneps_pbh(x.v));
    const __m512 rounded = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(high), h);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(low), half_of(_mm512_cvtneps_pbh(_mm512_sub_ps(x.v, rounded))));
}

// Two rows of 16 as 16 pairs; null reads as zeros.
inline void interleave(const uint16_t* a, const uint16_t* b, uint16_t* out) {
    alignas(64) static constexpr uint16_t kOrder[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                        8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m256i none = _mm256_setzero_si256();
    const __m256i x = a != nullptr ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a)) : none;
    const __m256i y = b != nullptr ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b)) : none;
    const __m512i order = _mm512_load_si512(kOrder);
    _mm512_store_si512(out, _mm512_permutex2var_epi16(_mm512_castsi256_si512(x), order, _mm512_castsi256_si512(y)));
}

struct MatrixScratch {
    Buffer<uint16_t> query_high, query_low;    // [queries, a multiple of 16][D]
    Buffer<uint16_t> weight_high, weight_low;  // [queries, a multiple of 16][kChunk]
    Buffer<uint16_t> keys;                     // per 16 keys: [D / 2 pairs of channels][16 keys x 2]
    Buffer<uint16_t> values;                   // per 32 positions: [D / 16][16 pairs of positions][16 channels x 2]

    void reserve(int queries, int d) {
        const auto q = static_cast<size_t>((queries + 15) / 16 * 16);
        for (Buffer<uint16_t>* buffer : {&query_high, &query_low}) grow(*buffer, q * static_cast<size_t>(d));
        for (Buffer<uint16_t>* buffer : {&weight_high, &weight_low}) grow(*buffer, q * kChunk);
        for (Buffer<uint16_t>* buffer : {&keys, &values}) grow(*buffer, static_cast<size_t>(kChunk * d));
    }
};

inline void split_queries(const float* const* q, int queries, int d, MatrixScratch& m) {
    for (int t = 0; t < queries; ++t) {
        for (int c = 0; c < d; c += 16) split(load(q[t] + c), m.query_high.data() + t * d + c, m.query_low.data() + t * d + c);
    }
}

// 16 keys from `index` on as pairs of channels. `next`: a later key, `value`: these keys' values; both are asked for on the way.
inline void pack_keys(const HeadView<uint16_t>& head, int index, int end, const uint16_t* next, uint16_t* out) {
    if (head.page_size % 16 != 0) {
        for (int c = 0; c < head.d; ++c) {
            for (int i = 0; i < 16; ++i) {
                const uint16_t* key = index + i < end ? head.key(index + i) : nullptr;
                out[c / 2 * 32 + 2 * i + c % 2] = key != nullptr ? key[static_cast<size_t>(c) * static_cast<size_t>(head.page_size)] : uint16_t{0};
            }
        }
        return;
    }
    const uint16_t* key = head.key(index);
    const uint16_t* value = head.value(index);
    const auto step = static_cast<size_t>(head.page_size);
    for (int c = 0; c < head.d; c += 2) {
        const size_t at = static_cast<size_t>(c) * step;
        prefetch(next + at);
        prefetch(value + 16 * c);  // 16 values of d channels lie in d / 2 lines
        interleave(key + at, key + at + step, out + 16 * c);
    }
}

#define FS_SUM(sum, factor, base)                   \
    do {                                            \
        FS_TILE_LOAD(factor, base, 64);             \
        FS_TILE_DOT("tdpbf16ps", sum, 4, factor);   \
        FS_TILE_DOT("tdpbf16ps", sum, 5, factor);   \
    } while (0)

// out[query][16 b ..) = scores of `blocks` (1 to 4) blocks of packed keys, for as many queries as the tiles have rows.
inline void score_blocks_amx(const uint16_t* high, const uint16_t* low, const uint16_t* keys, int blocks, int d, float* out, int out_stride) {
    const int block = 16 * d;  // elements of one block
    FS_TILE_ZERO(0);
    FS_TILE_ZERO(1);
    FS_TILE_ZERO(2);
    FS_TILE_ZERO(3);
    for (int c = 0; c < d; c += kPairBlock) {
        const uint16_t* at = keys + 16 * c;
        FS_TILE_LOAD(4, high + c, 2 * d);
        FS_TILE_LOAD(5, low + c, 2 * d);
        FS_SUM(0, 6, at);
        if (blocks > 1) FS_SUM(1, 7, at + block);
        if (blocks > 2) FS_SUM(2, 6, at + 2 * block);
        if (blocks > 3) FS_SUM(3, 7, at + 3 * block);
    }
    FS_TILE_STORE(0, out, 4 * out_stride);
    if (blocks > 1) FS_TILE_STORE(1, out + 16, 4 * out_stride);
    if (blocks > 2) FS_TILE_STORE(2, out + 32, 4 * out_stride);
    if (blocks > 3) FS_TILE_STORE(3, out + 48, 4 * out_stride);
}

// Scores of logical keys [begin, end), begin a multiple of 16, at most kChunk of them.
inline void score_range_amx(const HeadView<uint16_t>& head, int queries, int begin, int end, float* out, int out_stride, MatrixScratch& m) {
    const int blocks = (end - begin + 15) / 16, d = head.d;
    for (int b = 0; b < blocks; ++b) {
        const int index = begin + 16 * b, later = std::min(index + 32, end - 1);
        pack_keys(head, index, end, head.key(later), m.keys.data() + static_cast<size_t>(b * d) * 16);
    }
    for (int t = 0; t < queries; t += 16) {
        for (int b = 0; b < blocks; b += 4) {
            score_blocks_amx(m.query_high.data() + t * d, m.query_low.data() + t * d, m.keys.data() + static_cast<size_t>(b * d) * 16,
                             std::min(4, blocks - b), d, out + t * out_stride + 16 * b, out_stride);
        }
    }
}

// Values of 32 positions as pairs; rows[i] null where nobody has a key.
inline void pack_values(const uint16_t* const* rows, int d, uint16_t* out) {
    for (int pair = 0; pair < 16; ++pair) {
        const uint16_t* a = rows[2 * pair];
        const uint16_t* b = rows[2 * pair + 1];
        for (int c = 0; c < d; c += 16) interleave(a != nullptr ? a + c : nullptr, b != nullptr ? b + c : nullptr, out + (c * 16 + pair * 16) * 2);
    }
}

// sums[query][0..d) += weights * values over `blocks` blocks of 32 positions, for as many queries as the tiles have rows.
inline void value_blocks(const uint16_t* high, const uint16_t* low, const uint16_t* values, int blocks, int d, float* sums, int stride, bool fresh) {
    for (int c = 0; c < d; c += 64) {  // four vectors of 16 channels at a time, two where only 32 channels are left
        const bool four = c + 64 <= d;
        float* target = sums + c;
        if (fresh) {
            FS_TILE_ZERO(0);
            FS_TILE_ZERO(1);
            FS_TILE_ZERO(2);
            FS_TILE_ZERO(3);
        } else {
            FS_TILE_LOAD(0, target, 4 * stride);
            FS_TILE_LOAD(1, target + 16, 4 * stride);
            if (four) {
                FS_TILE_LOAD(2, target + 32, 4 * stride);
                FS_TILE_LOAD(3, target + 48, 4 * stride);
            }
        }
        for (int b = 0; b < blocks; ++b) {
            const uint16_t* block = values + (b * d + c) * kPairBlock;
            FS_TILE_LOAD(4, high + b * kPairBlock, 2 * kChunk);
            FS_TILE_LOAD(5, low + b * kPairBlock, 2 * kChunk);
            FS_SUM(0, 6, block);
            FS_SUM(1, 7, block + 512);
            if (four) {
                FS_SUM(2, 6, block + 1024);
                FS_SUM(3, 7, block + 1536);
            }
        }
        FS_TILE_STORE(0, target, 4 * stride);
        FS_TILE_STORE(1, target + 16, 4 * stride);
        if (four) {
            FS_TILE_STORE(2, target + 32, 4 * stride);
            FS_TILE_STORE(3, target + 48, 4 * stride);
        }
    }
}
#undef FS_SUM

// Weights of one query, split; zeros where the query sees nothing. low, high: what it sees, relative to the chunk.
inline void split_weights(const float* scores, int low, int high, uint16_t* out_high, uint16_t* out_low) {
    const int from = low / 16 * 16;
    for (int i = 0; i < kChunk; i += 16) {
        const bool seen = high > low && i >= from && i < high;
        split(seen ? load(scores + i) : zero(), out_high + i, out_low + i);
    }
}

}  // namespace fs::FS_ISA
#endif
