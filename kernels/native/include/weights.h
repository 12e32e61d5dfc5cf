// Weight matrices in the order the kernels read them. Knows layouts; refuses to know instruction sets.
//
// Outputs are cut into tiles of 16 (one per lane; the last tile is padded with zeros). A quantised tile is a run of
// records, one per two blocks of 32 inputs (an odd last block is padded with a zero block):
//
//   codes of block 0 | codes of block 1 | 2 x 16 scales (float16) | 2 x 16 minimums, where the kind has them
//
// The codes of a block are 64-byte lines holding 4 inputs of 16 outputs: byte 4 * lane + t. With 4 bits, line j (0..3)
// has inputs 4j + t in the low and 16 + 4j + t in the high nibbles; with 8 bits, line j (0..7) has inputs 4j + t.
// Matrices with minimum = -8 * scale (4 bits) or -128 * scale (8 bits) everywhere drop their minimums: the offset is
// subtracted from the codes inside the exact integer dot product.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "api.h"

namespace fs {

enum class Kind : int32_t { Q4Min, Q4Offset, Q8Min, Q8Offset, F32, F16, BF16 };

// How finely rows are quantised: one byte an input, or two parts of a byte each.
enum class Fine : int32_t { Bits8, Bits12, Bits16 };
constexpr bool in_parts(Fine fine) { return fine != Fine::Bits8; }

constexpr int kTile = 16;
constexpr int kBlock = 32;

inline bool is_quantised(Kind kind) { return kind <= Kind::Q8Offset; }
template <Kind K>
constexpr Fine kMiddle = K <= Kind::Q4Offset ? Fine::Bits12 : Fine::Bits16;  // there are no 12 bits for weights of 8
constexpr size_t code_bytes(Kind kind) { return kind <= Kind::Q4Offset ? 256 : 512; }
constexpr size_t record_bytes(Kind kind) {
    return 2 * code_bytes(kind) + 64 + (kind == Kind::Q4Min ? 64 : (kind == Kind::Q8Min ? 128 : 0));
}

struct Packed {
    Kind kind = Kind::F32;
    int out = 0;
    int in = 0;
    int tiles = 0;
    int pairs = 0;          // records of a quantised tile
    Fine fine = Fine::Bits8;
    size_t tile_bytes = 0;
    uint8_t* data = nullptr;  // [tiles][tile_bytes], owned by an Arena
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
