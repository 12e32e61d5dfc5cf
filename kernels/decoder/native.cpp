// decoder: all layers of one step as a list of phases for the thread team. The contract is in __init__.py beside this file.
//
// Knows the order of the ops and who may read what when; refuses to know how an op computes. Rows of few nodes are normed and
// quantised by every thread for itself (no barrier), many rows are shared out in a phase of their own; same bits.
#pragma once

#include <array>
#include <vector>

#include "kernels/decoder/model.h"
#include "kernels/kv_slots/native.cpp"
#include "kernels/linear/native.cpp"
#include "kernels/norm/native.cpp"
#include "kernels/rope/native.cpp"
#include "kernels/tree_attention/native.cpp"
#include "buffer.h"
#include "team.h"

namespace fs::FS_ISA {

enum class Op { Embed, FusionInput, Fusion, AttentionInput, Qkv, Rotate, Attend, OutputInput, Output, MlpInput, GateUp, DownInput, Down, FinalNorm, HeadInput, Head };
static_assert(static_cast<int>(Op::Head) + 1 == kProfileOps);

// Up to this many nodes each thread prepares the inputs of a linear layer for itself.
constexpr int kPrivateRows = 8;

struct alignas(64) ThreadState {
    Buffer<uint8_t> quantised;
    Buffer<float> values;
    int prepared = -1;  // phase whose input lies in the buffers above
    AttentionScratch attention;
    LinearScratch linear[2];
    Buffer<Best> best;
    bool has_best = false;
    Buffer<float> head;  // one rotated head
};

// All that one forward needs, kept between calls so that buffers are allocated once.
struct DecoderState : DecoderStateBase {
    const Model* model = nullptr;
    int nodes = 0;
    const fs_step* step = nullptr;
    const fs_store* store = nullptr;
    float* out_hidden = nullptr;
    float* out_logits = nullptr;
    Buffer<float> x, q, k, v, attended, inner, values;
    Buffer<uint8_t> quantised;
    Buffer<uint8_t> whole_q;  // queries, where the store is of bytes
    size_t q_stride = 0, kv_stride = 0;
    AttentionPlan plan;
    std::vector<ThreadState> threads;
    std::vector<Phase> phases;
    std::vector<std::pair<Op, int>> ops;  // per phase: op, layer
    std::vector<double> seconds;          // per phase, when a profile is asked for
};

class Forward {
  public:
    Forward(DecoderState& s) : s_(s), m_(*s.model) {}

    void run(int phase, int begin, int end, int thread) {
        const auto [op, layer] = s_.ops[static_cast<size_t>(phase)];
        phase_ = phase;
        switch (op) {
            case Op::Embed: embed(begin, end); break;
            case Op::FusionInput:
            case Op::AttentionInput:
            case Op::OutputInput:
            case Op::MlpInput:
            case Op::DownInput:
            case Op::HeadInput: shared_input(op, layer, begin, end); break;
            case Op::Fusion: linear_store(m_.fusion, input(Op::FusionInput, -1, thread), s_.nodes, begin, end, scratch(thread), s_.x.data(), hidden()); break;
            case Op::Qkv: qkv(m_.layers[static_cast<size_t>(layer)], input(Op::AttentionInput, layer, thread), begin, end, thread); break;
            case Op::Rotate: rotate(layer, begin, end, thread); break;
            case Op::Attend: attend(layer, begin, end, thread); break;
            case Op::Output: {
                const Packed& o = m_.layers[static_cast<size_t>(layer)].slot[FS_SLOT_O];
                linear_add(o, input(Op::OutputInput, layer, thread), s_.nodes, begin, end, scratch(thread), s_.x.data(), hidden());
                break;
            }
            case Op::GateUp: {
                const Layer& l = m_.layers[static_cast<size_t>(layer)];
                linear_swiglu(l.slot[FS_SLOT_GATE], l.slot[FS_SLOT_UP], input(Op::MlpInput, layer, thread), s_.nodes, begin, end, scratch(thread), s_.inner.data(), intermediate());
                break;
            }
            case Op::Down: {
                const Packed& down = m_.layers[static_cast<size_t>(layer)].slot[FS_SLOT_DOWN];
                linear_add(down, input(Op::DownInput, layer, thread), s_.nodes, begin, end, scratch(thread), s_.x.data(), hidden());
                break;
            }
            case Op::FinalNorm: final_norm(begin, end); break;
            case Op::Head: head(begin, end, thread); break;
        }
    }

