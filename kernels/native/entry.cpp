// The plain C interface: what Python calls. Checks what would otherwise read or write out of bounds.
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__GLIBC__)
#include <malloc.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include "ops.h"

namespace {

using namespace fs;

const Ops* const* tables() {
    static const Ops* const list[] = {
#ifdef FS_HAVE_AMX
        ops_amx(),
#endif
#ifdef FS_HAVE_AVX512
        ops_avx512(),
#endif
#ifdef FS_HAVE_AVX2
        ops_avx2(),
#endif
#ifdef FS_HAVE_DOTPROD
        ops_dotprod(),
#endif
#ifdef FS_HAVE_NEON
        ops_neon(),
#endif
        ops_portable(), nullptr};
    return list;
}

#if defined(__x86_64__)
bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}

// The processor has the unit and the system lets this process use its registers (asking again is harmless).
bool has_amx() {
#if defined(__linux__)
    unsigned a, b, c, d;
    constexpr unsigned kTiles = 1u << 24 | 1u << 25, kFieldOps = 1u << 8;  // tiles with int8; GFNI, which came before them
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kTiles) != kTiles || (c & kFieldOps) == 0) return false;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}
#endif

#if defined(__aarch64__)
// Sums of byte products (ARMv8.2, optional there). NEON itself is part of every 64-bit ARM processor.
bool has_dotprod() {
#if defined(__linux__)
    return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#elif defined(__APPLE__)
    int has = 0;
    size_t size = sizeof has;
    return sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &size, nullptr, 0) == 0 && has != 0;
#else
    return false;
#endif
}
#endif

bool supported(const char* name) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (std::strcmp(name, "amx") == 0) return has_avx512() && has_amx();
    if (std::strcmp(name, "avx512") == 0) return has_avx512();
    if (std::strcmp(name, "avx2") == 0) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#endif
#if defined(__aarch64__)
    if (std::strcmp(name, "dotprod") == 0) return has_dotprod();
    if (std::strcmp(name, "neon") == 0) return true;
#endif
    return std::strcmp(name, "portable") == 0;
}

struct Decoder {
    Model model;
    const Ops* ops = nullptr;
    std::unique_ptr<DecoderStateBase> state;
};

struct Matrix {
    Arena arena;
    Packed packed;
};

fs_error check_step(const fs_step& step, const fs_store& store, int embedding_rows, int max_position) {
    if (step.row_ptr[0] != 0 || step.row_ptr[step.rows] != step.nodes) return FS_BAD_ROW;
    const int64_t slots = static_cast<int64_t>(store.pages) * store.page_size;
    for (int i = 0; i < step.nodes; ++i) {
        if (step.input_ids != nullptr && (step.input_ids[i] < 0 || step.input_ids[i] >= embedding_rows)) return FS_BAD_TOKEN;
        if (step.positions != nullptr && (step.positions[i] < 0 || step.positions[i] >= max_position)) return FS_BAD_POSITION;
        if (step.slots != nullptr && (step.slots[i] < 0 || step.slots[i] >= slots)) return FS_BAD_SLOT;
    }
    for (int s = 0; s < step.rows; ++s) {
        const int nodes = step.row_ptr[s + 1] - step.row_ptr[s];
        if (nodes < 1 || (step.causal[s] == 0 && nodes > 64) || step.kv_lens[s] < 0) return FS_BAD_ROW;
        const int64_t keys = static_cast<int64_t>(step.kv_lens[s]) + nodes;
        const int64_t pages = (keys + store.page_size - 1) / store.page_size;
        if (pages > step.pages) return FS_BAD_ROW;
        for (int64_t p = 0; p < pages; ++p) {
            const int32_t page = step.page_table[static_cast<int64_t>(s) * step.pages + p];
            if (page < 0 || page >= store.pages) return FS_BAD_SLOT;
        }
        if (step.causal[s] != 0) continue;
        for (int i = 0; i < nodes; ++i) {
            const auto word = static_cast<uint64_t>(step.words[step.row_ptr[s] + i]);
            if (word == 0 || (nodes < 64 && (word >> nodes) != 0)) return FS_BAD_ROW;
        }
    }
    for (int r = 0; r < step.scored; ++r) {
        if (step.score_rows[r] < 0 || step.score_rows[r] >= step.nodes) return FS_BAD_ROW;
    }
    return FS_OK;
}

fs_error check_store(const fs_shape& shape, const fs_store& store) {
    const bool fits = store.layers == shape.layers && store.kv_heads == shape.kv_heads && store.head_dim == shape.head_dim && store.page_size > 0;
    if (store.kind == FS_STORE_BYTES && (store.page_size % 16 != 0 || store.head_dim % 4 != 0 || store.head_dim > 512)) return FS_BAD_SHAPE;
    return fits ? FS_OK : FS_BAD_SHAPE;
}

