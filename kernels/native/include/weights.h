// Weight matrices in the order the kernels read them. Knows layouts; refuses to know instruction sets.
//
// Outputs are cut into tiles of 16 (the last one padded with zeros), inputs into spans of 64, two blocks of 32 (an odd last block is
// followed by a block of zeros). A quantised matrix is whole numbers of one byte times one step per output; bytes are numbers + 128.
// A tile is a run of records, one per span:
//
//   8 bits   16 lines of 4 inputs by 16 outputs: byte 64 * line + 4 * output + t is input 4 * line + t
//   4 bits   codes of block 0 | codes of block 1 | factors of block 0 | factors of block 1
//
// Codes of 4 bits are looked up in a table per block and output: number + 128 = (code * factor + offset) >> 8, modulo
// 2^16. Outputs stand in four groups, lane l of group g being output 4 l + g: per block and group one line of codes (per lane 16 bytes, byte i with input i in
// its low and i + 16 in its high nibble) and 16 bytes of factors (per lane uint16 factor, uint16 offset). Tables made so are 128 bits each,
// which byte shuffles look up, and the groups' lanes transpose into lines of four inputs by sixteen outputs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "api.h"

namespace fs {

enum class Kind : int32_t { Q4, Q8, F32, F16, BF16 };

constexpr int kTile = 16;
constexpr int kBlock = 32;
constexpr int kSpan = 64;
constexpr size_t kLineBytes = 64;
constexpr size_t kSpanBytes = 16 * kLineBytes;  // a span of a tile as bytes
constexpr size_t kCodeBytes = 256, kFactorBytes = 64;  // of a block with 4 bits
constexpr size_t kFactors = 2 * kCodeBytes;  // where they begin in a record
constexpr int kTableShift = 8;
constexpr int kMostInputs = 1 << 16;  // of a quantised matrix: sums of 255 * 127 an input stay whole numbers of 32 bits

inline bool is_quantised(Kind kind) { return kind <= Kind::Q8; }
constexpr size_t record_bytes(Kind kind) { return kind == Kind::Q4 ? 2 * (kCodeBytes + kFactorBytes) : kSpanBytes; }

struct Packed {
    Kind kind = Kind::F32;
    int out = 0;
    int in = 0;
    int tiles = 0;
    int spans = 0;         // records of a quantised tile
    size_t tile_bytes = 0;
    uint8_t* data = nullptr;  // [tiles][tile_bytes], owned by an Arena
    std::vector<float> step;  // [tiles * 16], of quantised matrices
    std::vector<float> bias;  // [tiles * 16] or empty

    const uint8_t* tile(int t) const { return data + static_cast<size_t>(t) * tile_bytes; }
    size_t bytes() const { return static_cast<size_t>(tiles) * tile_bytes; }
};

// Memory for packed weights: large slabs, aligned for and advised to huge pages, so that a pass over the weights does not
// spend its time on address translation.
class Arena {
  public:
    Arena() = default;
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;
    uint8_t* take(size_t bytes);  // 64-byte aligned, zero-filled; null when memory is short

  private:
    struct Slab {
        uint8_t* mapped;
        size_t mapped_bytes;
        uint8_t* next;
        size_t left;
    };
    std::vector<Slab> slabs_;
};

// Packs `w`; false when memory is short or the sizes are impossible.
bool pack(const fs_weight& w, Arena& arena, Packed* out);

// One row of the matrix as float32: values[0..in).
void unpack_row(const Packed& w, int row, float* values);

}  // namespace fs