    static int input_width(const Model& m, Op op) {
        if (op == Op::FusionInput) return m.shape.features + m.shape.hidden;
        if (op == Op::OutputInput) return m.shape.q_heads * m.shape.head_dim;
        return op == Op::DownInput ? m.shape.intermediate : m.shape.hidden;
    }

  private:
    size_t hidden() const { return static_cast<size_t>(m_.shape.hidden); }
    LinearScratch (&scratch(int thread))[2] { return s_.threads[static_cast<size_t>(thread)].linear; }
    size_t intermediate() const { return static_cast<size_t>(m_.shape.intermediate); }

    void embed(int begin, int end) {
        for (int i = begin; i < end; ++i) unpack_row(m_.embedding(), s_.step->input_ids[i], s_.x.data() + static_cast<size_t>(i) * hidden());
    }

    int input_rows(Op op) const { return op == Op::HeadInput ? s_.step->scored : s_.nodes; }

    // Which forms of its input the layers behind `op` read: quantised, float.
    std::pair<bool, bool> forms(Op op, int layer) const {
        bool quantised = false, dense = false;
        const auto see = [&](const Packed& w) { (is_quantised(w.kind) ? quantised : dense) = true; };
        if (op == Op::HeadInput || op == Op::FusionInput) {
            see(op == Op::HeadInput ? m_.head : m_.fusion);
            return {quantised, dense};
        }
        const Layer& l = m_.layers[static_cast<size_t>(layer)];
        if (op == Op::AttentionInput) {
            see(l.slot[FS_SLOT_Q]);
            see(l.slot[FS_SLOT_K]);
            see(l.slot[FS_SLOT_V]);
        } else if (op == Op::OutputInput) {
            see(l.slot[FS_SLOT_O]);
        } else if (op == Op::MlpInput) {
            see(l.slot[FS_SLOT_GATE]);
            see(l.slot[FS_SLOT_UP]);
        } else {
            see(l.slot[FS_SLOT_DOWN]);
        }
        return {quantised, dense};
    }

    // Row r of a linear layer's input, in the forms asked for.
    void prepare_row(Op op, int layer, int r, bool quantised, const RowLayout& layout, uint8_t* codes, float* values) {
        const int width = input_width(m_, op);
        float* target = values + static_cast<size_t>(r) * static_cast<size_t>(width);
        const float* source = target;
        if (op == Op::FusionInput) {
            fuse_row(r, target);
        } else if (op == Op::AttentionInput || op == Op::MlpInput) {
            const Layer& l = m_.layers[static_cast<size_t>(layer)];
            norm_row(s_.x.data() + static_cast<size_t>(r) * hidden(), op == Op::AttentionInput ? l.attention_norm : l.mlp_norm, width, target);
        } else if (op == Op::OutputInput) {
            source = s_.attended.data() + static_cast<size_t>(r) * s_.q_stride;
        } else if (op == Op::DownInput) {
            source = s_.inner.data() + static_cast<size_t>(r) * intermediate();
        } else {
            source = s_.out_hidden + static_cast<size_t>(s_.step->score_rows[r]) * hidden();
        }
        if (quantised) quantise_row(source, width, r, layout, codes);
        if (source != target && forms(op, layer).second) std::memcpy(target, source, static_cast<size_t>(width) * sizeof(float));
    }

    // Half of what is about to be read lies in another core's cache: all of it is asked for at once.
    void fetch_source(Op op, int rows, int width) const {
        if (op == Op::FusionInput) return;
        const float* base = op == Op::OutputInput ? s_.attended.data() : (op == Op::DownInput ? s_.inner.data() : s_.x.data());
        const size_t stride = op == Op::OutputInput ? s_.q_stride : static_cast<size_t>(width);
        for (int r = 0; r < rows; ++r) {
            for (int c = 0; c < width; c += 16) prefetch(base + static_cast<size_t>(r) * stride + c);
        }
    }

