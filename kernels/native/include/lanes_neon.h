// NEON on 64-bit ARM: a lane set is four q registers, lanes 4 i .. 4 i + 3 in the i-th. With dot products (ARMv8.2) where the compiler targets them.
#pragma once

#include <algorithm>
#include <arm_neon.h>

#include "weights.h"

namespace fs::FS_ISA {

struct F {
    float32x4_t v[4];
};
struct I {
    int32x4_t v[4];
};
struct M {
    uint32x4_t v[4];  // all ones or all zeros
};

// Both byte products are of signed bytes, so bytes of weights are taken as the numbers they stand for (byte - 128).
constexpr int kLineShift = 128;
constexpr int kSumSets = 2;  // a lane set already holds four chains
#define FS_ROW_TILE 2        // whose sums, 16 registers, leave room for the rest

// The four quarters of a lane set, each by the same formula.
template <class T, class Fn>
inline __attribute__((always_inline)) T quarters(Fn&& fn) {
    return {{fn(0), fn(1), fn(2), fn(3)}};
}

inline F set1(float x) {
    const float32x4_t all = vdupq_n_f32(x);
    return {{all, all, all, all}};
}
inline F zero() { return set1(0.0f); }
inline F load(const float* p) {
    return quarters<F>([&](int i) { return vld1q_f32(p + 4 * i); });
}
inline void store(float* p, F x) {
    for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, x.v[i]);
}
inline I set1(int32_t x) {
    const int32x4_t all = vdupq_n_s32(x);
    return {{all, all, all, all}};
}
inline I iota() {
    const int32x4_t lanes = {0, 1, 2, 3};
    return quarters<I>([&](int i) { return vaddq_s32(lanes, vdupq_n_s32(4 * i)); });
}
inline M first(int n) {
    const int32x4_t count = vdupq_n_s32(n);
    const I lane = iota();
    return quarters<M>([&](int i) { return vcltq_s32(lane.v[i], count); });
}
// Nothing behind the n-th value is touched.
inline F load_part(const float* p, int n) {
    if (n >= 16) return load(p);
    float held[16] = {};
    std::memcpy(held, p, static_cast<size_t>(std::max(n, 0)) * sizeof(float));
    return load(held);
}
inline void store_part(float* p, F x, int n) {
    if (n >= 16) return store(p, x);
    float held[16];
    store(held, x);
    std::memcpy(p, held, static_cast<size_t>(std::max(n, 0)) * sizeof(float));
}
inline F fma(F x, F y, F z) {
    return quarters<F>([&](int i) { return vfmaq_f32(z.v[i], x.v[i], y.v[i]); });
}
inline F mul(F x, F y) {
    return quarters<F>([&](int i) { return vmulq_f32(x.v[i], y.v[i]); });
}
inline F add(F x, F y) {
    return quarters<F>([&](int i) { return vaddq_f32(x.v[i], y.v[i]); });
}
inline F sub(F x, F y) {
    return quarters<F>([&](int i) { return vsubq_f32(x.v[i], y.v[i]); });
}
inline F div(F x, F y) {
    return quarters<F>([&](int i) { return vdivq_f32(x.v[i], y.v[i]); });
}
// As x86 does it: the second operand when either is NaN (vmaxq would give the NaN).
inline float32x4_t larger(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
inline F max(F x, F y) {
    return quarters<F>([&](int i) { return larger(x.v[i], y.v[i]); });
}
inline F min(F x, F y) {
    return quarters<F>([&](int i) { return vbslq_f32(vcltq_f32(x.v[i], y.v[i]), x.v[i], y.v[i]); });
}
inline F abs(F x) {
    return quarters<F>([&](int i) { return vabsq_f32(x.v[i]); });
}
inline M less(F x, F y) {
    return quarters<M>([&](int i) { return vcltq_f32(x.v[i], y.v[i]); });
}
inline F select(M m, F yes, F no) {
    return quarters<F>([&](int i) { return vbslq_f32(m.v[i], yes.v[i], no.v[i]); });
}
inline I select(M m, I yes, I no) {
    return quarters<I>([&](int i) { return vbslq_s32(m.v[i], yes.v[i], no.v[i]); });
}
inline M both(M x, M y) {
    return quarters<M>([&](int i) { return vandq_u32(x.v[i], y.v[i]); });
}
inline M not_(M x) {
    return quarters<M>([&](int i) { return vmvnq_u32(x.v[i]); });
}
inline bool all(M x) { return vminvq_u32(vandq_u32(vandq_u32(x.v[0], x.v[1]), vandq_u32(x.v[2], x.v[3]))) != 0; }
inline bool any(M x) { return vmaxvq_u32(vorrq_u32(vorrq_u32(x.v[0], x.v[1]), vorrq_u32(x.v[2], x.v[3]))) != 0; }
// A byte a lane, one bit of each kept, the bits of eight lanes added up.
inline uint32_t bits_of(M x) {
    const uint16x8_t low = vuzp1q_u16(vreinterpretq_u16_u32(x.v[0]), vreinterpretq_u16_u32(x.v[1]));
    const uint16x8_t high = vuzp1q_u16(vreinterpretq_u16_u32(x.v[2]), vreinterpretq_u16_u32(x.v[3]));
    const uint8x16_t bit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const uint8x16_t bits = vandq_u8(vuzp1q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high)), bit);
    return static_cast<uint32_t>(vaddv_u8(vget_low_u8(bits))) | static_cast<uint32_t>(vaddv_u8(vget_high_u8(bits))) << 8;
}

