// Plain C++ for every other machine, written so that compilers can vectorise it.
#pragma once

#include <cmath>

#include "weights.h"

namespace fs::FS_ISA {

struct F {
    float v[16];
};
struct I {
    int32_t v[16];
};
struct M {
    bool v[16];
};

constexpr int kLineShift = 128;
constexpr int kSumSets = 4;
#define FS_ROW_TILE 4

#define FS_EACH for (int i = 0; i < 16; ++i)
#define FS_F(expression)         \
    F out;                       \
    FS_EACH out.v[i] = expression; \
    return out
#define FS_I(expression)         \
    I out;                       \
    FS_EACH out.v[i] = expression; \
    return out
#define FS_M(expression)         \
    M out;                       \
    FS_EACH out.v[i] = expression; \
    return out

inline F zero() { FS_F(0.0f); }
inline F set1(float x) { FS_F(x); }
inline F load(const float* p) { FS_F(p[i]); }
inline void store(float* p, F x) { FS_EACH p[i] = x.v[i]; }
inline M first(int n) { FS_M(i < n); }
inline F load_part(const float* p, int n) { FS_F(i < n ? p[i] : 0.0f); }
inline void store_part(float* p, F x, int n) {
    for (int i = 0; i < n && i < 16; ++i) p[i] = x.v[i];
}
inline F fma(F a, F b, F c) { FS_F(__builtin_fmaf(a.v[i], b.v[i], c.v[i])); }
inline F mul(F a, F b) { FS_F(a.v[i] * b.v[i]); }
inline F add(F a, F b) { FS_F(a.v[i] + b.v[i]); }
inline F sub(F a, F b) { FS_F(a.v[i] - b.v[i]); }
inline F div(F a, F b) { FS_F(a.v[i] / b.v[i]); }
// As x86 does it: the second operand when either is NaN.
inline F max(F a, F b) { FS_F(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline F min(F a, F b) { FS_F(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
inline F abs(F a) { FS_F(std::fabs(a.v[i])); }
inline M less(F a, F b) { FS_M(a.v[i] < b.v[i]); }
inline F select(M m, F yes, F no) { FS_F(m.v[i] ? yes.v[i] : no.v[i]); }
inline I select(M m, I yes, I no) { FS_I(m.v[i] ? yes.v[i] : no.v[i]); }
inline M both(M a, M b) { FS_M(a.v[i] && b.v[i]); }
inline M not_(M a) { FS_M(!a.v[i]); }
inline bool all(M a) {
    bool out = true;
    FS_EACH out &= a.v[i];
    return out;
}
inline uint32_t bits_of(M a) {
    uint32_t out = 0;
    FS_EACH out |= static_cast<uint32_t>(a.v[i]) << i;
    return out;
}
inline bool any(M a) {
    bool out = false;
    FS_EACH out |= a.v[i];
    return out;
}

inline I set1(int32_t x) { FS_I(x); }
inline I iota() { FS_I(i); }
inline I load(const int32_t* p) { FS_I(p[i]); }
inline void store(int32_t* p, I x) { FS_EACH p[i] = x.v[i]; }
inline I add(I a, I b) { FS_I(a.v[i] + b.v[i]); }
inline I times_256(I a) { FS_I(static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) << 8)); }
inline F to_float(I a) { FS_F(static_cast<float>(a.v[i])); }
inline I round_int(F a) { FS_I(static_cast<int32_t>(std::nearbyintf(a.v[i]))); }
inline float from_bits(uint32_t bits) {
    float out;
    __builtin_memcpy(&out, &bits, 4);
    return out;
}
inline F round_even(F a) { FS_F(std::nearbyintf(a.v[i])); }
// y * 2^n for whole n in -126..127
inline F scale_by_power(F y, F n) { FS_F(y.v[i] * from_bits(static_cast<uint32_t>(static_cast<int32_t>(n.v[i]) + 127) << 23)); }

// Shifting the half's fields into a float's and scaling by 2^112 is exact, subnormals included.
inline float half_to_float(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
    const uint32_t rest = static_cast<uint32_t>(h & 0x7FFFu) << 13;
    if ((h & 0x7C00u) == 0x7C00u) return from_bits(sign | 0x7F800000u | rest);
    const float magnitude = from_bits(rest) * from_bits(0x77800000u);
    return sign != 0 ? -magnitude : magnitude;
}
inline F load_half(const uint16_t* p) { FS_F(half_to_float(p[i])); }
inline F load_bf16(const uint16_t* p) { FS_F(from_bits(static_cast<uint32_t>(p[i]) << 16)); }
inline I magnitude_bits(F a) {
    I out;
    std::memcpy(out.v, a.v, sizeof out.v);
    FS_EACH out.v[i] &= 0x7FFFFFFF;
    return out;
}
inline I max(I a, I b) { FS_I(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline int32_t reduce_max(I a) {
    int32_t most = a.v[0];
    FS_EACH most = a.v[i] > most ? a.v[i] : most;
    return most;
}

// Sums of high and of low parts so far.
struct Parts {
    int32_t high = 0, low = 0;
};
inline int32_t high_sum(const Parts& parts) { return parts.high; }
inline int32_t low_sum(const Parts& parts) { return parts.low; }
inline void take_parts(Parts& sums, const float* x, F inverse, int8_t* high, int8_t* low) {
    for (int block = 0; block < 32; block += 16) {
        const I q = round_int(mul(load(x + block), inverse));
        FS_EACH {
            const int32_t code = q.v[i] + ((q.v[i] & 255) == 128 ? 1 : 0), upper = (code + 128) >> 8;
            high[block + i] = static_cast<int8_t>(upper);
            low[block + i] = static_cast<int8_t>(code - 256 * upper);
            sums.high += upper;
            sums.low += code - 256 * upper;
        }
    }
}

inline void take_span(Parts& sums, const float* x, F inverse, int8_t* high, int8_t* low) {
    take_parts(sums, x, inverse, high, low);
    take_parts(sums, x + 32, inverse, high + 32, low + 32);
}

inline float reduce_add(F a) {
    for (int half = 8; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) a.v[i] = a.v[i] + a.v[i + half];
    }
    return a.v[0];
}
inline float reduce_max(F a) {
    for (int half = 8; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) a.v[i] = a.v[i] > a.v[i + half] ? a.v[i] : a.v[i + half];
    }
    return a.v[0];
}
// Sixteen float64 sums.
struct D {
    double v[16];
};
inline D zero_wide() { return {}; }
inline D add_wide(D s, F x) {
    FS_EACH s.v[i] += static_cast<double>(x.v[i]);
    return s;
}
inline void store(double* p, D s) { FS_EACH p[i] = s.v[i]; }

struct Line {
    int8_t v[64];
};
inline Line load_line(const uint8_t* p) {
    Line out;
    for (int i = 0; i < 64; ++i) out.v[i] = static_cast<int8_t>(p[i] - 128);
    return out;
}
inline I dot4(I s, const Line& w, const int8_t* q) {
    FS_I(s.v[i] + w.v[4 * i] * q[0] + w.v[4 * i + 1] * q[1] + w.v[4 * i + 2] * q[2] + w.v[4 * i + 3] * q[3]);
}
inline void expand_span(const uint8_t* record, uint8_t* lines) {
    for (size_t b = 0; b < 2; ++b) {
        for (size_t out = 0; out < 16; ++out) {
            const size_t group = out % 4, lane = out / 4;
            const uint8_t* codes = record + b * kCodeBytes + group * kLineBytes + lane * 16;
            uint16_t factor[2];
            std::memcpy(factor, record + kFactors + b * kFactorBytes + group * 16 + lane * 4, 4);
            uint8_t table[16];
            for (int c = 0; c < 16; ++c) table[c] = static_cast<uint8_t>(static_cast<uint16_t>(c * factor[0] + factor[1]) >> kTableShift);
            for (size_t k = 0; k < 32; ++k) {
                lines[(b * 8 + k / 4) * kLineBytes + 4 * out + k % 4] = table[k < 16 ? codes[k] & 15 : codes[k - 16] >> 4];
            }
        }
    }
}

inline __attribute__((always_inline)) void prefetch(const void* p) { __builtin_prefetch(p); }
inline __attribute__((always_inline)) void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

#undef FS_EACH
#undef FS_F
#undef FS_I
#undef FS_M

}  // namespace fs::FS_ISA