    // An empty weight: no norm.
    void norm_row(const float* x, const std::vector<float>& weight, int width, float* out) const {
        if (!weight.empty()) {
            rms_norm_row(x, weight.data(), width, m_.shape.norm_eps, out);
        } else if (x != out) {
            std::memcpy(out, x, static_cast<size_t>(width) * sizeof(float));
        }
    }

    // [ norm(features) ; norm(embedding of the token) ] of one node.
    void fuse_row(int r, float* target) {
        const int width = m_.shape.features;
        const float* features = s_.step->features + static_cast<size_t>(r) * static_cast<size_t>(width);
        norm_row(features, m_.feature_norm, width, target);
        float* token = target + width;
        unpack_row(m_.embedding(), s_.step->input_ids[r], token);
        norm_row(token, m_.token_norm, m_.shape.hidden, token);
    }

    void shared_input(Op op, int layer, int begin, int end) {
        const RowLayout layout(input_width(m_, op), input_rows(op));
        const bool quantised = forms(op, layer).first;
        for (int r = begin; r < end; ++r) prepare_row(op, layer, r, quantised, layout, s_.quantised.data(), s_.values.data());
    }

    // The input of the linear layer of this phase: the shared buffers, or this thread's own, filled on its first claim.
    Rows input(Op op, int layer, int thread) {
        const int rows = input_rows(op), width = input_width(m_, op);
        const RowLayout layout(width, rows);
        Rows out;
        out.stride = static_cast<size_t>(width);
        if (rows > kPrivateRows) {
            out.read(s_.quantised.data(), layout);
            out.values = s_.values.data();
            return out;
        }
        ThreadState& t = s_.threads[static_cast<size_t>(thread)];
        if (t.prepared != phase_) {
            const bool quantised = forms(op, layer).first;
            if (rows > 1) fetch_source(op, rows, width);
            for (int r = 0; r < rows; ++r) prepare_row(op, layer, r, quantised, layout, t.quantised.data(), t.values.data());
            t.prepared = phase_;
        }
        out.read(t.quantised.data(), layout);
        out.values = t.values.data();
        return out;
    }

    void qkv(const Layer& l, const Rows& x, int begin, int end, int thread) {
        const Packed* parts[3] = {&l.slot[FS_SLOT_Q], &l.slot[FS_SLOT_K], &l.slot[FS_SLOT_V]};
        float* targets[3] = {s_.q.data(), s_.k.data(), s_.v.data()};
        const size_t strides[3] = {s_.q_stride, s_.kv_stride, s_.kv_stride};
        int offset = 0;
        for (int part = 0; part < 3; ++part) {
            const int from = std::max(begin - offset, 0), to = std::min(end - offset, parts[part]->tiles);
            if (from < to) linear_store(*parts[part], x, s_.nodes, from, to, scratch(thread), targets[part], strides[part]);
            offset += parts[part]->tiles;
        }
    }

    // Unit = 16 nodes of one key/value head with its query heads: neighbouring keys share cache lines of the store, so one thread
    // writes them all.
    void rotate(int layer, int begin, int end, int thread) {
        for (int unit = begin; unit < end; ++unit) {
            const int head = unit % m_.shape.kv_heads, first_node = unit / m_.shape.kv_heads * kGroup;
            for (int i = first_node; i < std::min(first_node + kGroup, s_.nodes); ++i) rotate_head(layer, i, head, thread);
        }
    }

    void rotate_head(int layer, int node, int head, int thread) {
        const fs_shape& shape = m_.shape;
        const Layer& l = m_.layers[static_cast<size_t>(layer)];
        const int d = shape.head_dim, per_group = shape.q_heads / shape.kv_heads;
        float* buffer = s_.threads[static_cast<size_t>(thread)].head.data();
        const size_t at = static_cast<size_t>(s_.step->positions[node]) * static_cast<size_t>(d / 2);
        const float* cos = m_.cos.data() + at;
        const float* sin = m_.sin.data() + at;
        float* q = s_.q.data() + static_cast<size_t>(node) * s_.q_stride + static_cast<size_t>(head * per_group * d);
        for (int g = 0; g < per_group; ++g, q += d) {
            if (!l.q_norm.empty()) rms_norm_row(q, l.q_norm.data(), d, shape.norm_eps, q);
            rope_head(q, cos, sin, d, shape.scale, q);
        }
        if (s_.store->kind == FS_STORE_BYTES) write_queries(s_.plan, *s_.store, node, head, per_group, q - per_group * d, s_.whole_q);
        const size_t kv = static_cast<size_t>(node) * s_.kv_stride + static_cast<size_t>(head * d);
        const float* k = s_.k.data() + kv;
        if (!l.k_norm.empty()) {
            rms_norm_row(k, l.k_norm.data(), d, shape.norm_eps, buffer);
            k = buffer;
        }
        rope_head(k, cos, sin, d, 1.0f, buffer);
        write_head(*s_.store, layer, s_.step->slots[node], head, buffer, s_.v.data() + kv);
    }