std::vector<float>* vector_of(Model& m, int layer, int which) {
    if (layer < 0) {
        if (which == FS_VEC_FINAL_NORM) return &m.final_norm;
        switch (which) {
            case FS_VEC_COS: return &m.cos;
            case FS_VEC_SIN: return &m.sin;
            case FS_VEC_FEATURE_NORM: return &m.feature_norm;
            case FS_VEC_TOKEN_NORM: return &m.token_norm;
            default: return nullptr;
        }
    }
    if (layer >= m.shape.layers) return nullptr;
    Layer& l = m.layers[static_cast<size_t>(layer)];
    switch (which) {
        case FS_VEC_ATTENTION_NORM: return &l.attention_norm;
        case FS_VEC_MLP_NORM: return &l.mlp_norm;
        case FS_VEC_Q_NORM: return &l.q_norm;
        case FS_VEC_K_NORM: return &l.k_norm;
        default: return nullptr;
    }
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Name of the i-th instruction set that this build has and this machine runs, best first; null past the last.
const char* fs_isa_name(int i) {
    for (const Ops* const* t = tables(); *t != nullptr; ++t) {
        if (supported((*t)->name) && i-- == 0) return (*t)->name;
    }
    return nullptr;
}

const void* fs_isa(const char* name) {
    for (const Ops* const* t = tables(); *t != nullptr; ++t) {
        if (std::strcmp((*t)->name, name) == 0 && supported(name)) return *t;
    }
    return nullptr;
}

// Gives memory that was freed back to the system: a loader's many tensors otherwise stay in the process.
void fs_trim() {
#if defined(__GLIBC__)
    malloc_trim(0);
#endif
}

void* fs_team_create(int threads) { return new Team(threads); }
void fs_team_destroy(void* team) { delete static_cast<Team*>(team); }

void* fs_matrix_create(const fs_weight* w) {
    auto matrix = std::make_unique<Matrix>();
    return pack(*w, matrix->arena, &matrix->packed) ? matrix.release() : nullptr;
}
void fs_matrix_destroy(void* matrix) { delete static_cast<Matrix*>(matrix); }
int64_t fs_matrix_bytes(const void* matrix) { return static_cast<int64_t>(static_cast<const Matrix*>(matrix)->packed.bytes()); }
void fs_matrix_row(const void* matrix, int row, float* out) { unpack_row(static_cast<const Matrix*>(matrix)->packed, row, out); }

void fs_linear(const void* isa, void* team, const void* matrix, const float* x, int rows, float* y) {
    static_cast<const Ops*>(isa)->linear(*static_cast<Team*>(team), static_cast<const Matrix*>(matrix)->packed, x, rows, y);
}

void fs_quantise(const void* isa, const float* x, int rows, int in, int16_t* codes, float* step) {
    static_cast<const Ops*>(isa)->quantise(x, rows, in, codes, step);
}

void fs_rms_norm(const void* isa, const float* x, const float* residual, const float* weight, int rows, int n, float eps, float* out, float* residual_out) {
    static_cast<const Ops*>(isa)->rms_norm(x, residual, weight, rows, n, eps, out, residual_out);
}

// 1 when no value is NaN or infinite.
int32_t fs_all_finite(const float* values, int64_t n) {
    uint32_t broken = 0;
    for (int64_t i = 0; i < n; ++i) {
        uint32_t bits;
        std::memcpy(&bits, values + i, 4);
        broken |= (bits & 0x7f800000u) == 0x7f800000u;
    }
    return broken == 0;
}

void fs_rope(const void* isa, const float* x, const int32_t* positions, const float* cos, const float* sin, int rows, int heads, int d, float* out) {
    static_cast<const Ops*>(isa)->rope(x, positions, cos, sin, rows, heads, d, out);
}

void fs_kv_write(const void* isa, const fs_store* store, int layer, const float* k, const float* v, const int32_t* slots, int rows) {
    static_cast<const Ops*>(isa)->kv_write(*store, layer, k, v, slots, rows);
}

void fs_kv_move(const void* isa, void* team, const fs_store* store, const int32_t* src, const int32_t* dst, int n) {
    static_cast<const Ops*>(isa)->kv_move(*static_cast<Team*>(team), *store, src, dst, n);
}

int32_t fs_tree_attention(const void* isa, void* team, const float* q, int q_heads, const fs_store* store, int layer, const fs_step* step, float scale,
                          int window, float* out) {
    const fs_error error = check_step(*step, *store, INT32_MAX, INT32_MAX);
    if (error != FS_OK) return error;
    static_cast<const Ops*>(isa)->tree_attention(*static_cast<Team*>(team), q, q_heads, *store, layer, *step, scale, window, out);
    return FS_OK;
}

void fs_tree_accept(const void* isa, const int32_t* input_ids, const int32_t* target_ids, const int32_t* parents, const int32_t* row_ptr, int rows,
                    int max_depth, int32_t* path, int32_t* num_accepted, int32_t* next_ids) {
    static_cast<const Ops*>(isa)->tree_accept(input_ids, target_ids, parents, row_ptr, rows, max_depth, path, num_accepted, next_ids);
}

void fs_sample(const void* isa, void* team, const float* logits, int rows, int n, const float* temperature, const int32_t* top_k, const float* top_p,
               const float* min_p, const double* uniforms, int32_t* out_ids, float* out_p) {
    static_cast<const Ops*>(isa)->sample(*static_cast<Team*>(team), logits, rows, n, temperature, top_k, top_p, min_p, uniforms, out_ids, out_p);
}

void fs_top_shares(const void* isa, void* team, const float* logits, int rows, int n, int k, const float* temperature, int32_t* ids, float* shares) {
    static_cast<const Ops*>(isa)->top_shares(*static_cast<Team*>(team), logits, rows, n, k, temperature, ids, shares);
}

// What the machine can do at most (benchmarks): 0 bytes a second streamed, 1 int8 and 2 float32 multiply-adds a second.
double fs_limit(const void* isa, void* team, int which, const uint8_t* data, int64_t bytes, int rounds) {
    const Ops& ops = *static_cast<const Ops*>(isa);
    Team& t = *static_cast<Team*>(team);
    if (which == 0) return ops.limit_stream(t, data, static_cast<size_t>(bytes));
    return which == 1 ? ops.limit_dot(t, rounds) : ops.limit_fma(t, rounds);
}

void* fs_decoder_create(const void* isa, const fs_shape* shape) {
    auto decoder = std::make_unique<Decoder>();
    decoder->ops = static_cast<const Ops*>(isa);
    decoder->model.shape = *shape;
    decoder->model.layers.resize(static_cast<size_t>(shape->layers));
    decoder->state = decoder->ops->decoder_state(&decoder->model);
    return decoder.release();
}
void fs_decoder_destroy(void* decoder) { delete static_cast<Decoder*>(decoder); }

// layer >= 0: an fs_slot of that layer; layer -1: an fs_outer.
int32_t fs_decoder_set_weight(void* decoder, int layer, int slot, const fs_weight* w) {
    Model& m = static_cast<Decoder*>(decoder)->model;
    Packed* const outer[] = {&m.own_embedding, &m.head, &m.fusion};
    Packed* target = layer >= 0 ? &m.layers[static_cast<size_t>(layer)].slot[static_cast<size_t>(slot)] : outer[slot];
    return pack(*w, m.arena, target) ? FS_OK : FS_NO_MEMORY;
}

// Token rows are read from `owner`'s embedding, which must live as long as this decoder.
int32_t fs_decoder_lend_embedding(void* decoder, const void* owner) {
    const Packed& embedding = static_cast<const Decoder*>(owner)->model.embedding();
    Model& m = static_cast<Decoder*>(decoder)->model;
    if (embedding.in != m.shape.hidden) return FS_BAD_SHAPE;
    m.lent_embedding = &embedding;
    return FS_OK;
}

int32_t fs_decoder_set_vector(void* decoder, int layer, int which, const float* values, int64_t n) {
    std::vector<float>* target = vector_of(static_cast<Decoder*>(decoder)->model, layer, which);
    if (target == nullptr) return FS_BAD_SHAPE;
    target->assign(values, values + n);
    return FS_OK;
}

// `profile`: null, or kProfileOps numbers to which the seconds spent in each kind of phase are added.
int32_t fs_decoder_forward(void* decoder, void* team, const fs_step* step, const fs_store* store, float* hidden, int32_t* argmax, float* logits,
                           double* profile) {
    auto& d = *static_cast<Decoder*>(decoder);
    const fs_shape& shape = d.model.shape;
    fs_error error = check_store(shape, *store);
    if (error == FS_OK && d.model.fused() != (step->features != nullptr)) error = FS_BAD_FEATURES;
    if (error == FS_OK) error = check_step(*step, *store, d.model.embedding().out, shape.max_position);
    if (error != FS_OK) return error;
    return d.ops->decoder_forward(*d.state, *static_cast<Team*>(team), *step, *store, hidden, argmax, logits, profile);
}

// A forward and the k best tokens of each scored node with their shares, see fs_top_shares. `logits` [scored, vocab] is scratch.
int32_t fs_decoder_draft(void* decoder, void* team, const fs_step* step, const fs_store* store, float* hidden, int32_t* argmax, float* logits, int k,
                         const float* temperature, int32_t* ids, float* shares) {
    auto& d = *static_cast<Decoder*>(decoder);
    if (k < 1 || k > d.model.shape.vocab) return FS_BAD_SHAPE;
    const int32_t error = fs_decoder_forward(decoder, team, step, store, hidden, argmax, logits, nullptr);
    if (error == FS_OK) d.ops->top_shares(*static_cast<Team*>(team), logits, step->scored, d.model.shape.vocab, k, temperature, ids, shares);
    return error;
}
}
#pragma GCC visibility pop
