// Sixteen lanes of float32, whatever the machine: one zmm, two ymm or a plain array.
//
// All float kernels are written once over these types. Every operation has one meaning on every instruction set (fused
// multiply-add is always fused, reductions always fold halves onto each other), so results are the same bits everywhere.
// Compiled once per instruction set with -ffp-contract=off and FS_ISA = the namespace's name.
//
//   F       16 x float32        I       16 x int32        M   16 booleans        B64   64 bytes
//   dot_nibbles(w, q, init)     init + dot of one block: codes 0..15, `w` = 4 x 64 packed bytes, q = 32 int8
//   dot_bytes(w, q, init)       the same for codes 0..255, `w` = 8 x 64 bytes; minus kBytesShift * sum(q)
#pragma once

#include <cstdint>
#include <cstring>

#ifndef FS_ISA
#error "FS_ISA must name the instruction set"
#endif

#if defined(__AVX512F__) && defined(__AVX512VNNI__)
#include "lanes_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__)
#include "lanes_avx2.h"
#else
#include "lanes_portable.h"
#endif

namespace fs::FS_ISA {

constexpr int kLanes = 16;

inline F bcast(const float* p) { return set1(*p); }

// exp(x) by range reduction to |r| <= ln2 / 2 and the Taylor series to r^7 (error below 1 ulp); 0 below -87.3.
inline F exp_lanes(F x) {
    const F high = set1(88.3762589f);
    const F low = set1(-87.3365448f);
    const M tiny = less(x, low);
    x = min(max(x, low), high);
    const I n = round_int(mul(x, set1(1.44269504f)));
    const F fn = to_float(n);
    F r = fma(fn, set1(-0.693359375f), x);
    r = fma(fn, set1(2.12194440e-4f), r);
    F y = set1(1.0f / 5040.0f);
    y = fma(y, r, set1(1.0f / 720.0f));
    y = fma(y, r, set1(1.0f / 120.0f));
    y = fma(y, r, set1(1.0f / 24.0f));
    y = fma(y, r, set1(1.0f / 6.0f));
    y = fma(y, r, set1(0.5f));
    y = fma(y, r, set1(1.0f));
    y = fma(y, r, set1(1.0f));
    return select(tiny, zero(), scale_by_power(y, n));
}

inline float exp_one(float x) {
    alignas(64) float out[16];
    store(out, exp_lanes(set1(x)));
    return out[0];
}

// silu(g) * u, silu(g) = g / (1 + exp(-g)) (Shazeer 2020, SwiGLU).
inline F silu_mul(F gate, F up) {
    const F denominator = add(set1(1.0f), exp_lanes(sub(zero(), gate)));
    return mul(div(gate, denominator), up);
}

}  // namespace fs::FS_ISA
