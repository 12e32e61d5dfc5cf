#include "weights.h"

#include <algorithm>
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

float value_at(const fs_weight& w, size_t block, int code) { return half_to_float(w.scale[block]) * static_cast<float>(code) + minimum_at(w, block); }

// The largest number that a row can hold, over 127: of 4 bits from the ends of its blocks' tables, of 8 from the codes themselves.
float step_of_row(const fs_weight& w, size_t first_block, int blocks) {
    float largest = 0.0f;
    for (int b = 0; b < blocks; ++b) {
        const size_t block = first_block + static_cast<size_t>(b);
        int low = 0, high = 15;
        if (w.kind == FS_Q8) {
            const uint8_t* codes = static_cast<const uint8_t*>(w.codes) + block * kBlock;
            uint8_t least = 255, most = 0;
            for (int k = 0; k < kBlock; ++k) {  // plain loops, which compilers vectorise
                least = std::min(least, codes[k]);
                most = std::max(most, codes[k]);
            }
            low = least;
            high = most;
        }
        largest = std::max({largest, std::fabs(value_at(w, block, low)), std::fabs(value_at(w, block, high))});
    }
    return largest / 127.0f;
}

// To the nearest whole number, ties to even, below 2^22: adding 1.5 * 2^23 leaves no room for a fraction.
int rounded(float x) { return static_cast<int>((x + 12582912.0f) - 12582912.0f); }

void pack_block(const fs_weight& w, float step, int row, int block, uint8_t* record) {
    const int lane = row % kTile, half = block % 2;
    const size_t source = static_cast<size_t>(row) * static_cast<size_t>(w.in / kBlock) + static_cast<size_t>(block);
    if (w.kind == FS_Q8) {
        const uint8_t* codes = static_cast<const uint8_t*>(w.codes) + source * kBlock;
        const float scale = half_to_float(w.scale[source]), minimum = minimum_at(w, source), by = step > 0.0f ? step : 1.0f;
        uint8_t bytes[kBlock];
        for (int k = 0; k < kBlock; ++k) bytes[k] = static_cast<uint8_t>(rounded((scale * static_cast<float>(codes[k]) + minimum) / by) + 128);
        for (int k = 0; k < kBlock; k += 4) std::memcpy(record + kLineBytes * static_cast<size_t>((half * kBlock + k) / 4) + 4 * lane, bytes + k, 4);
        return;
    }
    const auto group = static_cast<size_t>(lane % 4), in_group = static_cast<size_t>(lane / 4);
    uint8_t* codes = record + static_cast<size_t>(half) * kCodeBytes + group * kLineBytes + in_group * 16;
    std::memcpy(codes, static_cast<const uint8_t*>(w.codes) + source * 16, 16);
    const float unit = 1 << kTableShift;
    const int factor = step > 0.0f ? rounded(half_to_float(w.scale[source]) / step * unit) : 0;
    const int offset = (step > 0.0f ? rounded(minimum_at(w, source) / step * unit) : 0) + (128 << kTableShift) + (1 << (kTableShift - 1));
    const uint16_t both[2] = {static_cast<uint16_t>(factor), static_cast<uint16_t>(offset)};
    std::memcpy(record + kFactors + static_cast<size_t>(half) * kFactorBytes + group * 16 + in_group * 4, both, 4);
}

// Input k (0..63) of an output in a record of 4 bits.
int table_byte(const uint8_t* record, int lane, int k) {
    const auto group = static_cast<size_t>(lane % 4), in_group = static_cast<size_t>(lane / 4), half = static_cast<size_t>(k / kBlock);
    const int in_block = k % kBlock;
    const uint8_t both = record[half * kCodeBytes + group * kLineBytes + in_group * 16 + static_cast<size_t>(in_block % 16)];
    uint16_t factor[2];
    std::memcpy(factor, record + kFactors + half * kFactorBytes + group * 16 + in_group * 4, 4);
    return static_cast<uint16_t>((in_block < 16 ? both & 15 : both >> 4) * factor[0] + factor[1]) >> kTableShift;
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
        if (w.in % kBlock != 0 || w.in > kMostInputs) return false;
        out->kind = w.kind == FS_Q4 ? Kind::Q4 : Kind::Q8;
        const int blocks = w.in / kBlock;
        out->spans = (blocks + 1) / 2;
        out->tile_bytes = static_cast<size_t>(out->spans) * record_bytes(out->kind);
        out->step.assign(static_cast<size_t>(out->tiles) * kTile, 0.0f);
        out->data = arena.take(out->bytes());
        if (out->data == nullptr) return false;
        for (int row = 0; row < w.out; ++row) {
            const float step = step_of_row(w, static_cast<size_t>(row) * static_cast<size_t>(blocks), blocks);
            out->step[static_cast<size_t>(row)] = step;
            uint8_t* tile = out->data + static_cast<size_t>(row / kTile) * out->tile_bytes;
            for (int b = 0; b < blocks; ++b) pack_block(w, step, row, b, tile + static_cast<size_t>(b / 2) * record_bytes(out->kind));
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
    const float step = w.step[static_cast<size_t>(row)];
    for (int k = 0; k < w.in; ++k) {
        const uint8_t* record = tile + static_cast<size_t>(k / kSpan) * record_bytes(w.kind);
        const int in_chunk = k % kSpan;
        int byte = record[kLineBytes * static_cast<size_t>(in_chunk / 4) + static_cast<size_t>(4 * lane + in_chunk % 4)];
        if (w.kind == Kind::Q4) byte = table_byte(record, lane, in_chunk);
        values[k] = step * static_cast<float>(byte - 128);
    }
}

}  // namespace fs
