// AVX-512 with VNNI: a lane set is one zmm register.
#pragma once

#include <immintrin.h>

#include "weights.h"

namespace fs::FS_ISA {

struct F {
    __m512 v;
};
struct I {
    __m512i v;
};
struct M {
    __mmask16 v;
};

constexpr int kLineShift = 0;
constexpr int kSumSets = 4;  // lane sets of sums that hide the dot product's latency
#define FS_ROW_TILE 8  // rows held in registers by the linear kernels
#define FS_LOOK_UP

inline F zero() { return {_mm512_setzero_ps()}; }
inline F set1(float x) { return {_mm512_set1_ps(x)}; }
inline F load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x.v); }
inline M first(int n) { return {static_cast<__mmask16>(n >= 16 ? 0xFFFFu : (n <= 0 ? 0u : (1u << n) - 1u))}; }
inline F load_part(const float* p, int n) { return {_mm512_maskz_loadu_ps(first(n).v, p)}; }
inline void store_part(float* p, F x, int n) { _mm512_mask_storeu_ps(p, first(n).v, x.v); }
inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F abs(F a) { return {_mm512_abs_ps(a.v)}; }
inline M less(F a, F b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
inline F select(M m, F yes, F no) { return {_mm512_mask_blend_ps(m.v, no.v, yes.v)}; }
inline I select(M m, I yes, I no) { return {_mm512_mask_blend_epi32(m.v, no.v, yes.v)}; }
inline M both(M a, M b) { return {static_cast<__mmask16>(a.v & b.v)}; }
inline M not_(M a) { return {static_cast<__mmask16>(~a.v)}; }
inline bool all(M a) { return a.v == 0xFFFF; }
inline uint32_t bits_of(M a) { return a.v; }
inline bool any(M a) { return a.v != 0; }

inline I set1(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline I iota() { return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)}; }
inline I load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store(int32_t* p, I x) { _mm512_storeu_si512(p, x.v); }
inline I add(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline I times_256(I a) { return {_mm512_slli_epi32(a.v, 8)}; }
inline F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline I round_int(F a) { return {_mm512_cvtps_epi32(a.v)}; }  // to nearest, ties to even
inline F round_even(F a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline F scale_by_power(F y, F n) { return {_mm512_scalef_ps(y.v, n.v)}; }  // y * 2^n

inline F load_half(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
inline F load_bf16(const uint16_t* p) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))};
}
inline I magnitude_bits(F a) { return {_mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x7FFFFFFF))}; }
inline I max(I a, I b) { return {_mm512_max_epi32(a.v, b.v)}; }
inline int32_t reduce_max(I a) { return _mm512_reduce_max_epi32(a.v); }

// Sums of high and of low parts so far.
struct Parts {
    __m512i high = _mm512_setzero_si512(), low = _mm512_setzero_si512();
};
inline int32_t sum_lanes(__m512i v) {
    const __m256i eight = _mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xB1)));
}
inline int32_t high_sum(const Parts& parts) { return sum_lanes(parts.high); }
inline int32_t low_sum(const Parts& parts) { return sum_lanes(parts.low); }
// 32 codes of 16 bits, in the order in which their lanes are packed; none has the low part -128.
inline __m512i packed_codes(const float* x, F inverse) {
    const I a = round_int(mul(load(x), inverse)), b = round_int(mul(load(x + 16), inverse));
    const __m512i code = _mm512_packs_epi32(a.v, b.v);
    return _mm512_mask_add_epi8(code, _mm512_mask_cmpeq_epi8_mask(0x5555555555555555, code, _mm512_set1_epi8(-128)), code, _mm512_set1_epi8(1));
}
inline __m512i upper_parts(__m512i code) { return _mm512_srai_epi16(_mm512_add_epi16(code, _mm512_set1_epi16(128)), 8); }
inline __m512i lower_parts(__m512i code) { return _mm512_and_si512(code, _mm512_set1_epi16(255)); }
inline void take_parts(Parts& sums, const float* x, F inverse, int8_t* high, int8_t* low) {
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    const __m512i code = _mm512_permutexvar_epi64(order, packed_codes(x, inverse));
    const __m256i upper = _mm512_cvtepi16_epi8(upper_parts(code)), lower = _mm512_cvtepi16_epi8(code);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(high), upper);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(low), lower);
    sums.high = _mm512_dpbusd_epi32(sums.high, _mm512_set1_epi8(1), _mm512_zextsi256_si512(upper));
    sums.low = _mm512_dpbusd_epi32(sums.low, _mm512_set1_epi8(1), _mm512_zextsi256_si512(lower));
}
// The same of 64: fewer instructions than twice 32.
inline void take_span(Parts& sums, const float* x, F inverse, int8_t* high, int8_t* low) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i first = packed_codes(x, inverse), second = packed_codes(x + 32, inverse);
    const __m512i upper = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(upper_parts(first), upper_parts(second)));
    const __m512i lower = _mm512_permutexvar_epi32(order, _mm512_packus_epi16(lower_parts(first), lower_parts(second)));
    _mm512_storeu_si512(high, upper);
    _mm512_storeu_si512(low, lower);
    sums.high = _mm512_dpbusd_epi32(sums.high, _mm512_set1_epi8(1), upper);
    sums.low = _mm512_dpbusd_epi32(sums.low, _mm512_set1_epi8(1), lower);
}

// Folds lanes i and i + 8, then i + 4, i + 2, i + 1.
inline float reduce_add(F a) {
    const __m256 s8 = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    const __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
    const __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
    return _mm_cvtss_f32(_mm_add_ss(s2, _mm_shuffle_ps(s2, s2, 1)));
}
inline float reduce_max(F a) { return _mm512_reduce_max_ps(a.v); }

