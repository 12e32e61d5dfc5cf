// The packed weights of one decoder. Knows names and sizes; refuses to know instruction sets.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "api.h"
#include "weights.h"

namespace fs {

struct Layer {
    std::array<Packed, FS_SLOTS> slot;
    std::vector<float> attention_norm, mlp_norm, q_norm, k_norm;
};

struct Model {
    fs_shape shape{};
    std::vector<Layer> layers;
    Packed own_embedding;  // empty when the rows of `head` serve as embedding
    Packed head;
    std::vector<float> final_norm, cos, sin;
    Arena arena;

    const Packed& embedding() const { return own_embedding.data != nullptr ? own_embedding : head; }
};

constexpr int kProfileOps = 14;  // entries of a profile, in the order of Op in native.cpp

// Buffers of a forward, different for each instruction set.
struct DecoderStateBase {
    virtual ~DecoderStateBase() = default;
};

}  // namespace fs
