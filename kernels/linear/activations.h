// Rows of activations as whole numbers, in the order the linear kernels read them. The formula is in __init__.py beside this file.
#pragma once

#include <algorithm>
#include <cmath>

#include "lanes.h"
#include "weights.h"

namespace fs::FS_ISA {

constexpr int kGroup = 16;
constexpr float kLargestCode = 256 * 127 + 127;
constexpr float kLeastRow = 0x1p-100f;  // a row whose values are all smaller counts as zeros: its reciprocal would not be finite
constexpr int32_t kInfinityBits = 0x7F800000;

// What a sum over a row's codes becomes a float with: the row's step, and the sums that make up for weights being 128 too large.
struct RowFields {
    float step;
    int32_t high, low;  // minus 128 times the sum of the parts
    int32_t unused;
};

// n rows of `in` values as codes: groups of 16 rows (fewer than 16 rows: of n). Per group and span of 64 inputs, first a line of 64
// high parts for each row of the group, then as many of low parts. Fields of all rows follow. `groups` round n up: the matrix unit reads,
// and never uses, the lines of rows that are not there.
struct RowLayout {
    size_t group, spans, groups;

    RowLayout(int in, int n)
        : group(static_cast<size_t>(std::min(n, kGroup))),
          spans(static_cast<size_t>((in + kSpan - 1) / kSpan)),
          groups(static_cast<size_t>((n + kGroup - 1) / kGroup)) {}
    size_t part() const { return group * kLineBytes; }  // from high parts to low parts
    size_t span() const { return 2 * part(); }
    size_t group_bytes() const { return spans * span(); }
    size_t code_bytes() const { return groups * group_bytes(); }
    size_t bytes() const { return code_bytes() + groups * kGroup * sizeof(RowFields); }
};

// Up to n rows of at most `in` values fit, however few they are.
inline size_t rows_bytes(int in, int n) { return RowLayout(in, (n + kGroup - 1) / kGroup * kGroup).bytes(); }

// What a linear layer reads: codes, float rows, or both when the matrices of one layer differ in kind.
struct Rows {
    const uint8_t* codes = nullptr;
    const RowFields* fields = nullptr;
    size_t part = 0, span = 0, group_bytes = 0;
    const float* values = nullptr;
    size_t stride = 0;  // floats from row to row

    void read(const uint8_t* from, const RowLayout& layout) {
        codes = from;
        fields = reinterpret_cast<const RowFields*>(from + layout.code_bytes());
        part = layout.part();
        span = layout.span();
        group_bytes = layout.group_bytes();
    }
    // High parts of row r's first span.
    const uint8_t* row(int r) const { return codes + group_bytes * static_cast<size_t>(r / kGroup) + kLineBytes * static_cast<size_t>(r % kGroup); }
};

// x[0..in) as row r of `to`, when the bits of its largest magnitude are known. `in` is a multiple of 32.
inline void quantise_row(const float* x, int in, int r, const RowLayout& layout, uint8_t* to, int32_t bits) {
    float largest;
    std::memcpy(&largest, &bits, 4);
    const bool numbers = bits < kInfinityBits, empty = largest < kLeastRow;
    const F inverse = set1(empty || !numbers ? 0.0f : kLargestCode / largest);
    Parts sums;
    auto* codes = reinterpret_cast<int8_t*>(to + layout.group_bytes() * static_cast<size_t>(r / kGroup) + kLineBytes * static_cast<size_t>(r % kGroup));
    const size_t part = layout.part(), span = layout.span();
    int i = 0;
    for (; i + kSpan <= in; i += kSpan, codes += span) take_span(sums, x + i, inverse, codes, codes + part);
    if (i < in) {
        take_parts(sums, x + i, inverse, codes, codes + part);
        std::memset(codes + kBlock, 0, kBlock);  // the block of zeros behind an odd last one
        std::memset(codes + part + kBlock, 0, kBlock);
    }
    const float step = empty ? 0.0f : largest / kLargestCode;
    const RowFields fields{numbers ? step : std::nanf(""), -128 * high_sum(sums), -128 * low_sum(sums), 0};
    std::memcpy(to + layout.code_bytes() + sizeof(RowFields) * static_cast<size_t>(r), &fields, sizeof fields);
}

inline void quantise_row(const float* x, int in, int r, const RowLayout& layout, uint8_t* to) {
    I most = set1(0);
    for (int i = 0; i < in; i += 16) most = max(most, magnitude_bits(load(x + i)));
    quantise_row(x, in, r, layout, to, reduce_max(most));
}

// Whole sums over 256 * high + low as outputs.
FS_INLINE F settle(F weight_step, const RowFields& row, I high, I low) {
    const F dot = add(mul(set1(256.0f), to_float(high)), to_float(low));
    return mul(mul(weight_step, set1(row.step)), dot);
}

}  // namespace fs::FS_ISA
