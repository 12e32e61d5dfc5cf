// sample: one token of one row of logits by threshold selection, no sort of the vocabulary. The contract is in __init__.py beside
// this file. Weights are e = exp((logit - max) / temperature), so the best token has e = 1 and e's bits order like e.
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

// Tokens kept: weight above `weight`, or equal to it with an id up to `last`.
struct Cut {
    float weight = 0.0f;
    int32_t last = INT32_MAX;
    bool keeps(float e, int id) const { return e > weight || (e == weight && id <= last); }
};

struct SampleScratch {
    Buffer<float> e;
    std::vector<int32_t> some;
    std::vector<int32_t> count;
    std::vector<double> mass;
};

constexpr int kBins = 4096;  // by the upper 12 of the 31 bits below the sign
inline int bin_of(float e) {
    uint32_t bits;
    std::memcpy(&bits, &e, 4);
    return static_cast<int>(bits >> 19);
}

inline int argmax_row(const float* logits, int n, float* value) {
    F top = set1(-__builtin_inff());
    for (int i = 0; i < n; i += 16) top = max(select(first(n - i), load_part(logits + i, n - i), set1(-__builtin_inff())), top);
    *value = reduce_max(top);
    for (int i = 0; i < n; ++i) {
        if (logits[i] == *value) return i;
    }
    return 0;
}

// The id of the last token kept among those of weight `weight` when `keep` of them (lowest ids) stay.
inline int32_t tie_cut(const float* e, int n, float weight, int64_t keep) {
    for (int i = 0; i < n; ++i) {
        if (e[i] == weight && --keep == 0) return i;
    }
    return INT32_MAX;
}

// Tokens of bin `bin` that `cut` keeps, best first (ties: lower id first).
inline void list_bin(const Buffer<float>& e, int n, int bin, const Cut& cut, std::vector<int32_t>* out) {
    out->clear();
    for (int i = 0; i < n; ++i) {
        if (bin_of(e[static_cast<size_t>(i)]) == bin && cut.keeps(e[static_cast<size_t>(i)], i)) out->push_back(i);
    }
    std::sort(out->begin(), out->end(), [&](int32_t a, int32_t b) {
        const float x = e[static_cast<size_t>(a)], y = e[static_cast<size_t>(b)];
        return x > y || (x == y && a < b);
    });
}

inline void histogram(int n, const Cut& cut, SampleScratch& s) {
    s.count.assign(kBins, 0);
    s.mass.assign(kBins, 0.0);
    for (int i = 0; i < n; ++i) {
        const float e = s.e[static_cast<size_t>(i)];
        if (e <= 0.0f || !cut.keeps(e, i)) continue;
        const auto bin = static_cast<size_t>(bin_of(e));
        s.count[bin] += 1;
        s.mass[bin] += static_cast<double>(e);
    }
}

inline Cut cut_top_k(int n, int k, const Cut& before, SampleScratch& s) {
    histogram(n, before, s);
    int64_t above = 0;
    for (int bin = kBins - 1; bin >= 0; --bin) {
        const int64_t here = s.count[static_cast<size_t>(bin)];
        if (above + here >= k) {
            list_bin(s.e, n, bin, before, &s.some);
            const int32_t id = s.some[static_cast<size_t>(k - above - 1)];
            return {s.e[static_cast<size_t>(id)], id};
        }
        above += here;
    }
    return before;
}

inline Cut cut_top_p(int n, double p, const Cut& before, SampleScratch& s) {
    histogram(n, before, s);
    double total = 0.0;
    for (int bin = kBins - 1; bin >= 0; --bin) total += s.mass[static_cast<size_t>(bin)];
    const double wanted = p * total;
    double above = 0.0;
    for (int bin = kBins - 1; bin >= 0; --bin) {
        const double here = s.mass[static_cast<size_t>(bin)];
        if (here > 0.0 && above + here >= wanted) {
            list_bin(s.e, n, bin, before, &s.some);
            for (int32_t id : s.some) {
                above += static_cast<double>(s.e[static_cast<size_t>(id)]);
                if (above >= wanted) return {s.e[static_cast<size_t>(id)], id};
            }
            const int32_t id = s.some.back();  // rounding left the bin's own sum a hair short
            return {s.e[static_cast<size_t>(id)], id};
        }
        above += here;
    }
    return before;
}

