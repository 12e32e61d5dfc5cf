// K and V of one token and head as bytes with a step, and moves of them. The form is in kernels/whole_store.
#pragma once

#include <cmath>
#include <vector>

#include "api.h"
#include "kernels/linear/activations.h"

namespace fs::FS_ISA {

// Where one token of one head lies.
struct WholePlace {
    static constexpr size_t kTokens = 16;
    size_t block;  // byte of its block, in the keys as in the values
    size_t at;     // token within it
    size_t d;

    WholePlace(const fs_store& s, int layer, int slot, int head) : at(static_cast<size_t>(slot) % kTokens), d(static_cast<size_t>(s.head_dim)) {
        const auto tokens = static_cast<size_t>(s.page_size), heads = static_cast<size_t>(s.kv_heads);
        const size_t page = static_cast<size_t>(layer) * static_cast<size_t>(s.pages) + static_cast<size_t>(slot) / tokens;
        block = ((page * heads + static_cast<size_t>(head)) * tokens + static_cast<size_t>(slot) % tokens / kTokens * kTokens) * (d + 4);
    }
    size_t key(size_t c) const { return block + c / 4 * (4 * kTokens) + 4 * at + c % 4; }
    size_t value(size_t c) const { return block + at / 4 * (4 * d) + 4 * c + at % 4; }
    size_t step() const { return block + d * kTokens + 4 * at; }
};

// x[0..d) as bytes; returns the step.
inline float whole_vector(const float* x, int d, uint8_t* bytes) {
    I most = set1(0);
    for (int i = 0; i < d; i += 16) most = max(most, magnitude_bits(load_part(x + i, d - i)));
    const int32_t bits = reduce_max(most);
    float largest;
    std::memcpy(&largest, &bits, 4);
    const bool numbers = bits < kInfinityBits, empty = largest < kLeastRow;
    const F by = set1(empty || !numbers ? 0.0f : 127.0f / largest);
    alignas(64) int32_t codes[16];
    for (int i = 0; i < d; i += 16) {
        // What is not finite has no number: not even 0 times it is one.
        store(codes, numbers ? round_int(mul(load_part(x + i, d - i), by)) : set1(0));
        for (int j = 0; j < std::min(16, d - i); ++j) bytes[i + j] = static_cast<uint8_t>(codes[j] + 128);
    }
    return !numbers ? std::nanf("") : (empty ? 0.0f : largest / 127.0f);
}

inline void write_head_whole(const fs_store& s, int layer, int slot, int head, const float* k, const float* v) {
    const WholePlace place(s, layer, slot, head);
    auto* keys = static_cast<uint8_t*>(s.k);
    auto* values = static_cast<uint8_t*>(s.v);
    uint8_t bytes[512];
    float step = whole_vector(k, s.head_dim, bytes);
    for (size_t c = 0; c < place.d; c += 4) std::memcpy(keys + place.key(c), bytes + c, 4);
    std::memcpy(keys + place.step(), &step, 4);
    step = whole_vector(v, s.head_dim, bytes);
    for (size_t c = 0; c < place.d; ++c) values[place.value(c)] = bytes[c];
    std::memcpy(values + place.step(), &step, 4);
}

// Moves of one layer: every source is read before any target is written.
inline void move_layer_whole(const fs_store& s, int layer, const int32_t* src, const int32_t* dst, int n) {
    auto* keys = static_cast<uint8_t*>(s.k);
    auto* values = static_cast<uint8_t*>(s.v);
    const auto d = static_cast<size_t>(s.head_dim);
    std::vector<uint8_t> held(2 * (d + 4) * static_cast<size_t>(n * s.kv_heads));
    uint8_t* h = held.data();
    for (int i = 0; i < n; ++i) {
        for (int head = 0; head < s.kv_heads; ++head, h += 2 * (d + 4)) {
            const WholePlace from(s, layer, src[i], head);
            for (size_t c = 0; c < d; ++c) h[c] = keys[from.key(c)];
            for (size_t c = 0; c < d; ++c) h[d + 4 + c] = values[from.value(c)];
            std::memcpy(h + d, keys + from.step(), 4);
            std::memcpy(h + 2 * d + 4, values + from.step(), 4);
        }
    }
    h = held.data();
    for (int i = 0; i < n; ++i) {
        for (int head = 0; head < s.kv_heads; ++head, h += 2 * (d + 4)) {
            const WholePlace to(s, layer, dst[i], head);
            for (size_t c = 0; c < d; ++c) keys[to.key(c)] = h[c];
            for (size_t c = 0; c < d; ++c) values[to.value(c)] = h[d + 4 + c];
            std::memcpy(keys + to.step(), h + d, 4);
            std::memcpy(values + to.step(), h + 2 * d + 4, 4);
        }
    }
}

}  // namespace fs::FS_ISA
