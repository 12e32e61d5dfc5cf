// Rows of activations as integers, in the order the linear kernels read them. The formula is in __init__.py beside this file.
#pragma once

#include "lanes.h"
#include "weights.h"

namespace fs::FS_ISA {

// Quantised rows lie in groups of 16. Per group and block of 32 inputs one record: 16 cache lines, one per row, so that threads
// that quantise neighbouring rows never write to the same line:
// 32 x int8 codes | a | a * sum | -8 * sum | -128 * sum   (sum = sum of the codes; float32, float32, int32, int32)
constexpr int kGroup = 16;
constexpr size_t kActRow = 64, kActRecord = kGroup * kActRow;
constexpr size_t kActScale = 32, kActScaledSum = 36, kActMinus8 = 40, kActMinus128 = 44;

// Rows of 16 bits are two such sets of records, one behind the other: q = 255 * high + low with both parts in -127..127, the codes of
// `high` beside the row's scale and sums, and the codes of `low` alone.
inline size_t act_part_bytes(int in) { return static_cast<size_t>((in + 2 * kBlock - 1) / (2 * kBlock)) * 2 * kActRecord; }
inline size_t act_group_bytes(int in, bool wide) { return act_part_bytes(in) * (wide ? 2 : 1); }
inline size_t act_bytes(int in, int rows, bool wide) { return act_group_bytes(in, wide) * static_cast<size_t>((rows + kGroup - 1) / kGroup); }

// What a linear layer reads: quantised groups, float rows, or both when the matrices of one layer differ in kind.
struct Rows {
    const uint8_t* quantised = nullptr;
    size_t group_bytes = 0;
    const uint8_t* image = nullptr;  // the same rows as amx_few.h reads them, when they are few
    const float* values = nullptr;
    size_t stride = 0;  // floats from row to row
};

// Codes of 16 values: round_half_even(x / a). A product with the reciprocal is off by less than 2e-5 at |x / a| <= 127 and 0.006 at
// 32512, so it decides all but the values that close to a tie; those (and steps too small for a reciprocal) take the true quotient.
template <bool Wide>
inline I codes_of(F x, float a, float reciprocal) {
    const F scaled = mul(x, set1(reciprocal));
    const F whole = round_even(scaled);
    const F off = abs(sub(scaled, whole));
    if (all(less(off, set1(Wide ? 0.49f : 0.49996f)))) return round_int(whole);
    return round_int(div(x, set1(a)));
}

template <bool Wide>
inline void store_codes(I q, int8_t* codes, int8_t* low) {
    if constexpr (!Wide) {
        store_int8(codes, q);
    } else {
        const F whole = to_float(q);
        const F high = round_even(mul(whole, set1(1.0f / 255.0f)));  // never near a tie: q / 255 is at least 1/510 from one
        store_int8(codes, round_int(high));
        store_int8(low, round_int(sub(whole, mul(high, set1(255.0f)))));
    }
}

// x[0..in) of row `row` into its group. `in` is a multiple of 32.
template <bool Wide>
inline void quantise_row_as(const float* x, int in, int row, uint8_t* act) {
    const int blocks = in / kBlock;
    const size_t part = act_part_bytes(in);
    uint8_t* out = act + act_group_bytes(in, Wide) * static_cast<size_t>(row / kGroup) + kActRow * static_cast<size_t>(row % kGroup);
    alignas(64) float step[16], reciprocal[16];
    for (int b = 0; b < blocks; ++b, out += kActRecord) {
        if (b % 16 == 0) {  // the steps of the next 16 blocks: one vector division instead of 16 scalar ones
            alignas(64) float largest[16] = {};
            for (int i = 0; i < 16 && b + i < blocks; ++i) {
                const float* block = x + (b + i) * kBlock;
                largest[i] = reduce_max(max(abs(load(block)), abs(load(block + 16))));
            }
            const F a = div(load(largest), set1(Wide ? 32512.0f : 127.0f));
            store(step, a);
            store(reciprocal, div(set1(1.0f), a));
        }
        const float a = step[b % 16];
        int8_t* codes = reinterpret_cast<int8_t*>(out);
        int8_t* low = codes + part;
        int32_t sum = 0;
        if (a > 0.0f) {
            const I q0 = codes_of<Wide>(load(x + b * kBlock), a, reciprocal[b % 16]);
            const I q1 = codes_of<Wide>(load(x + b * kBlock + 16), a, reciprocal[b % 16]);
            store_codes<Wide>(q0, codes, low);
            store_codes<Wide>(q1, codes + 16, low + 16);
            sum = reduce_add(add(q0, q1));
        } else {
            std::memset(codes, 0, kBlock);
            if (Wide) std::memset(low, 0, kBlock);
        }
        const float floats[2] = {a, a * static_cast<float>(sum)};
        const int32_t integers[2] = {-8 * sum, -128 * sum};
        std::memcpy(out + kActScale, floats, 8);
        std::memcpy(out + kActMinus8, integers, 8);
    }
    if (blocks % 2 != 0) {  // the zero block that fills the last record
        std::memset(out, 0, kActRow);
        if (Wide) std::memset(out + part, 0, kActRow);
    }
}

inline void quantise_row(const float* x, int in, int row, bool wide, uint8_t* act) {
    if (wide) {
        quantise_row_as<true>(x, in, row, act);
    } else {
        quantise_row_as<false>(x, in, row, act);
    }
}

// Rows [n, next multiple of 16) of the last group as zeros: the matrix unit computes whole groups.
inline void clear_rest(int in, int n, bool wide, uint8_t* act) {
    if (n % kGroup == 0) return;
    uint8_t* group = act + act_group_bytes(in, wide) * static_cast<size_t>(n / kGroup);
    for (size_t record = 0; record < act_group_bytes(in, wide); record += kActRecord) {
        std::memset(group + record + kActRow * static_cast<size_t>(n % kGroup), 0, kActRow * static_cast<size_t>(kGroup - n % kGroup));
    }
}

}  // namespace fs::FS_ISA
