// AVX-512 with VNNI: a lane set is one zmm register.
#pragma once

#include <immintrin.h>

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

constexpr int kBytesShift = 0;
constexpr int kRowTile = 8;  // rows held in registers by the linear kernels
constexpr int kRowTileWide = 16;

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
inline I times16(I a) { return {_mm512_slli_epi32(a.v, 4)}; }
inline I times255(I a) { return {_mm512_sub_epi32(_mm512_slli_epi32(a.v, 8), a.v)}; }
inline F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline I round_int(F a) { return {_mm512_cvtps_epi32(a.v)}; }  // to nearest, ties to even
inline F round_even(F a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline F scale_by_power(F y, F n) { return {_mm512_scalef_ps(y.v, n.v)}; }  // y * 2^n

inline F load_half(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
inline F load_bf16(const uint16_t* p) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))};
}
inline void store_int8(int8_t* p, I x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(x.v)); }

// Folds lanes i and i + 8, then i + 4, i + 2, i + 1.
inline float reduce_add(F a) {
    const __m256 s8 = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    const __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
    const __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
    return _mm_cvtss_f32(_mm_add_ss(s2, _mm_shuffle_ps(s2, s2, 1)));
}
inline float reduce_max(F a) { return _mm512_reduce_max_ps(a.v); }
inline int32_t reduce_add(I a) { return _mm512_reduce_add_epi32(a.v); }

#define FS_LANES_FOLD
// Lane i = the largest, or the sum, of the lanes of v[i].
template <class Op>
inline __m512 fold16(const __m512 (&v)[16], Op op) {
    __m512 pairs[8], fours[4];
    for (int i = 0; i < 8; ++i) pairs[i] = op(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    for (int i = 0; i < 4; ++i) {
        const __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
        fours[i] = op(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    const auto quarters = [&](__m512 a, __m512 b) { return op(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD)); };
    return quarters(quarters(fours[0], fours[1]), quarters(fours[2], fours[3]));
}
inline F reduce_max16(const F (&v)[16]) {
    __m512 raw[16];
    for (int i = 0; i < 16; ++i) raw[i] = v[i].v;
    return {fold16(raw, [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); })};
}
inline I reduce_add16(const I (&v)[16]) {
    __m512 raw[16];
    for (int i = 0; i < 16; ++i) raw[i] = _mm512_castsi512_ps(v[i].v);
    const auto sum = [](__m512 a, __m512 b) { return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b))); };
    return {_mm512_castps_si512(fold16(raw, sum))};
}

// 32 codes as bytes, and 32 codes of 12 bits as high and low bytes: q = 16 * high + low.
inline __m512i int16_pair(I a, I b) {
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    return _mm512_permutexvar_epi64(order, _mm512_packs_epi32(a.v, b.v));
}
inline void store_codes8(int8_t* codes, I a, I b) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), _mm512_cvtsepi16_epi8(int16_pair(a, b)));
}
inline void store_codes12(int8_t* high, int8_t* low, I a, I b) {
    const __m512i q = int16_pair(a, b);
    const __m512i h = _mm512_srai_epi16(_mm512_add_epi16(q, _mm512_set1_epi16(8)), 4);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(high), _mm512_cvtepi16_epi8(h));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(low), _mm512_cvtepi16_epi8(_mm512_sub_epi16(q, _mm512_slli_epi16(h, 4))));
}

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

// One block of 32 inputs by 16 outputs, unpacked to 8 registers of 4 inputs each.
struct Codes {
    __m512i c[8];
};
inline void unpack_nibbles(const uint8_t* w, Codes& out) {
    const __m512i mask = _mm512_set1_epi8(15);
    for (int j = 0; j < 4; ++j) {
        const __m512i raw = _mm512_loadu_si512(w + 64 * j);
        out.c[j] = _mm512_and_si512(raw, mask);
        out.c[j + 4] = _mm512_and_si512(_mm512_srli_epi16(raw, 4), mask);
    }
}
inline void unpack_bytes(const uint8_t* w, Codes& out) {
    for (int j = 0; j < 8; ++j) out.c[j] = _mm512_loadu_si512(w + 64 * j);
}
// Rows are taken in step, eight at a time, and of fewer rows the codes in parts: eight independent chains hide the latency of the dot
// product, also where a neighbour on the same core leaves half of the window. Sums of integers: any order, the same sum.
template <int R, int Step>
inline void dot_codes(const Codes& w, const int8_t* q, I* s) {
    constexpr int kParts = R <= 2 ? 4 : (R <= 4 ? 2 : 1), kSpan = 8 / kParts;
#pragma GCC unroll 2
    for (int first = 0; first < R; first += 8) {
        const int last = first + 8 < R ? first + 8 : R;
        __m512i part[kParts][8];
#pragma GCC unroll 8
        for (int r = first; r < last; ++r) {
            part[0][r - first] = s[r].v;
#pragma GCC unroll 4
            for (int p = 1; p < kParts; ++p) part[p][r - first] = _mm512_setzero_si512();
        }
#pragma GCC unroll 8
        for (int j = 0; j < kSpan; ++j) {
#pragma GCC unroll 4
            for (int p = 0; p < kParts; ++p) {
#pragma GCC unroll 8
                for (int r = first; r < last; ++r) {
                    const int at = p * kSpan + j;
                    part[p][r - first] = _mm512_dpbusd_epi32(part[p][r - first], w.c[at], bcast4(q + Step * r + 4 * at));
                }
            }
        }
#pragma GCC unroll 8
        for (int r = first; r < last; ++r) {
            __m512i sum = part[0][r - first];
            if constexpr (kParts == 2) sum = _mm512_add_epi32(sum, part[1][r - first]);
            if constexpr (kParts == 4) sum = _mm512_add_epi32(_mm512_add_epi32(sum, part[1][r - first]), _mm512_add_epi32(part[2][r - first], part[3][r - first]));
            s[r].v = sum;
        }
    }
}
template <int R, int Step>
inline void dot_nibbles(const Codes& w, const int8_t* q, I* s) {
    dot_codes<R, Step>(w, q, s);
}
template <int R, int Step>
inline void dot_bytes(const Codes& w, const int8_t* q, I* s) {
    dot_codes<R, Step>(w, q, s);
}

inline __attribute__((always_inline)) void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
inline __attribute__((always_inline)) void prefetch_far(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

}  // namespace fs::FS_ISA
