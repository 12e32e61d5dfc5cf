// All ops, compiled once per instruction set: -DFS_ISA=<name> and the matching machine flags.
#include "kernels/decoder/native.cpp"
#include "kernels/sample/native.cpp"
#include "kernels/top_shares/native.cpp"
#include "kernels/tree_accept/native.cpp"
#include "machine_limits.h"
#include "ops.h"

#define FS_PASTE_(a, b) a##b
#define FS_PASTE(a, b) FS_PASTE_(a, b)
#define FS_TEXT_(a) #a
#define FS_TEXT(a) FS_TEXT_(a)

namespace fs::FS_ISA {
namespace {

void quantise(const float* x, int rows, int in, int16_t* codes, float* step) {
    const RowLayout layout(in, rows);
    Buffer<uint8_t> held(layout.bytes());
    Rows read;
    read.read(held.data(), layout);
    for (int r = 0; r < rows; ++r) {
        quantise_row(x + static_cast<size_t>(r) * static_cast<size_t>(in), in, r, layout, held.data());
        for (int k = 0; k < in; ++k) {
            const auto* high = reinterpret_cast<const int8_t*>(read.row(r) + read.span * static_cast<size_t>(k / kSpan) + static_cast<size_t>(k % kSpan));
            codes[static_cast<size_t>(r) * static_cast<size_t>(in) + static_cast<size_t>(k)] = static_cast<int16_t>(256 * high[0] + high[read.part]);
        }
        step[r] = read.fields[r].step;
    }
}

struct OneThread {
    LinearScratch scratch[2];
};

struct LinearJob {
    const Packed* w;
    Rows x;
    int rows;
    float* y;
    std::vector<OneThread> threads;
};

void linear(Team& team, const Packed& w, const float* x, int rows, float* y) {
    LinearJob job{&w, {}, rows, y, std::vector<OneThread>(static_cast<size_t>(team.threads()))};
    Buffer<uint8_t> held;
    job.x.values = x;
    job.x.stride = static_cast<size_t>(w.in);
    if (is_quantised(w.kind)) {
        const RowLayout layout(w.in, rows);
        held.resize(layout.bytes());
        for (int r = 0; r < rows; ++r) quantise_row(x + static_cast<size_t>(r) * job.x.stride, w.in, r, layout, held.data());
        job.x.read(held.data(), layout);
    }
    Phase phase = tiles_phase(w);
    phase.run = [](void* p, int, int begin, int end, int thread) {
        auto& j = *static_cast<LinearJob*>(p);
        linear_store(*j.w, j.x, j.rows, begin, end, j.threads[static_cast<size_t>(thread)].scratch, j.y, static_cast<size_t>(j.w->out));
    };
    team.run(&job, &phase, 1);
}

void rms_norm(const float* x, const float* residual, const float* weight, int rows, int n, float eps, float* out, float* residual_out) {
    for (int r = 0; r < rows; ++r) {
        const size_t at = static_cast<size_t>(r) * static_cast<size_t>(n);
        if (residual != nullptr) {
            add_rms_norm_row(x + at, residual + at, weight, n, eps, out + at, residual_out + at);
        } else {
            rms_norm_row(x + at, weight, n, eps, out + at);
        }
    }
}

void rope(const float* x, const int32_t* positions, const float* cos, const float* sin, int rows, int heads, int d, float* out) {
    for (int r = 0; r < rows; ++r) {
        const size_t table = static_cast<size_t>(positions[r]) * static_cast<size_t>(d / 2);
        for (int h = 0; h < heads; ++h) {
            const size_t at = (static_cast<size_t>(r) * static_cast<size_t>(heads) + static_cast<size_t>(h)) * static_cast<size_t>(d);
            rope_head(x + at, cos + table, sin + table, d, 1.0f, out + at);
        }
    }
}

void kv_write(const fs_store& store, int layer, const float* k, const float* v, const int32_t* slots, int rows) {
    const int d = store.head_dim;
    for (int r = 0; r < rows; ++r) {
        for (int h = 0; h < store.kv_heads; ++h) {
            const size_t at = (static_cast<size_t>(r) * static_cast<size_t>(store.kv_heads) + static_cast<size_t>(h)) * static_cast<size_t>(d);
            write_head(store, layer, slots[r], h, k + at, v + at);
        }
    }
}

struct MoveJob {
    const fs_store* store;
    const int32_t* src;
    const int32_t* dst;
    int n;
};

void kv_move(Team& team, const fs_store& store, const int32_t* src, const int32_t* dst, int n) {
    MoveJob job{&store, src, dst, n};
    const Phase phase{[](void* p, int, int begin, int end, int) {
                          const auto& j = *static_cast<MoveJob*>(p);
                          for (int layer = begin; layer < end; ++layer) move_layer(*j.store, layer, j.src, j.dst, j.n);
                      },
                      store.layers, 1, 64};
    team.run(&job, &phase, 1);
}

struct AttentionJob {
    AttentionLayer layer;
    std::vector<AttentionScratch> scratch;
};

void tree_attention(Team& team, const float* q, int q_heads, const fs_store& store, int layer, const fs_step& step, float scale, int window, float* out) {
    const auto width = static_cast<size_t>(q_heads) * static_cast<size_t>(store.head_dim);
    Buffer<float> scaled(q, q + static_cast<size_t>(step.nodes) * width);
    for (float& value : scaled) value *= scale;
    AttentionPlan plan;
    plan_attention(step, q_heads, store.kv_heads, store.head_dim, window, team.threads(), &plan);
    const int per_group = q_heads / store.kv_heads;
    Buffer<uint8_t> whole;
    reserve_queries(plan, store, whole);
    for (int i = 0; store.kind == FS_STORE_BYTES && i < step.nodes * store.kv_heads; ++i) {
        const int node = i / store.kv_heads, head = i % store.kv_heads;
        write_queries(plan, store, node, head, per_group, scaled.data() + static_cast<size_t>(node) * width + static_cast<size_t>(head * per_group * store.head_dim), whole);
    }
    AttentionJob job{{&step, &store, &plan, scaled.data(), out, width, q_heads, window, layer, whole.data()}, {}};
    job.scratch.resize(static_cast<size_t>(team.threads()));
    for (AttentionScratch& s : job.scratch) s.reserve(store, plan.max_queries, plan.padded);
    const Phase phase{[](void* p, int, int begin, int end, int thread) {
                          auto& j = *static_cast<AttentionJob*>(p);
                          attend_units(j.layer, begin, end, j.scratch[static_cast<size_t>(thread)]);
                      },
                      static_cast<int>(plan.units.size()), 1, 64};
    team.run(&job, &phase, 1);
}

constexpr int64_t kShareOut = 1 << 15;  // logits that are worth a second thread

struct SampleJob {
    const float* logits;
    int n;
    const float* temperature;
    const int32_t* top_k;
    const float* top_p;
    const float* min_p;
    const double* uniforms;
    int32_t* out_ids;
    float* out_p;
    std::vector<SampleScratch> scratch;
};

void sample_rows(void* p, int, int begin, int end, int thread) {
    auto& j = *static_cast<SampleJob*>(p);
    SampleScratch& scratch = j.scratch[static_cast<size_t>(thread)];
    for (int r = begin; r < end; ++r) {
        const SampleSettings set{j.temperature[r], j.top_k[r], j.top_p[r], j.min_p[r]};
        const float* row = j.logits + static_cast<size_t>(r) * static_cast<size_t>(j.n);
        if (j.uniforms != nullptr) {
            j.out_ids[r] = sample_row(row, j.n, set, j.uniforms[r], scratch);
        } else {
            probabilities_row(row, j.n, set, scratch, j.out_p + static_cast<size_t>(r) * static_cast<size_t>(j.n));
        }
    }
}

void sample(Team& team, const float* logits, int rows, int n, const float* temperature, const int32_t* top_k, const float* top_p, const float* min_p,
            const double* uniforms, int32_t* out_ids, float* out_p) {
    SampleJob job{logits, n, temperature, top_k, top_p, min_p, uniforms, out_ids, out_p, {}};
    job.scratch.resize(static_cast<size_t>(team.threads()));
    const Phase phase{sample_rows, rows, 1, 1};
    team.run(&job, &phase, 1);
}

struct TopSharesJob {
    const float* logits;
    int n;
    int k;
    const float* temperature;
    int32_t* ids;
    float* shares;
};

void top_shares_rows(void* p, int, int begin, int end, int) {
    const auto& j = *static_cast<TopSharesJob*>(p);
    const auto n = static_cast<size_t>(j.n), k = static_cast<size_t>(j.k);
    for (int r = begin; r < end; ++r) {
        const auto row = static_cast<size_t>(r);
        top_shares_row(j.logits + row * n, j.n, j.k, j.temperature == nullptr ? 1.0f : j.temperature[r], j.ids + row * k, j.shares + row * k);
    }
}

void top_shares(Team& team, const float* logits, int rows, int n, int k, const float* temperature, int32_t* ids, float* shares) {
    TopSharesJob job{logits, n, k, temperature, ids, shares};
    if (static_cast<int64_t>(rows) * n < kShareOut) {  // a few rows are done before a second thread would have begun
        top_shares_rows(&job, 0, 0, rows, 0);
        return;
    }
    const Phase phase{top_shares_rows, rows, 1, 1};
    team.run(&job, &phase, 1);
}

const Ops kOps = {FS_TEXT(FS_ISA), quantise, linear, rms_norm, rope, kv_write, kv_move, tree_attention, tree_accept_rows, sample,
                  top_shares, limit_stream, limit_dot, limit_fma, make_decoder_state, decoder_forward};

}  // namespace
}  // namespace fs::FS_ISA

namespace fs {
const Ops* FS_PASTE(ops_, FS_ISA)() { return &FS_ISA::kOps; }
}  // namespace fs