    void attend(int layer, int begin, int end, int thread) {
        const AttentionLayer a{s_.step, s_.store, &s_.plan, s_.q.data(), s_.attended.data(), s_.q_stride, m_.shape.q_heads, m_.shape.window, layer, s_.whole_q.data()};
        attend_units(a, begin, end, s_.threads[static_cast<size_t>(thread)].attention);
    }

    void final_norm(int begin, int end) {
        for (int i = begin; i < end; ++i) {
            norm_row(s_.x.data() + static_cast<size_t>(i) * hidden(), m_.final_norm, m_.shape.hidden, s_.out_hidden + static_cast<size_t>(i) * hidden());
        }
    }

    void head(int begin, int end, int thread) {
        ThreadState& t = s_.threads[static_cast<size_t>(thread)];
        if (!t.has_best) {
            best_reset(t.best.data(), s_.step->scored);
            t.has_best = true;
        }
        linear_best(m_.head, input(Op::HeadInput, -1, thread), s_.step->scored, begin, end, t.linear, t.best.data(), s_.out_logits, static_cast<size_t>(m_.shape.vocab));
    }

    DecoderState& s_;
    const Model& m_;
    int phase_ = -1;
};

inline void run_phase(void* job, int phase, int begin, int end, int thread) {
    Forward(*static_cast<DecoderState*>(job)).run(phase, begin, end, thread);
}

// Tiles claimed at a time: enough bytes that claiming costs nothing, few enough that the second-level cache holds them. `b`: a matrix
// read along with `a`; `tiles`: units when other matrices of a's tile size follow it.
inline Phase tiles_phase(const Packed& a, const Packed* b = nullptr, int tiles = 0) {
    const size_t bytes = a.tile_bytes + (b != nullptr ? b->tile_bytes : 0);
    const int most = std::max<int>(1, static_cast<int>((size_t{512} << 10) / bytes));
    const int least = std::max<int>(1, static_cast<int>((size_t{8} << 10) / bytes));
    Phase phase{run_phase, tiles > 0 ? tiles : a.tiles, std::min(least, most), most};
    phase.data[0] = a.data;
    phase.data[1] = b != nullptr ? b->data : nullptr;
    phase.unit_bytes = a.tile_bytes;
    return phase;
}

inline void list_phases(DecoderState& s, int head_rows) {
    const Model& m = *s.model;
    s.phases.clear();
    s.ops.clear();
    const auto add = [&](Op op, int layer, Phase phase) {
        s.ops.emplace_back(op, layer);
        s.phases.push_back(phase);
    };
    const Phase by_row{run_phase, s.nodes, s.nodes >= 64 ? 8 : 1, 64};
    const auto input = [&](Op op, int layer, int rows) {
        if (rows > kPrivateRows) add(op, layer, {run_phase, rows, rows >= 32 ? kGroup : 1, 64});
    };
    if (m.fused()) {
        input(Op::FusionInput, -1, s.nodes);
        add(Op::Fusion, -1, tiles_phase(m.fusion));
    } else {
        add(Op::Embed, -1, by_row);
    }
    for (int layer = 0; layer < m.shape.layers; ++layer) {
        const auto& slot = m.layers[static_cast<size_t>(layer)].slot;
        input(Op::AttentionInput, layer, s.nodes);
        add(Op::Qkv, layer, tiles_phase(slot[FS_SLOT_Q], nullptr, slot[FS_SLOT_Q].tiles + slot[FS_SLOT_K].tiles + slot[FS_SLOT_V].tiles));
        add(Op::Rotate, layer, {run_phase, (s.nodes + kGroup - 1) / kGroup * m.shape.kv_heads, 1, 16});
        add(Op::Attend, layer, {run_phase, static_cast<int>(s.plan.units.size()), 1, 64});
        input(Op::OutputInput, layer, s.nodes);
        add(Op::Output, layer, tiles_phase(slot[FS_SLOT_O]));
        input(Op::MlpInput, layer, s.nodes);
        add(Op::GateUp, layer, tiles_phase(slot[FS_SLOT_GATE], &slot[FS_SLOT_UP]));
        input(Op::DownInput, layer, s.nodes);
        add(Op::Down, layer, tiles_phase(slot[FS_SLOT_DOWN]));
    }
    add(Op::FinalNorm, -1, by_row);
    if (head_rows > 0) {
        input(Op::HeadInput, -1, head_rows);
        add(Op::Head, -1, tiles_phase(m.head));
    }
}

inline void reserve(DecoderState& s, int threads) {
    const fs_shape& shape = s.model->shape;
    const auto n = static_cast<size_t>(s.nodes);
    const int q_width = shape.q_heads * shape.head_dim, kv_width = shape.kv_heads * shape.head_dim;
    s.q_stride = static_cast<size_t>(q_width);
    s.kv_stride = static_cast<size_t>(kv_width);
    const int widest = std::max({shape.hidden + shape.features, q_width, shape.intermediate});
    const int rows = std::max(s.nodes, s.step->scored);
    grow(s.x, n * static_cast<size_t>(shape.hidden));
    grow(s.q, n * s.q_stride);
    grow(s.k, n * s.kv_stride);
    grow(s.v, n * s.kv_stride);
    grow(s.attended, n * s.q_stride);
    grow(s.inner, n * static_cast<size_t>(shape.intermediate));
    grow(s.values, static_cast<size_t>(rows) * static_cast<size_t>(widest));
    grow(s.quantised, rows_bytes(widest, rows));
    reserve_queries(s.plan, *s.store, s.whole_q);
    if (s.threads.size() < static_cast<size_t>(threads)) s.threads.resize(static_cast<size_t>(threads));
    for (ThreadState& t : s.threads) {
        grow(t.quantised, rows_bytes(widest, kPrivateRows));
        grow(t.values, static_cast<size_t>(kPrivateRows) * static_cast<size_t>(widest));
        grow(t.head, static_cast<size_t>(shape.head_dim));
        grow(t.best, static_cast<size_t>(s.step->scored));
        t.prepared = -1;
        t.has_best = false;
        t.attention.reserve(*s.store, s.plan.max_queries, s.plan.padded);
    }
}

inline std::unique_ptr<DecoderStateBase> make_decoder_state(const Model* model) {
    auto state = std::make_unique<DecoderState>();
    state->model = model;
    return state;
}

inline fs_error decoder_forward(DecoderStateBase& base, Team& team, const fs_step& step, const fs_store& store, float* hidden, int32_t* argmax, float* logits,
                                double* profile) {
    auto& s = static_cast<DecoderState&>(base);
    const fs_shape& shape = s.model->shape;
    s.nodes = step.nodes;
    s.step = &step;
    s.store = &store;
    s.out_hidden = hidden;
    s.out_logits = logits;
    plan_attention(step, shape.q_heads, shape.kv_heads, shape.head_dim, shape.window, team.threads(), &s.plan);
    reserve(s, team.threads());
    list_phases(s, step.scored);
    if (profile != nullptr) s.seconds.assign(s.phases.size(), 0.0);
    if (!team.run(&s, s.phases.data(), static_cast<int>(s.phases.size()), profile != nullptr ? s.seconds.data() : nullptr)) return FS_BAD_SHAPE;
    if (profile != nullptr) {
        for (size_t p = 0; p < s.phases.size(); ++p) profile[static_cast<size_t>(s.ops[p].first)] += s.seconds[p];
    }
    for (int r = 0; r < step.scored; ++r) {
        float value = -__builtin_inff();
        int32_t index = INT32_MAX;
        for (const ThreadState& t : s.threads) {
            if (t.has_best) best_fold(t.best[static_cast<size_t>(r)], &value, &index);
        }
        argmax[r] = index;
    }
    return FS_OK;
}

}  // namespace fs::FS_ISA
