// The arithmetic of amx.h on the vector unit, for so few queries that packing keys and values for the matrix unit would cost more
// than it saves. Bit for bit the same: the matrix unit sums the even and the odd elements of a product's 32 in two chains of
// fused multiply-adds, adds the two, and adds that to the sum; subnormal numbers count as zeros in and out.
#pragma once

#if defined(FS_AMX)

namespace fs::FS_ISA {

constexpr int kFewQueries = 6;

// While it lives, this thread's vector arithmetic treats subnormal numbers as the matrix unit does.
class FlushSubnormals {
  public:
    FlushSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040u); }
    ~FlushSubnormals() { _mm_setcsr(saved_); }
    FlushSubnormals(const FlushSubnormals&) = delete;
    FlushSubnormals& operator=(const FlushSubnormals&) = delete;

  private:
    unsigned saved_;
};

// x as two bfloat16 numbers, in float32.
inline void split_wide(const float* x, int n, float* high, float* low) {
    for (int i = 0; i < n; i += 16) {
        const F v = load(x + i);
        const F h = {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half_of(_mm512_cvtneps_pbh(v.v))), 16))};
        const F l = {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half_of(_mm512_cvtneps_pbh(_mm512_sub_ps(v.v, h.v)))), 16))};
        store(high + i, h);
        store(low + i, l);
    }
}

// out[t][0..16) = scores of 16 keys; high, low: [Q][d]. `ahead`: memory to ask for, one line per pair of channels.
template <int Q>
inline void score_parts(const float* high, const float* low, const uint16_t* keys, size_t step, int d, const uint16_t* next_keys,
                        const uint16_t* values, float* out, int out_stride) {
    F sum[Q];
    for (int t = 0; t < Q; ++t) sum[t] = zero();
    for (int block = 0; block < d; block += kPairBlock) {
        F eh[Q], oh[Q], el[Q], ol[Q];
        for (int t = 0; t < Q; ++t) eh[t] = oh[t] = el[t] = ol[t] = zero();
        for (int c = block; c < block + kPairBlock; c += 2) {
            const size_t at = static_cast<size_t>(c) * step;
            prefetch(next_keys + at);
            prefetch(values + 16 * c);
            const F even = load_bf16(keys + at), odd = load_bf16(keys + at + step);
#pragma GCC unroll 8
            for (int t = 0; t < Q; ++t) {
                eh[t] = fma(set1(high[t * d + c]), even, eh[t]);
                oh[t] = fma(set1(high[t * d + c + 1]), odd, oh[t]);
                el[t] = fma(set1(low[t * d + c]), even, el[t]);
                ol[t] = fma(set1(low[t * d + c + 1]), odd, ol[t]);
            }
        }
        for (int t = 0; t < Q; ++t) sum[t] = add(add(sum[t], add(eh[t], oh[t])), add(el[t], ol[t]));
    }
    for (int t = 0; t < Q; ++t) store(out + t * out_stride, sum[t]);
}

// sums[t][0..32) += weights of 32 positions * their values from channel c on; high, low: [Q][kChunk].
template <int Q>
inline void value_parts(const float* high, const float* low, const uint16_t* const* rows, int c, float* sums, int stride) {
    F eh[Q][2], oh[Q][2], el[Q][2], ol[Q][2];
    for (int t = 0; t < Q; ++t) {
        for (int v = 0; v < 2; ++v) eh[t][v] = oh[t][v] = el[t][v] = ol[t][v] = zero();
    }
    for (int p = 0; p < kPairBlock; p += 2) {
        for (int v = 0; v < 2; ++v) {
            const F even = rows[p] != nullptr ? load_bf16(rows[p] + c + 16 * v) : zero();
            const F odd = rows[p + 1] != nullptr ? load_bf16(rows[p + 1] + c + 16 * v) : zero();
#pragma GCC unroll 8
            for (int t = 0; t < Q; ++t) {
                eh[t][v] = fma(set1(high[t * kChunk + p]), even, eh[t][v]);
                oh[t][v] = fma(set1(high[t * kChunk + p + 1]), odd, oh[t][v]);
                el[t][v] = fma(set1(low[t * kChunk + p]), even, el[t][v]);
                ol[t][v] = fma(set1(low[t * kChunk + p + 1]), odd, ol[t][v]);
            }
        }
    }
    for (int t = 0; t < Q; ++t) {
        for (int v = 0; v < 2; ++v) {
            float* target = sums + t * stride + 16 * v;
            store(target, add(add(load(target), add(eh[t][v], oh[t][v])), add(el[t][v], ol[t][v])));
        }
    }
}

struct PartsScratch {
    Buffer<float> query_high, query_low;    // [kFewQueries][D]
    Buffer<float> weight_high, weight_low;  // [kFewQueries][kChunk]

    void reserve(int d) {
        for (Buffer<float>* buffer : {&query_high, &query_low}) grow(*buffer, static_cast<size_t>(kFewQueries * d));
        for (Buffer<float>* buffer : {&weight_high, &weight_low}) grow(*buffer, static_cast<size_t>(kFewQueries * kChunk));
    }
};

// Scores of logical keys [begin, end), begin a multiple of 16, of a store whose pages hold multiples of 16 keys.
inline void score_range_parts(const HeadView<uint16_t>& head, int queries, int begin, int end, float* out, int out_stride, PartsScratch& s) {
    const int d = head.d;
    for (int index = begin; index < end; index += 16) {
        const uint16_t* keys = head.key(index);
        const uint16_t* next = head.key(std::min(index + 32, end - 1) / 16 * 16);
        for (int t = 0; t < queries; t += 3) {
            const float* high = s.query_high.data() + t * d;
            const float* low = s.query_low.data() + t * d;
            float* target = out + t * out_stride + (index - begin);
            const auto step = static_cast<size_t>(head.page_size);
            switch (std::min(3, queries - t)) {
                case 1: score_parts<1>(high, low, keys, step, d, next, head.value(index), target, out_stride); break;
                case 2: score_parts<2>(high, low, keys, step, d, next, head.value(index), target, out_stride); break;
                default: score_parts<3>(high, low, keys, step, d, next, head.value(index), target, out_stride); break;
            }
        }
    }
}

// sums[query][0..d) += 32 positions; weights relative to the chunk start at `at`.
inline void value_block_parts(int first_query, int queries, int at, const uint16_t* const* rows, int d, float* sums, int stride, PartsScratch& s) {
    for (int t = first_query; t < first_query + queries; t += 3) {
        const float* high = s.weight_high.data() + t * kChunk + at;
        const float* low = s.weight_low.data() + t * kChunk + at;
        for (int c = 0; c < d; c += 32) {
            float* target = sums + t * stride + c;
            switch (std::min(3, first_query + queries - t)) {
                case 1: value_parts<1>(high, low, rows, c, target, stride); break;
                case 2: value_parts<2>(high, low, rows, c, target, stride); break;
                default: value_parts<3>(high, low, rows, c, target, stride); break;
            }
        }
    }
}

}  // namespace fs::FS_ISA
#endif