inline I load(const int32_t* p) {
    return quarters<I>([&](int i) { return vld1q_s32(p + 4 * i); });
}
inline void store(int32_t* p, I x) {
    for (int i = 0; i < 4; ++i) vst1q_s32(p + 4 * i, x.v[i]);
}
inline I times_256(I x) {
    return quarters<I>([&](int i) { return vshlq_n_s32(x.v[i], 8); });
}
inline I add(I x, I y) {
    return quarters<I>([&](int i) { return vaddq_s32(x.v[i], y.v[i]); });
}
inline F to_float(I x) {
    return quarters<F>([&](int i) { return vcvtq_f32_s32(x.v[i]); });
}
inline I round_int(F x) {  // to nearest, ties to even
    return quarters<I>([&](int i) { return vcvtnq_s32_f32(x.v[i]); });
}
inline F round_even(F x) {
    return quarters<F>([&](int i) { return vrndnq_f32(x.v[i]); });
}
// y * 2^n for whole n in -126..127
inline F scale_by_power(F y, F n) {
    const I e = round_int(n);
    const int32x4_t bias = vdupq_n_s32(127);
    return quarters<F>([&](int i) { return vmulq_f32(y.v[i], vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(e.v[i], bias), 23))); });
}

inline F load_half(const uint16_t* p) {
    return quarters<F>([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); });
}
inline F load_bf16(const uint16_t* p) {
    return quarters<F>([&](int i) { return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vld1_u16(p + 4 * i)), 16)); });
}
inline I magnitude_bits(F x) {
    const int32x4_t magnitude = vdupq_n_s32(0x7FFFFFFF);
    return quarters<I>([&](int i) { return vandq_s32(vreinterpretq_s32_f32(x.v[i]), magnitude); });
}
inline I max(I x, I y) {
    return quarters<I>([&](int i) { return vmaxq_s32(x.v[i], y.v[i]); });
}
inline int32_t reduce_max(I x) { return vmaxvq_s32(vmaxq_s32(vmaxq_s32(x.v[0], x.v[1]), vmaxq_s32(x.v[2], x.v[3]))); }

// Sums of high and of low parts so far.
struct Parts {
    int32x4_t high = vdupq_n_s32(0), low = vdupq_n_s32(0);
};
inline int32_t high_sum(const Parts& parts) { return vaddvq_s32(parts.high); }
inline int32_t low_sum(const Parts& parts) { return vaddvq_s32(parts.low); }
inline int16x8_t codes8(int32x4_t a, int32x4_t b) {
    const int16x8_t code = vcombine_s16(vmovn_s32(a), vmovn_s32(b));
    const uint16x8_t ends = vceqq_s16(vandq_s16(code, vdupq_n_s16(255)), vdupq_n_s16(128));
    return vsubq_s16(code, vreinterpretq_s16_u16(ends));
}
inline void take_parts(Parts& sums, const float* x, F inverse, int8_t* high, int8_t* low) {
    for (int block = 0; block < 32; block += 16) {
        const I q = round_int(mul(load(x + block), inverse));
        const int16x8_t a = codes8(q.v[0], q.v[1]), b = codes8(q.v[2], q.v[3]);
        const int8x16_t upper = vcombine_s8(vrshrn_n_s16(a, 8), vrshrn_n_s16(b, 8)), lower = vcombine_s8(vmovn_s16(a), vmovn_s16(b));
        vst1q_s8(high + block, upper);
        vst1q_s8(low + block, lower);
        sums.high = vpadalq_s16(sums.high, vpaddlq_s8(upper));
        sums.low = vpadalq_s16(sums.low, vpaddlq_s8(lower));
    }
}
inline void take_span(Parts& sums, const float* x, F inverse, int8_t* high, int8_t* low) {
    take_parts(sums, x, inverse, high, low);
    take_parts(sums, x + 32, inverse, high + 32, low + 32);
}

// Folds lanes i and i + 8, then i + 4, i + 2, i + 1.
inline float reduce_add(F x) {
    const float32x4_t s4 = vaddq_f32(vaddq_f32(x.v[0], x.v[2]), vaddq_f32(x.v[1], x.v[3]));
    const float32x2_t s2 = vadd_f32(vget_low_f32(s4), vget_high_f32(s4));
    return vget_lane_f32(s2, 0) + vget_lane_f32(s2, 1);
}
inline float reduce_max(F x) {
    const float32x4_t s4 = larger(larger(x.v[0], x.v[2]), larger(x.v[1], x.v[3]));
    const float32x4_t s2 = larger(s4, vextq_f32(s4, s4, 2));
    return vgetq_lane_f32(larger(s2, vextq_f32(s2, s2, 1)), 0);
}

