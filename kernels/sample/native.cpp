// sample: one token of one row of logits by threshold selection, no sort of the vocabulary. The contract is in __init__.py beside
// this file. Weights are e = exp((logit - max) / temperature), so the best token has e = 1.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "buffer.h"
#include "lanes.h"

namespace fs::FS_ISA {

struct SampleSettings {
    float temperature;
    int32_t top_k;
    float top_p;
    float min_p;
};

struct SampleScratch {
    Buffer<float> e;            // [vocabulary], a multiple of 16, zeros behind the last token
    std::vector<int32_t> list;  // tokens picked so far, see Processed
    Buffer<double> mass;        // per block of kSampleBlock tokens
};

// What the filters left: the tokens of scratch.list when `listed`, otherwise all tokens that reach `least`.
struct Processed {
    bool greedy = false;
    int best = 0;
    bool listed = false;
    float least = 0.0f;  // min_p
};

constexpr int kSampleBlock = 1024;

// Tokens with any weight that reach min_p.
inline M kept(F e, float least) { return both(not_(less(e, set1(least))), less(zero(), e)); }

inline int argmax_row(const float* logits, int n, float* value) {
    F top = set1(-__builtin_inff());
    for (int i = 0; i < n; i += 16) top = max(select(first(n - i), load_part(logits + i, n - i), set1(-__builtin_inff())), top);
    *value = reduce_max(top);
    const F wanted = set1(*value);
    for (int i = 0; i < n; i += 16) {
        const F x = load_part(logits + i, n - i);
        const uint32_t equal = bits_of(both(first(n - i), both(not_(less(x, wanted)), not_(less(wanted, x)))));
        for (uint32_t rest = equal; rest != 0; rest &= rest - 1) {  // a NaN compares like an equal, so look again
            const int id = i + __builtin_ctz(rest);
            if (logits[id] == *value) return id;
        }
    }
    return 0;
}

// Weights of the whole row; zeros behind its end.
inline void exponentials(const float* logits, int n, float top, float temperature, SampleScratch& s) {
    const int padded = (n + 15) / 16 * 16;
    grow(s.e, static_cast<size_t>(padded));
    const F m = set1(top), t = set1(temperature);
    for (int i = 0; i < n; i += 16) {
        const F e = exp_lanes(div(sub(load_part(logits + i, n - i), m), t));
        store(s.e.data() + i, select(first(n - i), e, zero()));
    }
}

// Better first: larger weight, then lower id.
struct Better {
    const float* e;
    bool operator()(int32_t a, int32_t b) const { return e[a] > e[b] || (e[a] == e[b] && a < b); }
};

constexpr int kSteps = 8;
constexpr float kThresholds[kSteps] = {0.25f, 0x1p-4f, 0x1p-6f, 0x1p-9f, 0x1p-12f, 0x1p-16f, 0x1p-22f, 0.0f};

// How many kept tokens reach each threshold, and their mass.
inline void survey(int n, float least, const SampleScratch& s, int64_t (&count)[kSteps], double (&mass)[kSteps]) {
    D sums[kSteps];
    for (int t = 0; t < kSteps; ++t) {
        sums[t] = zero_wide();
        count[t] = 0;
    }
    for (int i = 0; i < n; i += 16) {
        const F e = load(s.e.data() + i);
        const M keep = kept(e, least);
        // From the lowest threshold up: most groups of 16 reach none of the higher ones.
        for (int t = kSteps - 1; t >= 0; --t) {
            const M reach = both(keep, not_(less(e, set1(kThresholds[t]))));
            const uint32_t bits = bits_of(reach);
            if (bits == 0) break;
            count[t] += __builtin_popcount(bits);
            sums[t] = add_wide(sums[t], select(reach, e, zero()));
        }
    }
    for (int t = 0; t < kSteps; ++t) mass[t] = reduce_add(sums[t]);
}

// scratch.list = ids of the kept tokens of weight `threshold` or more, ascending.
inline void list_kept(int n, float least, float threshold, SampleScratch& s) {
    s.list.clear();
    for (int i = 0; i < n; i += 16) {
        const F e = load(s.e.data() + i);
        uint32_t bits = bits_of(both(kept(e, least), not_(less(e, set1(threshold)))));
        for (; bits != 0; bits &= bits - 1) s.list.push_back(i + __builtin_ctz(bits));
    }
}

// Leaves the k best in scratch.list, in no particular order.
inline void take_top_k(int n, int k, Processed* out, SampleScratch& s) {
    int64_t count[kSteps];
    double mass[kSteps];
    survey(n, out->least, s, count, mass);
    int t = 0;
    while (t < kSteps - 1 && count[t] < k) ++t;
    list_kept(n, out->least, kThresholds[t], s);
    out->listed = true;
    if (static_cast<int64_t>(s.list.size()) <= k) return;
    std::nth_element(s.list.begin(), s.list.begin() + (k - 1), s.list.end(), Better{s.e.data()});
    s.list.resize(static_cast<size_t>(k));
}

// Leaves the shortest run of the best whose mass reaches p of what was kept so far. The best are sorted a few at a time.
inline void take_top_p(int n, double p, Processed* out, SampleScratch& s) {
    double total = 0.0;
    if (out->listed) {
        std::sort(s.list.begin(), s.list.end());
        for (int32_t id : s.list) total += static_cast<double>(s.e[static_cast<size_t>(id)]);
    } else {
        int64_t count[kSteps];
        double mass[kSteps];
        survey(n, out->least, s, count, mass);
        total = mass[kSteps - 1];
        int t = 0;
        while (t < kSteps - 1 && mass[t] < p * total) ++t;
        list_kept(n, out->least, kThresholds[t], s);
        out->listed = true;
    }
    const Better better{s.e.data()};
    const double wanted = p * total;
    double sum = 0.0;
    size_t done = 0;
    for (size_t step = 64; done < s.list.size(); step *= 2) {
        const size_t end = std::min(done + step, s.list.size());
        const auto from = s.list.begin() + static_cast<std::ptrdiff_t>(done), to = s.list.begin() + static_cast<std::ptrdiff_t>(end);
        if (to != s.list.end()) std::nth_element(from, to, s.list.end(), better);
        std::sort(from, to, better);
        for (; done < end; ++done) {
            sum += static_cast<double>(s.e[static_cast<size_t>(s.list[done])]);
            if (sum >= wanted) {
                s.list.resize(done + 1);
                return;
            }
        }
    }
}

// A row is greedy when its temperature is 0, or when there is nothing finite to choose from.
inline Processed process_row(const float* logits, int n, const SampleSettings& set, SampleScratch& s) {
    Processed out;
    float top;
    out.best = argmax_row(logits, n, &top);
    out.greedy = !(set.temperature > 0.0f) || !std::isfinite(1.0f / set.temperature) || !std::isfinite(top);
    if (out.greedy) return out;
    exponentials(logits, n, top, set.temperature, s);
    if (set.min_p > 0.0f) out.least = std::min(set.min_p, 1.0f);
    if (set.top_k > 0 && set.top_k < n) take_top_k(n, set.top_k, &out, s);
    if (set.top_p < 1.0f) take_top_p(n, static_cast<double>(std::max(set.top_p, 0.0f)), &out, s);
    if (out.listed) std::sort(s.list.begin(), s.list.end());
    return out;
}

// Mass of what was kept, in float64; per block as well when all tokens are candidates.
inline double total_mass(const Processed& row, int n, SampleScratch& s) {
    double total = 0.0;
    if (row.listed) {
        for (int32_t id : s.list) total += static_cast<double>(s.e[static_cast<size_t>(id)]);
        return total;
    }
    s.mass.resize(static_cast<size_t>((n + kSampleBlock - 1) / kSampleBlock));
    for (size_t block = 0; block < s.mass.size(); ++block) {
        const int begin = static_cast<int>(block) * kSampleBlock, end = std::min(n, begin + kSampleBlock);
        D sum = zero_wide();
        for (int i = begin; i < end; i += 16) {
            const F e = load(s.e.data() + i);
            sum = add_wide(sum, select(kept(e, row.least), e, zero()));
        }
        s.mass[block] = reduce_add(sum);
        total += s.mass[block];
    }
    return total;
}

inline int sample_row(const float* logits, int n, const SampleSettings& set, double uniform, SampleScratch& s) {
    const Processed row = process_row(logits, n, set, s);
    if (row.greedy) return row.best;
    const double wanted = uniform * total_mass(row, n, s);
    double sum = 0.0;
    if (!row.listed) {  // go to the block that holds the token, then list that block
        size_t block = 0;
        while (block + 1 < s.mass.size() && sum + s.mass[block] <= wanted) sum += s.mass[block++];
        while (block > 0 && s.mass[block] == 0.0) sum -= s.mass[--block];  // rounding went past the last token with any mass
        const int begin = static_cast<int>(block) * kSampleBlock, end = std::min(n, begin + kSampleBlock);
        s.list.clear();
        for (int i = begin; i < end; i += 16) {
            uint32_t bits = bits_of(kept(load(s.e.data() + i), row.least));
            for (; bits != 0; bits &= bits - 1) s.list.push_back(i + __builtin_ctz(bits));
        }
    }
    for (int32_t id : s.list) {
        sum += static_cast<double>(s.e[static_cast<size_t>(id)]);
        if (sum > wanted) return id;
    }
    return s.list.empty() ? row.best : s.list.back();  // uniform * total rounded up to total
}

inline void probabilities_row(const float* logits, int n, const SampleSettings& set, SampleScratch& s, float* out) {
    const Processed row = process_row(logits, n, set, s);
    if (row.greedy || row.listed) std::fill(out, out + n, 0.0f);
    if (row.greedy) {
        out[row.best] = 1.0f;
        return;
    }
    const double total = total_mass(row, n, s);
    const auto share = [&](float e) { return static_cast<float>(static_cast<double>(e) / total); };
    if (row.listed) {
        for (int32_t id : s.list) out[id] = share(s.e[static_cast<size_t>(id)]);
        return;
    }
    for (int i = 0; i < n; i += 16) {
        const uint32_t bits = bits_of(kept(load(s.e.data() + i), row.least));
        for (int k = 0; k < 16 && i + k < n; ++k) out[i + k] = (bits >> k & 1u) != 0 ? share(s.e[static_cast<size_t>(i + k)]) : 0.0f;
    }
}

}  // namespace fs::FS_ISA
