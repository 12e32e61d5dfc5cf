// AVX2 with FMA and F16C: a lane set is two ymm registers, lanes 0..7 and 8..15.
#pragma once

#include <algorithm>
#include <immintrin.h>

#include "weights.h"

namespace fs::FS_ISA {

struct F {
    __m256 a, b;
};
struct I {
    __m256i a, b;
};
struct M {
    __m256 a, b;
};

// maddubs saturates for bytes above 127, so bytes of weights are taken as the numbers they stand for (byte - 128).
constexpr int kLineShift = 128;
constexpr int kSumSets = 4;
#define FS_ROW_TILE 4

inline F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
inline M first(int n) {
    const __m256i count = _mm256_set1_epi32(n);
    const __m256i low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i high = _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15);
    return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(count, low)), _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, high))};
}
inline F load_part(const float* p, int n) {
    const M m = first(n);
    return {_mm256_maskload_ps(p, _mm256_castps_si256(m.a)), _mm256_maskload_ps(p + 8, _mm256_castps_si256(m.b))};
}
inline void store_part(float* p, F x, int n) {
    const M m = first(n);
    _mm256_maskstore_ps(p, _mm256_castps_si256(m.a), x.a);
    _mm256_maskstore_ps(p + 8, _mm256_castps_si256(m.b), x.b);
}
inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F abs(F x) {
    const __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF));
    return {_mm256_and_ps(x.a, m), _mm256_and_ps(x.b, m)};
}
inline M less(F x, F y) { return {_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)}; }
inline F select(M m, F yes, F no) { return {_mm256_blendv_ps(no.a, yes.a, m.a), _mm256_blendv_ps(no.b, yes.b, m.b)}; }
inline I select(M m, I yes, I no) {
    return {_mm256_blendv_epi8(no.a, yes.a, _mm256_castps_si256(m.a)), _mm256_blendv_epi8(no.b, yes.b, _mm256_castps_si256(m.b))};
}
inline M both(M x, M y) { return {_mm256_and_ps(x.a, y.a), _mm256_and_ps(x.b, y.b)}; }
inline M not_(M x) {
    const __m256 ones = _mm256_castsi256_ps(_mm256_set1_epi32(-1));
    return {_mm256_xor_ps(x.a, ones), _mm256_xor_ps(x.b, ones)};
}
inline bool all(M x) { return (_mm256_movemask_ps(x.a) & _mm256_movemask_ps(x.b)) == 0xFF; }
inline uint32_t bits_of(M x) { return static_cast<uint32_t>(_mm256_movemask_ps(x.a) | (_mm256_movemask_ps(x.b) << 8)); }
inline bool any(M x) { return (_mm256_movemask_ps(x.a) | _mm256_movemask_ps(x.b)) != 0; }

inline I set1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I iota() { return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)}; }
inline I load(const int32_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
inline void store(int32_t* p, I x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.b);
}
inline I add(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline I times_256(I x) { return {_mm256_slli_epi32(x.a, 8), _mm256_slli_epi32(x.b, 8)}; }
inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline I round_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline F round_even(F x) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
// y * 2^n for whole n in -126..127
inline F scale_by_power(F y, F n) {
    const I e = round_int(n);
    const __m256i bias = _mm256_set1_epi32(127);
    return {_mm256_mul_ps(y.a, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e.a, bias), 23))),
            _mm256_mul_ps(y.b, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e.b, bias), 23)))};
}

