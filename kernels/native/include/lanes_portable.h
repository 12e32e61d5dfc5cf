// Plain C++ for every other machine (written so that compilers can vectorise it, NEON included).
#pragma once

#include <cmath>

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

constexpr int kBytesShift = 0;
constexpr int kRowTile = 4;
constexpr int kRowTileWide = 4;

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
inline I times16(I a) { FS_I(16 * a.v[i]); }
inline I times255(I a) { FS_I(255 * a.v[i]); }
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
inline void store_int8(int8_t* p, I x) {
    FS_EACH p[i] = static_cast<int8_t>(x.v[i] > 127 ? 127 : (x.v[i] < -128 ? -128 : x.v[i]));
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
inline int32_t reduce_add(I a) {
    int32_t sum = 0;
    FS_EACH sum += a.v[i];
    return sum;
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

struct Codes {
    uint8_t c[8][64];
};
inline void unpack_nibbles(const uint8_t* w, Codes& out) {
    for (int j = 0; j < 4; ++j) {
        for (int i = 0; i < 64; ++i) {
            out.c[j][i] = w[64 * j + i] & 15;
            out.c[j + 4][i] = w[64 * j + i] >> 4;
        }
    }
}
inline void unpack_bytes(const uint8_t* w, Codes& out) { std::memcpy(out.c, w, 512); }
template <int R, int Step>
inline void dot_codes(const Codes& w, const int8_t* q, I* s) {
    for (int r = 0; r < R; ++r, q += Step) {
        for (int j = 0; j < 8; ++j) {
            for (int i = 0; i < 16; ++i) {
                int32_t sum = 0;
                for (int t = 0; t < 4; ++t) sum += static_cast<int32_t>(w.c[j][4 * i + t]) * q[4 * j + t];
                s[r].v[i] += sum;
            }
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

inline __attribute__((always_inline)) void prefetch(const void* p) { __builtin_prefetch(p); }
inline __attribute__((always_inline)) void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

#undef FS_EACH
#undef FS_F
#undef FS_I
#undef FS_M

}  // namespace fs::FS_ISA