inline __m512i bcast4(const int8_t* q) {
    int32_t word;
    __builtin_memcpy(&word, q, 4);
    return _mm512_set1_epi32(word);
}

// Sixteen float64 sums.
struct D {
    __m512d a, b;
};
inline D zero_wide() { return {_mm512_setzero_pd(), _mm512_setzero_pd()}; }
inline D add_wide(D s, F x) {
    return {_mm512_add_pd(s.a, _mm512_cvtps_pd(_mm512_castps512_ps256(x.v))), _mm512_add_pd(s.b, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x.v, 1)))};
}
inline void store(double* p, D s) {
    _mm512_storeu_pd(p, s.a);
    _mm512_storeu_pd(p + 8, s.b);
}

struct Line {
    __m512i v;
};
inline Line load_line(const uint8_t* p) { return {_mm512_load_si512(p)}; }
inline I dot4(I s, const Line& w, const int8_t* q) { return {_mm512_dpbusd_epi32(s.v, w.v, bcast4(q))}; }

// The tables of four outputs in a block, 16 bytes a lane.
inline __m512i tables_of(const uint8_t* factors) {
    const __m512i both = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(factors)));
    const __m512i lane = _mm512_set_epi64(0x0C0C0C0C0C0C0C0C, 0x0C0C0C0C0C0C0C0C, 0x0808080808080808, 0x0808080808080808, 0x0404040404040404, 0x0404040404040404, 0, 0);
    const __m512i first = _mm512_add_epi8(lane, _mm512_set1_epi16(0x0100));
    const __m512i factor = _mm512_shuffle_epi8(both, first), offset = _mm512_shuffle_epi8(both, _mm512_add_epi8(first, _mm512_set1_epi8(2)));
    const __m512i even_codes = _mm512_broadcast_i32x4(_mm_setr_epi16(0, 2, 4, 6, 8, 10, 12, 14));
    const __m512i even = _mm512_add_epi16(_mm512_mullo_epi16(factor, even_codes), offset), odd = _mm512_add_epi16(even, factor);
    return _mm512_mask_blend_epi8(0xAAAAAAAAAAAAAAAA, _mm512_srli_epi16(even, kTableShift), odd);
}
// Inputs 0..15 and 16..31 of four outputs.
struct Looked {
    __m512i first, second;
};
inline Looked look_up(const uint8_t* codes, const uint8_t* factors) {
    const __m512i tables = tables_of(factors), raw = _mm512_loadu_si512(codes), nibble = _mm512_set1_epi8(15);
#if defined(__GFNI__)
    const __m512i upper = _mm512_gf2p8affine_epi64_epi8(raw, _mm512_set1_epi64(0x1020408000000000), 0);  // a byte's bits 4..7 as its bits 0..3
#else
    const __m512i upper = _mm512_and_si512(_mm512_srli_epi16(raw, 4), nibble);
#endif
    return {_mm512_shuffle_epi8(tables, _mm512_and_si512(raw, nibble)), _mm512_shuffle_epi8(tables, upper)};
}
// sum += 32 inputs of four outputs . q, four parts an output.
inline void dot_looked(__m512i& sum, const Looked& w, const uint8_t* q) {
    sum = _mm512_dpbusd_epi32(sum, w.first, _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q))));
    sum = _mm512_dpbusd_epi32(sum, w.second, _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q + 16))));
}
// Groups' lanes to lines: within a lane, doubleword j of group g goes to doubleword g of line j.
inline void store_lines(const __m512i (&g)[4], uint8_t* lines) {
    const __m512i a = _mm512_unpacklo_epi32(g[0], g[1]), b = _mm512_unpackhi_epi32(g[0], g[1]), c = _mm512_unpacklo_epi32(g[2], g[3]), d = _mm512_unpackhi_epi32(g[2], g[3]);
    _mm512_store_si512(lines, _mm512_unpacklo_epi64(a, c));
    _mm512_store_si512(lines + 64, _mm512_unpackhi_epi64(a, c));
    _mm512_store_si512(lines + 128, _mm512_unpacklo_epi64(b, d));
    _mm512_store_si512(lines + 192, _mm512_unpackhi_epi64(b, d));
}
inline __attribute__((always_inline)) void expand_span(const uint8_t* record, uint8_t* lines) {
#pragma GCC unroll 2
    for (size_t b = 0; b < 2; ++b) {
        __m512i first[4], second[4];
#pragma GCC unroll 4
        for (size_t g = 0; g < 4; ++g) {
            const Looked found = look_up(record + b * kCodeBytes + g * kLineBytes, record + kFactors + b * kFactorBytes + g * 16);
            first[g] = found.first;
            second[g] = found.second;
        }
        store_lines(first, lines + b * 8 * kLineBytes);
        store_lines(second, lines + b * 8 * kLineBytes + 4 * kLineBytes);
    }
}

// A lane holds four parts of the sums of output 4 l + g, for each group g.
struct Quarters {
    __m512i v[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
};
inline I join_groups(const Quarters& groups) {
    const __m512i(&g)[4] = groups.v;
    const __m512i a = _mm512_add_epi32(_mm512_unpacklo_epi32(g[0], g[1]), _mm512_unpackhi_epi32(g[0], g[1]));
    const __m512i b = _mm512_add_epi32(_mm512_unpacklo_epi32(g[2], g[3]), _mm512_unpackhi_epi32(g[2], g[3]));
    return {_mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b))};
}

inline __attribute__((always_inline)) void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
inline __attribute__((always_inline)) void prefetch_far(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

}  // namespace fs::FS_ISA
