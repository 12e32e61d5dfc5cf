// kv_slots: K and V rows into slots of the paged store, and moves between slots. The contract is in __init__.py beside this file.
#pragma once

#include <vector>

#include "api.h"
#include "kernels/kv_slots/whole.h"
#include "lanes.h"

namespace fs::FS_ISA {

// To nearest, ties to even; NaN stays NaN.
inline uint16_t to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
    return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

inline size_t page_elements(const fs_store& s) {
    return static_cast<size_t>(s.kv_heads) * static_cast<size_t>(s.head_dim) * static_cast<size_t>(s.page_size);
}

// One head of one node: k[0..d) and v[0..d) of layer `layer` into slot `slot`.
template <class T>
inline void write_head_as(const fs_store& s, int layer, int slot, int head, const float* k, const float* v) {
    const size_t page = static_cast<size_t>(slot / s.page_size), offset = static_cast<size_t>(slot % s.page_size);
    const size_t d = static_cast<size_t>(s.head_dim), ps = static_cast<size_t>(s.page_size);
    const size_t base = (static_cast<size_t>(layer) * static_cast<size_t>(s.pages) + page) * page_elements(s) + static_cast<size_t>(head) * d * ps;
    T* keys = static_cast<T*>(s.k) + base + offset;
    T* values = static_cast<T*>(s.v) + base + offset * d;
    for (size_t i = 0; i < d; ++i) {
        if constexpr (sizeof(T) == 4) {
            keys[i * ps] = k[i];
            values[i] = v[i];
        } else {
            keys[i * ps] = to_bf16(k[i]);
            values[i] = to_bf16(v[i]);
        }
    }
}

inline void write_head(const fs_store& s, int layer, int slot, int head, const float* k, const float* v) {
    switch (s.kind) {
        case FS_STORE_BYTES: write_head_whole(s, layer, slot, head, k, v); break;
        case FS_STORE_BF16: write_head_as<uint16_t>(s, layer, slot, head, k, v); break;
        default: write_head_as<float>(s, layer, slot, head, k, v);
    }
}

// Moves of one layer: every source is read before any target is written.
template <class T>
inline void move_layer_as(const fs_store& s, int layer, const int32_t* src, const int32_t* dst, int n) {
    const size_t d = static_cast<size_t>(s.head_dim), ps = static_cast<size_t>(s.page_size), heads = static_cast<size_t>(s.kv_heads);
    const size_t base = static_cast<size_t>(layer) * static_cast<size_t>(s.pages) * page_elements(s);
    T* keys = static_cast<T*>(s.k) + base;
    T* values = static_cast<T*>(s.v) + base;
    std::vector<T> held(2 * static_cast<size_t>(n) * heads * d);
    for (int pass = 0; pass < 2; ++pass) {
        T* h = held.data();
        for (int i = 0; i < n; ++i) {
            const size_t slot = static_cast<size_t>(pass == 0 ? src[i] : dst[i]);
            const size_t page = slot / ps * page_elements(s), offset = slot % ps;
            for (size_t head = 0; head < heads; ++head, h += 2 * d) {
                T* k = keys + page + head * d * ps + offset;
                T* v = values + page + head * d * ps + offset * d;
                for (size_t c = 0; c < d; ++c) {
                    if (pass == 0) {
                        h[c] = k[c * ps];
                        h[d + c] = v[c];
                    } else {
                        k[c * ps] = h[c];
                        v[c] = h[d + c];
                    }
                }
            }
        }
    }
}

inline void move_layer(const fs_store& s, int layer, const int32_t* src, const int32_t* dst, int n) {
    switch (s.kind) {
        case FS_STORE_BYTES: move_layer_whole(s, layer, src, dst, n); break;
        case FS_STORE_BF16: move_layer_as<uint16_t>(s, layer, src, dst, n); break;
        default: move_layer_as<float>(s, layer, src, dst, n);
    }
}

}  // namespace fs::FS_ISA
