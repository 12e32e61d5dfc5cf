// Sixteen lanes of float32, whatever the machine: one zmm, two ymm, four NEON registers or a plain array.
//
// All float kernels are written once over these types. Every operation has one meaning on every instruction set (fused
// multiply-add is always fused, reductions always fold halves onto each other), so results are the same bits everywhere.
// Compiled once per instruction set with -ffp-contract=off and FS_ISA = the namespace's name.
//
//   F       16 x float32        I       16 x int32        M   16 booleans        B64   64 bytes
//   D       16 x float64, sums only
//   Line    64 bytes of weights: 4 inputs of 16 outputs, numbers + 128
//   load_line(p); dot4(s, line, q)   s + line's 4 inputs . q[0..4) of each output, minus kLineShift * sum(q), whole numbers
//   FS_DOT_LINE(j, s, line, q)      the same for line j, of q's 64 inputs; j is known when compiling
//   take_parts(sums, x, inverse, high, low)   both parts of 32 codes of a row (linear's contract), added to `sums`
//   take_span(...)                  the same of 64
//   expand_span(record, lines)      16 lines from a record of 4 bits (weights.h)
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#ifndef FS_ISA
#error "FS_ISA must name the instruction set"
#endif

#if defined(__AVX512F__) && defined(__AVX512VNNI__)
#include "lanes_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__)
#include "lanes_avx2.h"
#elif defined(FS_NEON)  // by name: every 64-bit ARM compiler targets NEON, in the portable set too
#include "lanes_neon.h"
#else
#include "lanes_portable.h"
#endif

namespace fs::FS_ISA {

constexpr int kLanes = 16;
constexpr int kRowTile = FS_ROW_TILE;

// (prefetch is always inlined: the compiler takes a function of nothing but prefetches for one without effects and drops its calls.)
//
// fn(0) .. fn(N - 1), unrolled before the compiler decides what lives in registers: an array that is indexed so, in functions that are all
// inlined, becomes registers. (A loop that is unrolled later leaves it in memory, written and read again around every asm statement.)
#define FS_INLINE inline __attribute__((always_inline))
template <class Fn, int... R>
FS_INLINE void each_of(std::integer_sequence<int, R...>, Fn&& fn) {
    (fn(std::integral_constant<int, R>{}), ...);
}
template <int N, class Fn>
FS_INLINE void each(Fn&& fn) {
    each_of(std::make_integer_sequence<int, N>{}, fn);
}

// (A macro, since one function more in the innermost loop moves what the compiler inlines elsewhere.)
#if !defined(FS_DOT_LINE)
#define FS_DOT_LINE(j, s, line, q) dot4(s, line, q + 4 * j)
#endif

inline F bcast(const float* p) { return set1(*p); }


// exp(x) by range reduction to |r| <= ln2 / 2 and the Taylor series to r^7 (error below 1 ulp); 0 below -87, where the result would soon be subnormal (and slow).
// For x <= 88 only (softmax weights have x <= 0); exp_clamped takes anything.
inline F exp_lanes(F x) {
    const F low = set1(-87.0f);
    const M tiny = less(x, low);
    x = max(x, low);
    const F n = round_even(mul(x, set1(1.44269504f)));
    F r = fma(n, set1(-0.693359375f), x);
    r = fma(n, set1(2.12194440e-4f), r);
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
inline F exp_clamped(F x) { return exp_lanes(min(x, set1(88.0f))); }

// Folds halves onto each other like reduce_add of F.
inline double reduce_add(D s) {
    double v[16];
    store(v, s);
    for (int half = 8; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) v[i] = v[i] + v[i + half];
    }
    return v[0];
}

// silu(g) * u, silu(g) = g / (1 + exp(-g)) (Shazeer 2020, SwiGLU).
inline F silu_mul(F gate, F up) {
    const F denominator = add(set1(1.0f), exp_clamped(sub(zero(), gate)));
    return mul(div(gate, denominator), up);
}

}  // namespace fs::FS_ISA