// Sixteen float64 sums.
struct D {
    float64x2_t v[8];
};
inline D zero_wide() {
    const float64x2_t none = vdupq_n_f64(0.0);
    return {{none, none, none, none, none, none, none, none}};
}
inline D add_wide(D s, F x) {
    for (int i = 0; i < 4; ++i) {
        s.v[2 * i] = vaddq_f64(s.v[2 * i], vcvt_f64_f32(vget_low_f32(x.v[i])));
        s.v[2 * i + 1] = vaddq_f64(s.v[2 * i + 1], vcvt_high_f64_f32(x.v[i]));
    }
    return s;
}
inline void store(double* p, D s) {
    for (int i = 0; i < 8; ++i) vst1q_f64(p + 2 * i, s.v[i]);
}

struct Line {
    int8x16_t v[4];
};
inline Line load_line(const uint8_t* p) {
    const uint8x16_t flip = vdupq_n_u8(128);
    return quarters<Line>([&](int i) { return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(p + 16 * i), flip)); });
}
inline int8x16_t bcast4(const int8_t* q) {
    int32_t word;
    std::memcpy(&word, q, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(word));
}
#if defined(__ARM_FEATURE_DOTPROD)
#define FS_DOT_LINE(j, s, line, q) dot_line<j>(s, line, q)
inline int32x4_t dot_quarter(int32x4_t s, int8x16_t w, int8x16_t x) { return vdotq_s32(s, w, x); }
// The inputs of four lines stay in one register, whose quarter the instruction picks.
template <int J>
inline I dot_line(I s, const Line& w, const int8_t* q) {
    const int8x16_t x = vld1q_s8(q + J / 4 * 16);
    return quarters<I>([&](int i) { return vdotq_laneq_s32(s.v[i], w.v[i], x, J % 4); });
}
#else
// Two products of at most 127 * 127 fit in 16 bits.
inline int32x4_t dot_quarter(int32x4_t s, int8x16_t w, int8x16_t x) {
    return vpadalq_s16(s, vpaddq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(x)), vmull_high_s8(w, x)));
}
#endif
inline I dot4(I s, const Line& w, const int8_t* q) {
    const int8x16_t x = bcast4(q);
    return quarters<I>([&](int i) { return dot_quarter(s.v[i], w.v[i], x); });
}

// The bytes that the sixteen codes of a block stand for: the upper halves of 16-bit numbers.
static_assert(kTableShift == 8);
inline uint8x16_t table_of(const uint8_t* factors) {
    uint16_t factor[2];
    std::memcpy(factor, factors, 4);
    const uint16x8_t low_codes = {0, 1, 2, 3, 4, 5, 6, 7}, high_codes = {8, 9, 10, 11, 12, 13, 14, 15}, offset = vdupq_n_u16(factor[1]);
    const uint16x8_t low = vmlaq_n_u16(offset, low_codes, factor[0]), high = vmlaq_n_u16(offset, high_codes, factor[0]);
    return vuzp2q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high));
}
// Doubleword j of output g goes to doubleword g of line j.
inline void store_lines(const uint32x4_t (&g)[4], uint8_t* lines) {
    const uint64x2_t a = vreinterpretq_u64_u32(vtrn1q_u32(g[0], g[1])), b = vreinterpretq_u64_u32(vtrn2q_u32(g[0], g[1]));
    const uint64x2_t c = vreinterpretq_u64_u32(vtrn1q_u32(g[2], g[3])), d = vreinterpretq_u64_u32(vtrn2q_u32(g[2], g[3]));
    const uint64x2_t out[4] = {vtrn1q_u64(a, c), vtrn1q_u64(b, d), vtrn2q_u64(a, c), vtrn2q_u64(b, d)};
    for (size_t j = 0; j < 4; ++j) vst1q_u8(lines + kLineBytes * j, vreinterpretq_u8_u64(out[j]));
}
inline void expand_span(const uint8_t* record, uint8_t* lines) {
    for (size_t b = 0; b < 2; ++b) {
        for (size_t lane = 0; lane < 4; ++lane) {  // outputs 4 lane .. 4 lane + 3, one of each group
            uint32x4_t first[4], second[4];
            for (size_t g = 0; g < 4; ++g) {
                const uint8x16_t table = table_of(record + kFactors + b * kFactorBytes + g * 16 + 4 * lane);
                const uint8x16_t raw = vld1q_u8(record + b * kCodeBytes + g * kLineBytes + 16 * lane);
                first[g] = vreinterpretq_u32_u8(vqtbl1q_u8(table, vandq_u8(raw, vdupq_n_u8(15))));
                second[g] = vreinterpretq_u32_u8(vqtbl1q_u8(table, vshrq_n_u8(raw, 4)));
            }
            store_lines(first, lines + b * 8 * kLineBytes + 16 * lane);
            store_lines(second, lines + (b * 8 + 4) * kLineBytes + 16 * lane);
        }
    }
}

inline __attribute__((always_inline)) void prefetch(const void* p) { __builtin_prefetch(p); }
inline __attribute__((always_inline)) void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace fs::FS_ISA
