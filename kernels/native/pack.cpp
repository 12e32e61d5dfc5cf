#include "weights.h"

#include <cmath>
#include <cstring>
#include <sys/mman.h>

namespace fs {
namespace {

constexpr size_t kHuge = size_t{2} << 20;
constexpr size_t kSlab = size_t{32} << 20;

float half_to_float(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
    const uint32_t rest = static_cast<uint32_t>(h & 0x7FFFu) << 13;
    uint32_t bits;
    if ((h & 0x7C00u) == 0x7C00u) {
        bits = sign | 0x7F800000u | rest;
    } else {
        float magnitude;
        std::memcpy(&magnitude, &rest, 4);
        magnitude *= 0x1p112f;
        std::memcpy(&bits, &magnitude, 4);
        bits |= sign;
    }
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

float bf16_to_float(uint16_t h) {
    const uint32_t bits = static_cast<uint32_t>(h) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

float minimum_at(const fs_weight& w, size_t i) {
    if (w.kind == FS_Q4) return half_to_float(static_cast<const uint16_t*>(w.minimum)[i]);
    return static_cast<const float*>(w.minimum)[i];
}

bool minimums_are_offsets(const fs_weight& w) {
    const float offset = w.kind == FS_Q4 ? -8.0f : -128.0f;
    const size_t n = static_cast<size_t>(w.out) * static_cast<size_t>(w.in / kBlock);
    for (size_t i = 0; i < n; ++i) {
        if (minimum_at(w, i) != offset * half_to_float(w.scale[i])) return false;
    }
    return true;
}

void pack_block(const fs_weight& w, Kind kind, int row, int block, uint8_t* record) {
    const int lane = row % kTile;
    const int half = block % 2;
    const size_t source = static_cast<size_t>(row) * static_cast<size_t>(w.in / kBlock) + static_cast<size_t>(block);
    const size_t row_bytes = code_bytes(kind) / kTile;
    const uint8_t* codes = static_cast<const uint8_t*>(w.codes) + source * row_bytes;
    uint8_t* target = record + static_cast<size_t>(half) * code_bytes(kind) + 4 * lane;
    for (size_t j = 0; j < row_bytes / 4; ++j) std::memcpy(target + 64 * j, codes + 4 * j, 4);
    uint8_t* scales = record + 2 * code_bytes(kind);
    std::memcpy(scales + 32 * half + 2 * lane, &w.scale[source], 2);
    uint8_t* minimums = scales + 64;
    if (kind == Kind::Q4Min) std::memcpy(minimums + 32 * half + 2 * lane, static_cast<const uint16_t*>(w.minimum) + source, 2);
    if (kind == Kind::Q8Min) std::memcpy(minimums + 64 * half + 4 * lane, static_cast<const float*>(w.minimum) + source, 4);
}

void pack_dense(const fs_weight& w, size_t size, Packed* out) {
    for (int row = 0; row < w.out; ++row) {
        uint8_t* target = out->data + static_cast<size_t>(row / kTile) * out->tile_bytes + static_cast<size_t>(row % kTile) * size;
        const uint8_t* source = static_cast<const uint8_t*>(w.codes) + static_cast<size_t>(row) * static_cast<size_t>(w.in) * size;
        for (int k = 0; k < w.in; ++k) std::memcpy(target + static_cast<size_t>(k) * kTile * size, source + static_cast<size_t>(k) * size, size);
    }
}

}  // namespace

Arena::~Arena() {
    for (const Slab& slab : slabs_) munmap(slab.mapped, slab.mapped_bytes);
}

uint8_t* Arena::take(size_t bytes) {
    bytes = (bytes + 63) & ~size_t{63};
    for (Slab& slab : slabs_) {
        if (slab.left >= bytes) {
            uint8_t* out = slab.next;
            slab.next += bytes;
            slab.left -= bytes;
            return out;
        }
    }
    const size_t want = bytes > kSlab ? (bytes + kHuge - 1) & ~(kHuge - 1) : kSlab;
    const size_t mapped_bytes = want + kHuge;
    void* mapped = mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return nullptr;
    auto* base = static_cast<uint8_t*>(mapped);
    auto* aligned = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(base) + kHuge - 1) & ~uintptr_t{kHuge - 1});
#ifdef MADV_HUGEPAGE
    madvise(aligned, want, MADV_HUGEPAGE);
#endif
    slabs_.push_back({base, mapped_bytes, aligned + bytes, want - bytes});
    return aligned;
}

bool pack(const fs_weight& w, Arena& arena, Packed* out) {
    if (w.out <= 0 || w.in <= 0) return false;
    out->out = w.out;
    out->in = w.in;
    out->tiles = (w.out + kTile - 1) / kTile;
    if (w.bias != nullptr) {
        out->bias.assign(static_cast<size_t>(out->tiles) * kTile, 0.0f);
        std::memcpy(out->bias.data(), w.bias, static_cast<size_t>(w.out) * sizeof(float));
    }
    if (w.kind == FS_Q4 || w.kind == FS_Q8) {
        const bool known = w.activation_bits == 8 || w.activation_bits == 16 || (w.activation_bits == 12 && w.kind == FS_Q4);
        if (w.in % kBlock != 0 || !known) return false;
        out->fine = w.activation_bits == 8 ? Fine::Bits8 : (w.activation_bits == 12 ? Fine::Bits12 : Fine::Bits16);
        const bool offset = minimums_are_offsets(w);
        if (w.kind == FS_Q4) out->kind = offset ? Kind::Q4Offset : Kind::Q4Min;
        if (w.kind == FS_Q8) out->kind = offset ? Kind::Q8Offset : Kind::Q8Min;
        const int blocks = w.in / kBlock;
        out->pairs = (blocks + 1) / 2;
        out->tile_bytes = static_cast<size_t>(out->pairs) * record_bytes(out->kind);
        out->data = arena.take(out->bytes());
        if (out->data == nullptr) return false;
        for (int row = 0; row < w.out; ++row) {
            uint8_t* tile = out->data + static_cast<size_t>(row / kTile) * out->tile_bytes;
            for (int b = 0; b < blocks; ++b) pack_block(w, out->kind, row, b, tile + static_cast<size_t>(b / 2) * record_bytes(out->kind));
        }
        return true;
    }
    const size_t size = w.kind == FS_F32 ? 4 : 2;
    out->kind = w.kind == FS_F32 ? Kind::F32 : (w.kind == FS_F16 ? Kind::F16 : Kind::BF16);
    out->tile_bytes = (static_cast<size_t>(w.in) * kTile * size + 63) & ~size_t{63};
    out->data = arena.take(out->bytes());
    if (out->data == nullptr) return false;
    pack_dense(w, size, out);
    return true;
}

void unpack_row(const Packed& w, int row, float* values) {
    const uint8_t* tile = w.tile(row / kTile);
    const int lane = row % kTile;
    if (!is_quantised(w.kind)) {
        for (int k = 0; k < w.in; ++k) {
            const size_t at = static_cast<size_t>(k) * kTile + static_cast<size_t>(lane);
            if (w.kind == Kind::F32) {
                std::memcpy(values + k, tile + 4 * at, 4);
            } else {
                uint16_t raw;
                std::memcpy(&raw, tile + 2 * at, 2);
                values[k] = w.kind == Kind::F16 ? half_to_float(raw) : bf16_to_float(raw);
            }
        }
        return;
    }
    const size_t bytes = code_bytes(w.kind);
    for (int b = 0; b < w.in / kBlock; ++b) {
        const uint8_t* record = tile + static_cast<size_t>(b / 2) * record_bytes(w.kind);
        const uint8_t* codes = record + static_cast<size_t>(b % 2) * bytes + 4 * lane;
        const uint8_t* scales = record + 2 * bytes;
        uint16_t raw;
        std::memcpy(&raw, scales + 32 * (b % 2) + 2 * lane, 2);
        const float scale = half_to_float(raw);
        float minimum = scale * (w.kind == Kind::Q4Offset ? -8.0f : -128.0f);
        if (w.kind == Kind::Q4Min) {
            std::memcpy(&raw, scales + 64 + 32 * (b % 2) + 2 * lane, 2);
            minimum = half_to_float(raw);
        }
        if (w.kind == Kind::Q8Min) std::memcpy(&minimum, scales + 64 + 64 * (b % 2) + 4 * lane, 4);
        float* target = values + b * kBlock;
        for (int k = 0; k < kBlock; ++k) {
            int code;
            if (bytes == 256) {
                const uint8_t both = codes[64 * ((k % 16) / 4) + k % 4];
                code = k < 16 ? both & 15 : both >> 4;
            } else {
                code = codes[64 * (k / 4) + k % 4];
            }
            target[k] = scale * static_cast<float>(code) + minimum;
        }
    }
}

}  // namespace fs
