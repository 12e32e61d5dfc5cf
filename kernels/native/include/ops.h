// The ops of one instruction set as a table of functions; entry.cpp picks a table at run time.
#pragma once

#include <memory>

#include "api.h"
#include "kernels/decoder/model.h"
#include "team.h"
#include "weights.h"

namespace fs {

struct Ops {
    const char* name;
    void (*quantise)(const float* x, int rows, int in, int16_t* codes, float* step);
    void (*linear)(Team& team, const Packed& w, const float* x, int rows, float* y);
    void (*rms_norm)(const float* x, const float* residual, const float* weight, int rows, int n, float eps, float* out, float* residual_out);
    void (*rope)(const float* x, const int32_t* positions, const float* cos, const float* sin, int rows, int heads, int d, float* out);
    void (*kv_write)(const fs_store& store, int layer, const float* k, const float* v, const int32_t* slots, int rows);
    void (*kv_move)(Team& team, const fs_store& store, const int32_t* src, const int32_t* dst, int n);
    void (*tree_attention)(Team& team, const float* q, int q_heads, const fs_store& store, int layer, const fs_step& step, float scale, int window, float* out);
    void (*tree_accept)(const int32_t* input_ids, const int32_t* target_ids, const int32_t* parents, const int32_t* row_ptr, int rows,
                        int max_depth, int32_t* path, int32_t* num_accepted, int32_t* next_ids);
    // uniforms null: probabilities to `out_p`, else token ids to `out_ids`.
    void (*sample)(Team& team, const float* logits, int rows, int n, const float* temperature, const int32_t* top_k, const float* top_p,
                   const float* min_p, const double* uniforms, int32_t* out_ids, float* out_p);
    void (*top_shares)(Team& team, const float* logits, int rows, int n, int k, const float* temperature, int32_t* ids, float* shares);
    double (*limit_stream)(Team& team, const uint8_t* data, size_t bytes);
    double (*limit_dot)(Team& team, int rounds);
    double (*limit_fma)(Team& team, int rounds);
    std::unique_ptr<DecoderStateBase> (*decoder_state)(const Model* model);
    fs_error (*decoder_forward)(DecoderStateBase& state, Team& team, const fs_step& step, const fs_store& store, float* hidden, int32_t* argmax,
                                float* logits, double* profile);
};

const Ops* ops_amx();
const Ops* ops_avx512();
const Ops* ops_avx2();
const Ops* ops_dotprod();
const Ops* ops_neon();
const Ops* ops_portable();

}  // namespace fs
