// AVX2 with FMA and F16C: a lane set is two ymm registers, lanes 0..7 and 8..15.
#pragma once

#include <immintrin.h>

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

// maddubs saturates for codes above 127, so 8-bit codes are taken as signed (code - 128) and the shift is put back by the caller.
constexpr int kBytesShift = 128;
constexpr int kRowTile = 4;
constexpr int kRowTileWide = 4;

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
inline I times16(I x) { return {_mm256_slli_epi32(x.a, 4), _mm256_slli_epi32(x.b, 4)}; }
inline I times255(I x) {
    return {_mm256_sub_epi32(_mm256_slli_epi32(x.a, 8), x.a), _mm256_sub_epi32(_mm256_slli_epi32(x.b, 8), x.b)};
}
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
inline void store_int8(int8_t* p, I x) {
    alignas(32) int32_t wide[16];
    store(wide, x);
    for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(wide[i] > 127 ? 127 : (wide[i] < -128 ? -128 : wide[i]));
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
inline int32_t reduce_add(I x) {
    alignas(32) int32_t wide[16];
    store(wide, x);
    int32_t sum = 0;
    for (int i = 0; i < 16; ++i) sum += wide[i];
    return sum;
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

struct Codes {
    __m256i c[16];  // pairs: lanes 0..7 and 8..15 of each group of 4 inputs
};
inline void unpack_nibbles(const uint8_t* w, Codes& out) {
    const __m256i mask = _mm256_set1_epi8(15);
    for (int j = 0; j < 8; ++j) {
        const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 32 * j));
        out.c[j] = _mm256_and_si256(raw, mask);
        out.c[j + 8] = _mm256_and_si256(_mm256_srli_epi16(raw, 4), mask);
    }
}
inline void unpack_bytes(const uint8_t* w, Codes& out) {
    const __m256i flip = _mm256_set1_epi8(-128);
    for (int j = 0; j < 16; ++j) {
        out.c[j] = _mm256_xor_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 32 * j)), flip);
    }
}
// Eight products of at most 2 * 15 * 127 fit in 16 bits, so the widening add is done once per block.
inline I dot_nibbles_row(const Codes& w, const int8_t* q, I init) {
    __m256i a = _mm256_setzero_si256(), b = _mm256_setzero_si256();
    for (int j = 0; j < 8; ++j) {
        const __m256i x = bcast4(q + 4 * j);
        a = _mm256_add_epi16(a, _mm256_maddubs_epi16(w.c[2 * j], x));
        b = _mm256_add_epi16(b, _mm256_maddubs_epi16(w.c[2 * j + 1], x));
    }
    const __m256i ones = _mm256_set1_epi16(1);
    return {_mm256_add_epi32(init.a, _mm256_madd_epi16(a, ones)), _mm256_add_epi32(init.b, _mm256_madd_epi16(b, ones))};
}
inline I dot_bytes_row(const Codes& w, const int8_t* q, I init) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i a = init.a, b = init.b;
    for (int j = 0; j < 8; ++j) {
        const __m256i x = bcast4(q + 4 * j);
        const __m256i wa = w.c[2 * j], wb = w.c[2 * j + 1];
        a = _mm256_add_epi32(a, _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(wa), _mm256_sign_epi8(x, wa)), ones));
        b = _mm256_add_epi32(b, _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(wb), _mm256_sign_epi8(x, wb)), ones));
    }
    return {a, b};
}
template <int R, int Step>
inline void dot_nibbles(const Codes& w, const int8_t* q, I* s) {
    for (int r = 0; r < R; ++r) s[r] = dot_nibbles_row(w, q + Step * r, s[r]);
}
template <int R, int Step>
inline void dot_bytes(const Codes& w, const int8_t* q, I* s) {
    for (int r = 0; r < R; ++r) s[r] = dot_bytes_row(w, q + Step * r, s[r]);
}

inline __attribute__((always_inline)) void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
inline __attribute__((always_inline)) void prefetch_far(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

}  // namespace fs::FS_ISA