inline F load_half(const uint16_t* p) {
    const auto* q = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
inline F load_bf16(const uint16_t* p) {
    const auto* q = reinterpret_cast<const __m128i*>(p);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(q)), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(q + 1)), 16))};
}
inline I magnitude_bits(F x) {
    const __m256i m = _mm256_set1_epi32(0x7FFFFFFF);
    return {_mm256_and_si256(_mm256_castps_si256(x.a), m), _mm256_and_si256(_mm256_castps_si256(x.b), m)};
}
inline I max(I x, I y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
inline int32_t reduce_max(I x) {
    alignas(32) int32_t wide[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(wide), _mm256_max_epi32(x.a, x.b));
    return *std::max_element(wide, wide + 8);
}

// Sums of high and of low parts so far.
struct Parts {
    __m256i high = _mm256_setzero_si256(), low = _mm256_setzero_si256();
};
inline int32_t sum_lanes(__m256i v) {
    alignas(32) int32_t wide[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(wide), v);
    int32_t sum = 0;
    for (const int32_t x : wide) sum += x;
    return sum;
}
inline int32_t high_sum(const Parts& parts) { return sum_lanes(parts.high); }
inline int32_t low_sum(const Parts& parts) { return sum_lanes(parts.low); }
inline __m256i codes16(const float* x, F inverse) {
    const I q = round_int(mul(load(x), inverse));
    const __m256i code = _mm256_permute4x64_epi64(_mm256_packs_epi32(q.a, q.b), 0xD8);
    const __m256i ends = _mm256_cmpeq_epi16(_mm256_and_si256(code, _mm256_set1_epi16(255)), _mm256_set1_epi16(128));
    return _mm256_sub_epi16(code, ends);
}
inline __m256i bytes_of(__m256i a, __m256i b) { return _mm256_permute4x64_epi64(_mm256_packs_epi16(a, b), 0xD8); }
inline void take_parts(Parts& sums, const float* x, F inverse, int8_t* high, int8_t* low) {
    const __m256i a = codes16(x, inverse), b = codes16(x + 16, inverse), half = _mm256_set1_epi16(128), ones = _mm256_set1_epi16(1);
    const __m256i upper = bytes_of(_mm256_srai_epi16(_mm256_add_epi16(a, half), 8), _mm256_srai_epi16(_mm256_add_epi16(b, half), 8));
    const __m256i lower = bytes_of(_mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8), _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(high), upper);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(low), lower);
    const auto sum = [&](__m256i v) { return _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), v), ones); };
    sums.high = _mm256_add_epi32(sums.high, sum(upper));
    sums.low = _mm256_add_epi32(sums.low, sum(lower));
}

inline void take_span(Parts& sums, const float* x, F inverse, int8_t* high, int8_t* low) {
    take_parts(sums, x, inverse, high, low);
    take_parts(sums, x + 32, inverse, high + 32, low + 32);
}

inline float reduce_add(F x) {
    const __m256 s8 = _mm256_add_ps(x.a, x.b);
    const __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
    const __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
    return _mm_cvtss_f32(_mm_add_ss(s2, _mm_shuffle_ps(s2, s2, 1)));
}
inline float reduce_max(F x) {
    const __m256 s8 = _mm256_max_ps(x.a, x.b);
    const __m128 s4 = _mm_max_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
    const __m128 s2 = _mm_max_ps(s4, _mm_movehl_ps(s4, s4));
    return _mm_cvtss_f32(_mm_max_ss(s2, _mm_shuffle_ps(s2, s2, 1)));
}
inline __m256i bcast4(const int8_t* q) {
    int32_t word;
    __builtin_memcpy(&word, q, 4);
    return _mm256_set1_epi32(word);
}

// Sixteen float64 sums.
struct D {
    __m256d v[4];
};
inline D zero_wide() { return {{_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd()}}; }
inline D add_wide(D s, F x) {
    s.v[0] = _mm256_add_pd(s.v[0], _mm256_cvtps_pd(_mm256_castps256_ps128(x.a)));
    s.v[1] = _mm256_add_pd(s.v[1], _mm256_cvtps_pd(_mm256_extractf128_ps(x.a, 1)));
    s.v[2] = _mm256_add_pd(s.v[2], _mm256_cvtps_pd(_mm256_castps256_ps128(x.b)));
    s.v[3] = _mm256_add_pd(s.v[3], _mm256_cvtps_pd(_mm256_extractf128_ps(x.b, 1)));
    return s;
}
inline void store(double* p, D s) {
    for (int i = 0; i < 4; ++i) _mm256_storeu_pd(p + 4 * i, s.v[i]);
}

