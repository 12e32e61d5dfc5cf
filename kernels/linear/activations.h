// Rows of activations as integers, in the order the linear kernels read them. The formula is in __init__.py beside this file.
#pragma once

#include <algorithm>

#include "lanes.h"
#include "weights.h"

namespace fs::FS_ISA {

// Quantised rows lie in groups of 16. Per group and block of 32 inputs one record:
// 16 lines of 64 bytes, one per row: 32 x int8 codes | 32 x int8 low codes, where rows are in parts
// 16 x { a | a * sum | -8 * sum | -128 * sum }   (sum = sum of the codes; float32, float32, int32, int32)
// No two groups of four rows share a cache line, so threads that quantise neighbouring rows seldom write to the same.
constexpr int kGroup = 16;
constexpr size_t kActRow = 64, kActLow = 32, kActFields = kGroup * kActRow, kActField = 16;
constexpr size_t kActRecord = kActFields + kGroup * kActField;
constexpr size_t kActScale = 0, kActScaledSum = 4, kActMinus8 = 8, kActMinus128 = 12;

inline size_t act_group_bytes(int in) { return static_cast<size_t>((in + 2 * kBlock - 1) / (2 * kBlock)) * 2 * kActRecord; }
inline size_t act_bytes(int in, int rows) { return act_group_bytes(in) * static_cast<size_t>((rows + kGroup - 1) / kGroup); }

constexpr float largest_code(Fine fine) { return fine == Fine::Bits8 ? 127.0f : (fine == Fine::Bits12 ? 127 * 16 + 7.0f : 255 * 127 + 127.0f); }
// Sums over high and low codes -> sums over the codes; both parts fit a byte.
template <Fine A>
inline I join_parts(I high, I low) {
    if constexpr (A == Fine::Bits12) return add(times16(high), low);
    return add(times255(high), low);
}

// What a linear layer reads: quantised groups, float rows, or both when the matrices of one layer differ in kind.
struct Rows {
    const uint8_t* quantised = nullptr;
    size_t group_bytes = 0;
    const uint8_t* image = nullptr;  // the same rows as amx_few.h reads them, when they are few
    const float* values = nullptr;
    size_t stride = 0;  // floats from row to row
};

// Codes of 32 values: round_half_even(x / a). A product with the reciprocal is off by less than 2e-5 at |x / a| <= 127 and 0.006 at
// 32512, so it decides all but the values that close to a tie; those (and steps too small for a reciprocal) take the true quotient.
template <Fine A>
FS_INLINE void codes_of(const float* x, float a, float reciprocal, I* first, I* second) {
    const F x0 = load(x), x1 = load(x + 16), by = set1(reciprocal);
    const F scaled0 = mul(x0, by), scaled1 = mul(x1, by);
    const F whole0 = round_even(scaled0), whole1 = round_even(scaled1);
    const F off = max(abs(sub(scaled0, whole0)), abs(sub(scaled1, whole1)));
    if (all(less(off, set1(in_parts(A) ? 0.49f : 0.49996f)))) {
        *first = round_int(whole0);
        *second = round_int(whole1);
    } else {
        *first = round_int(div(x0, set1(a)));
        *second = round_int(div(x1, set1(a)));
    }
}

template <Fine A>
FS_INLINE void store_codes(I a, I b, int8_t* codes) {
    if constexpr (A == Fine::Bits8) {
        store_codes8(codes, a, b);
    } else if constexpr (A == Fine::Bits12) {
        store_codes12(codes, codes + kActLow, a, b);
    } else {
        for (const I q : {a, b}) {
            const F whole = to_float(q);
            const F high = round_even(mul(whole, set1(1.0f / 255.0f)));  // never near a tie: q / 255 is at least 1/510 from one
            store_int8(codes, round_int(high));
            store_int8(codes + kActLow, round_int(sub(whole, mul(high, set1(255.0f)))));
            codes += 16;
        }
    }
}

// Sixteen blocks at a time (the last time fewer): their largest values, steps and sums are found together.
template <Fine A>
inline void quantise_blocks(const float* x, int blocks, uint8_t* record, size_t r) {
    F most[16];
    for (int b = 0; b < 16; ++b) most[b] = b < blocks ? max(abs(load(x + b * kBlock)), abs(load(x + b * kBlock + 16))) : zero();
    const F a = div(reduce_max16(most), set1(largest_code(A)));
    alignas(64) float step[16], reciprocal[16], scaled[16];
    alignas(64) int32_t whole[16];
    store(step, a);
    store(reciprocal, div(set1(1.0f), a));
    I sums[16];
    for (int b = 0; b < 16; ++b) sums[b] = set1(0);
    for (int b = 0; b < blocks; ++b) {
        auto* codes = reinterpret_cast<int8_t*>(record + static_cast<size_t>(b) * kActRecord + kActRow * r);
        if (step[b] > 0.0f) {
            I first, second;
            codes_of<A>(x + b * kBlock, step[b], reciprocal[b], &first, &second);
            store_codes<A>(first, second, codes);
            sums[b] = add(first, second);
        } else {
            std::memset(codes, 0, kActRow);
        }
    }
    const I sum = reduce_add16(sums);
    store(whole, sum);
    store(scaled, mul(a, to_float(sum)));
    for (int b = 0; b < blocks; ++b) {
        uint8_t* fields = record + static_cast<size_t>(b) * kActRecord + kActFields + kActField * r;
        const float floats[2] = {step[b], scaled[b]};
        const int32_t integers[2] = {-8 * whole[b], -128 * whole[b]};
        std::memcpy(fields, floats, 8);
        std::memcpy(fields + 8, integers, 8);
    }
}

// x[0..in) of row `row` into its group. `in` is a multiple of 32.
template <Fine A>
inline void quantise_row_as(const float* x, int in, int row, uint8_t* act) {
    const int blocks = in / kBlock;
    const auto r = static_cast<size_t>(row % kGroup);
    uint8_t* record = act + act_group_bytes(in) * static_cast<size_t>(row / kGroup);
    for (int b = 0; b < blocks; b += 16, record += 16 * kActRecord) quantise_blocks<A>(x + b * kBlock, std::min(16, blocks - b), record, r);
    if (blocks % 2 == 0) return;
    record = act + act_group_bytes(in) * static_cast<size_t>(row / kGroup) + static_cast<size_t>(blocks) * kActRecord;
    std::memset(record + kActRow * r, 0, kActRow);  // the zero block that fills the last record
    std::memset(record + kActFields + kActField * r, 0, kActField);
}

inline void quantise_row(const float* x, int in, int row, Fine fine, uint8_t* act) {
    switch (fine) {
        case Fine::Bits8: quantise_row_as<Fine::Bits8>(x, in, row, act); break;
        case Fine::Bits12: quantise_row_as<Fine::Bits12>(x, in, row, act); break;
        default: quantise_row_as<Fine::Bits16>(x, in, row, act); break;
    }
}

// Rows [n, next multiple of 16) of the last group as zeros: the matrix unit computes whole groups.
inline void clear_rest(int in, int n, uint8_t* act) {
    const auto r = static_cast<size_t>(n % kGroup);
    if (r == 0) return;
    uint8_t* group = act + act_group_bytes(in) * static_cast<size_t>(n / kGroup);
    for (size_t at = 0; at < act_group_bytes(in); at += kActRecord) {
        std::memset(group + at + kActRow * r, 0, kActRow * (kGroup - r));
        std::memset(group + at + kActFields + kActField * r, 0, kActField * (kGroup - r));
    }
}

}  // namespace fs::FS_ISA