// Weights and cut of one row; false when the row is an argmax (temperature 0, or nothing finite to choose from), whose token is *best.
inline bool process_row(const float* logits, int n, const SampleSettings& set, SampleScratch& s, Cut* cut, int* best) {
    float top;
    *best = argmax_row(logits, n, &top);
    if (!(set.temperature > 0.0f) || !std::isfinite(1.0f / set.temperature) || !std::isfinite(top)) return false;
    if (s.e.size() < static_cast<size_t>(n + 16)) s.e.resize(static_cast<size_t>(n + 16));
    const F m = set1(top), t = set1(set.temperature);
    for (int i = 0; i < n; i += 16) store(s.e.data() + i, exp_lanes(div(sub(load_part(logits + i, n - i), m), t)));
    *cut = Cut{};
    if (set.min_p > 0.0f) cut->weight = std::min(set.min_p, 1.0f);
    if (set.top_k > 0 && set.top_k < n) *cut = cut_top_k(n, set.top_k, *cut, s);
    if (set.top_p < 1.0f) *cut = cut_top_p(n, static_cast<double>(std::max(set.top_p, 0.0f)), *cut, s);
    return true;
}

constexpr int kSampleBlock = 1024;

inline double kept_mass(const SampleScratch& s, int begin, int end, const Cut& cut) {
    double sum = 0.0;
    for (int i = begin; i < end; ++i) {
        const float e = s.e[static_cast<size_t>(i)];
        if (cut.keeps(e, i)) sum += static_cast<double>(e);
    }
    return sum;
}

inline int sample_row(const float* logits, int n, const SampleSettings& set, double uniform, SampleScratch& s) {
    Cut cut;
    int best;
    if (!process_row(logits, n, set, s, &cut, &best)) return best;
    double total = 0.0;
    for (int i = 0; i < n; i += kSampleBlock) total += kept_mass(s, i, std::min(n, i + kSampleBlock), cut);
    const double wanted = uniform * total;
    double before = 0.0;
    int last = best;
    for (int i = 0; i < n; i += kSampleBlock) {
        const int end = std::min(n, i + kSampleBlock);
        const double here = kept_mass(s, i, end, cut);
        if (before + here <= wanted) {
            before += here;
            continue;
        }
        double sum = 0.0;
        for (int id = i; id < end; ++id) {
            const float e = s.e[static_cast<size_t>(id)];
            if (!(e > 0.0f) || !cut.keeps(e, id)) continue;
            sum += static_cast<double>(e);
            last = id;
            if (before + sum > wanted) return id;
        }
        return last;
    }
    for (int id = n - 1; id >= 0; --id) {  // uniform * total rounded up to total
        if (s.e[static_cast<size_t>(id)] > 0.0f && cut.keeps(s.e[static_cast<size_t>(id)], id)) return id;
    }
    return best;
}

inline void probabilities_row(const float* logits, int n, const SampleSettings& set, SampleScratch& s, float* out) {
    Cut cut;
    int best;
    if (!process_row(logits, n, set, s, &cut, &best)) {
        std::fill(out, out + n, 0.0f);
        out[best] = 1.0f;
        return;
    }
    double total = 0.0;
    for (int i = 0; i < n; i += kSampleBlock) total += kept_mass(s, i, std::min(n, i + kSampleBlock), cut);
    for (int i = 0; i < n; ++i) {
        const float e = s.e[static_cast<size_t>(i)];
        out[i] = cut.keeps(e, i) ? static_cast<float>(static_cast<double>(e) / total) : 0.0f;
    }
}

}  // namespace fs::FS_ISA