// Lanes 0..7 and 8..15: numbers and their absolute values.
struct Line {
    __m256i a, b, abs_a, abs_b;
};
inline Line load_line(const uint8_t* p) {
    const __m256i flip = _mm256_set1_epi8(-128);
    const __m256i a = _mm256_xor_si256(_mm256_load_si256(reinterpret_cast<const __m256i*>(p)), flip);
    const __m256i b = _mm256_xor_si256(_mm256_load_si256(reinterpret_cast<const __m256i*>(p + 32)), flip);
    return {a, b, _mm256_abs_epi8(a), _mm256_abs_epi8(b)};
}
// Two products of at most 127 * 127 fit in 16 bits; so does the sign's change, since no number is -128.
inline I dot4(I s, const Line& w, const int8_t* q) {
    const __m256i x = bcast4(q), ones = _mm256_set1_epi16(1);
    return {_mm256_add_epi32(s.a, _mm256_madd_epi16(_mm256_maddubs_epi16(w.abs_a, _mm256_sign_epi8(x, w.a)), ones)),
            _mm256_add_epi32(s.b, _mm256_madd_epi16(_mm256_maddubs_epi16(w.abs_b, _mm256_sign_epi8(x, w.b)), ones))};
}

// Two of a block's four lanes of outputs, see lanes_avx512.h: the same steps at half the width.
inline __m256i tables_of(const uint8_t* factors) {
    const __m256i pair = _mm256_castsi128_si256(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(factors)));
    const __m256i both = _mm256_permute4x64_epi64(pair, 0);
    const __m256i first = _mm256_setr_epi64x(0x0100010001000100, 0x0100010001000100, 0x0504050405040504, 0x0504050405040504);
    const __m256i factor = _mm256_shuffle_epi8(both, first), offset = _mm256_shuffle_epi8(both, _mm256_add_epi8(first, _mm256_set1_epi8(2)));
    const __m256i even_codes = _mm256_setr_epi16(0, 2, 4, 6, 8, 10, 12, 14, 0, 2, 4, 6, 8, 10, 12, 14);
    const __m256i even = _mm256_add_epi16(_mm256_mullo_epi16(factor, even_codes), offset), odd = _mm256_add_epi16(even, factor);
    return _mm256_or_si256(_mm256_srli_epi16(even, kTableShift), _mm256_and_si256(odd, _mm256_set1_epi16(-256)));
}
inline void store_lines(const __m256i (&g)[4], uint8_t* lines) {
    const __m256i a = _mm256_unpacklo_epi32(g[0], g[1]), b = _mm256_unpackhi_epi32(g[0], g[1]), c = _mm256_unpacklo_epi32(g[2], g[3]), d = _mm256_unpackhi_epi32(g[2], g[3]);
    const __m256i out[4] = {_mm256_unpacklo_epi64(a, c), _mm256_unpackhi_epi64(a, c), _mm256_unpacklo_epi64(b, d), _mm256_unpackhi_epi64(b, d)};
    for (size_t j = 0; j < 4; ++j) _mm256_store_si256(reinterpret_cast<__m256i*>(lines + kLineBytes * j), out[j]);
}
inline void expand_span(const uint8_t* record, uint8_t* lines) {
    const __m256i nibble = _mm256_set1_epi8(15);
    for (size_t b = 0; b < 2; ++b) {
        for (size_t lanes = 0; lanes < 2; ++lanes) {  // outputs 0..7 and 8..15
            __m256i first[4], second[4];
            for (size_t g = 0; g < 4; ++g) {
                const uint8_t* codes = record + b * kCodeBytes + g * kLineBytes + 32 * lanes;
                const __m256i tables = tables_of(record + kFactors + b * kFactorBytes + g * 16 + 8 * lanes);
                const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
                first[g] = _mm256_shuffle_epi8(tables, _mm256_and_si256(raw, nibble));
                second[g] = _mm256_shuffle_epi8(tables, _mm256_and_si256(_mm256_srli_epi16(raw, 4), nibble));
            }
            store_lines(first, lines + b * 8 * kLineBytes + 32 * lanes);
            store_lines(second, lines + b * 8 * kLineBytes + 4 * kLineBytes + 32 * lanes);
        }
    }
}

inline __attribute__((always_inline)) void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
inline __attribute__((always_inline)) void prefetch_far(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

}  // namespace fs::FS_ISA
