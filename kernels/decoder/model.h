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
    Packed fusion;  // [hidden, features + hidden]; empty when tokens alone are the input
    std::vector<float> final_norm, cos, sin, feature_norm, token_norm;
    Arena arena;

    const Packed* lent_embedding = nullptr;  // of a model that outlives this one

    const Packed& embedding() const {
        if (lent_embedding != nullptr) return *lent_embedding;
        return own_embedding.data != nullptr ? own_embedding : head;
    }
    bool fused() const { return fusion.data != nullptr; }
};

constexpr int kProfileOps = 16;  // entries of a profile, in the order of Op in native.cpp

// Buffers of a forward, different for each instruction set.
struct DecoderStateBase {
    virtual ~DecoderStateBase() = default;
};

}  // namespace fs
