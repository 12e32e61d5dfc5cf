// The plain C data that crosses the border to Python. Mirrored field by field in kernels/native/library.py.
#pragma once

#include <cstdint>

extern "C" {

enum fs_kind : int32_t { FS_Q4 = 0, FS_Q8 = 1, FS_F32 = 2, FS_F16 = 3, FS_BF16 = 4 };

struct fs_weight {
    int32_t kind;           // fs_kind
    int32_t out;            // outputs
    int32_t in;             // inputs; a multiple of 32 for FS_Q4 and FS_Q8
    const void* codes;      // FS_Q4: [out, in/32, 16] bytes, FS_Q8: [out, in/32, 32] bytes, dense: [out, in] values
    const uint16_t* scale;  // [out, in/32] float16
    const void* minimum;    // [out, in/32] float16 (FS_Q4) or float32 (FS_Q8)
    const float* bias;      // [out] or null
};

struct fs_step {
    int32_t nodes;   // N
    int32_t rows;    // S
    int32_t pages;   // P, columns of page_table
    int32_t scored;  // R
    const int32_t* input_ids;   // [N]
    const int32_t* positions;   // [N]
    const int32_t* slots;       // [N]
    const int64_t* words;       // [N]
    const uint8_t* causal;      // [S]
    const int32_t* row_ptr;     // [S + 1]
    const int32_t* page_table;  // [S, P]
    const int32_t* kv_lens;     // [S]
    const int32_t* score_rows;  // [R]
    const float* features;      // [N, features of the shape], or null where the shape has none
};

enum fs_store_kind : int32_t { FS_STORE_F32 = 0, FS_STORE_BF16 = 1, FS_STORE_BYTES = 2 };

struct fs_store {
    void* k;  // [layers, pages, kv_heads, head_dim, page_size]; bytes: see kernels/whole_store
    void* v;  // [layers, pages, kv_heads, page_size, head_dim]
    int32_t layers;
    int32_t pages;
    int32_t kv_heads;
    int32_t head_dim;
    int32_t page_size;
    int32_t kind;  // fs_store_kind
};

struct fs_shape {
    int32_t layers;
    int32_t hidden;
    int32_t intermediate;
    int32_t q_heads;
    int32_t kv_heads;
    int32_t head_dim;
    int32_t vocab;
    int32_t max_position;
    int32_t window;  // 0: none
    int32_t features;  // width of the features fused into the input, 0: tokens alone are the input
    float norm_eps;
    float scale;
};

// Names of the weights of one layer, in the order fs_decoder_set_weight takes them.
enum fs_slot : int32_t { FS_SLOT_Q = 0, FS_SLOT_K, FS_SLOT_V, FS_SLOT_O, FS_SLOT_GATE, FS_SLOT_UP, FS_SLOT_DOWN, FS_SLOTS };
// Weights outside the layers: layer = -1.
enum fs_outer : int32_t { FS_OUTER_EMBEDDING = 0, FS_OUTER_HEAD, FS_OUTER_FUSION };
// Vectors: norms per layer, then tables with layer = -1.
enum fs_vector : int32_t { FS_VEC_ATTENTION_NORM = 0, FS_VEC_MLP_NORM, FS_VEC_Q_NORM, FS_VEC_K_NORM, FS_VEC_FINAL_NORM, FS_VEC_COS, FS_VEC_SIN, FS_VEC_FEATURE_NORM, FS_VEC_TOKEN_NORM };

enum fs_error : int32_t { FS_OK = 0, FS_BAD_TOKEN = 1, FS_BAD_POSITION = 2, FS_BAD_SLOT = 3, FS_BAD_ROW = 4, FS_BAD_SHAPE = 5, FS_NO_MEMORY = 6, FS_BAD_FEATURES = 7 };
}
