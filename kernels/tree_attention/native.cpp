// tree_attention: one unit of the plan after the other. The contract is in __init__.py beside this file.
//
// Knows how chunks are joined and results written; what a chunk's arithmetic is depends on how keys and values are kept: floats.h, whole.h.
#pragma once

#include <tuple>

#include "kernels/tree_attention/floats.h"
#include "kernels/tree_attention/whole.h"

namespace fs::FS_ISA {

struct AttentionScratch {
    Buffer<float> partial;  // one chunk's result
    Buffer<float> joined;   // the result so far
    std::tuple<FloatScratch, WholeScratch> rooms;

    void reserve(const fs_store& store, int queries, int padded) {
        grow(partial, partial_floats(queries, padded));
        grow(joined, partial_floats(queries, padded));
        if (store.kind == FS_STORE_BYTES) {
            std::get<WholeScratch>(rooms).reserve(queries, store.head_dim);
        } else {
            std::get<FloatScratch>(rooms).reserve(queries, store.head_dim);
        }
    }
};

inline void write_results(const AttentionLayer& a, const AttentionUnit& u, const Partial& result) {
    const int per_group = a.q_heads / a.store->kv_heads, d = a.store->head_dim;
    for (int i = u.node_begin; i < u.node_end; ++i) {
        for (int g = 0; g < per_group; ++g) {
            const int t = (i - u.node_begin) * per_group + g;
            const F scale = set1(1.0f / result.mass[t]);
            const float* sums = result.sums + t * result.padded;
            float* out = a.out + static_cast<size_t>(i) * a.q_stride + static_cast<size_t>((u.head * per_group + g) * d);
            for (int c = 0; c < d; c += 16) store_part(out + c, mul(load(sums + c), scale), d - c);
        }
    }
}

template <class View>
void attend_unit_as(const AttentionLayer& a, int unit, int end, AttentionScratch& scratch) {
    AttentionPlan& plan = *a.plan;
    const AttentionUnit& u = plan.units[static_cast<size_t>(unit)];
    const View head(a, u);
    auto& room = std::get<typename View::Scratch>(scratch.rooms);
    const int queries = (u.node_end - u.node_begin) * (a.q_heads / a.store->kv_heads);
    const int padded = plan.padded;
    if (unit + 1 < end) {
        const AttentionUnit& next = plan.units[static_cast<size_t>(unit) + 1];
        prefetch_unit(a, View(a, next), next);
    }
    const typename View::Queries prepared(a, head, u);
    if (u.group < 0) {
        const Partial joined(scratch.joined.data(), queries, padded), next(scratch.partial.data(), queries, padded);
        attend_chunk(a, head, u, u.chunk_begin, prepared, room, joined);
        for (int chunk = u.chunk_begin + 1; chunk < u.chunk_end; ++chunk) {
            attend_chunk(a, head, u, chunk, prepared, room, next);
            join_partial(joined, next, queries, View::power);
        }
        write_results(a, u, joined);
        return;
    }
    const auto index = static_cast<size_t>(u.group);
    const AttentionGroup& group = plan.groups[index];
    const auto part = [&](int chunk) {
        return Partial(plan.partial.data() + group.partial + static_cast<size_t>(chunk - group.chunk_begin) * partial_floats(queries, padded), queries, padded);
    };
    attend_chunk(a, head, u, u.chunk_begin, prepared, room, part(u.chunk_begin));
    // Whoever finishes a group's last chunk joins them all, in ascending order.
    if (plan.finished[index].fetch_add(1, std::memory_order_acq_rel) != group.chunk_end - group.chunk_begin - 1) return;
    plan.finished[index].store(0, std::memory_order_relaxed);  // ready for the next layer
    for (int chunk = group.chunk_begin + 1; chunk < group.chunk_end; ++chunk) join_partial(part(group.chunk_begin), part(chunk), queries, View::power);
    write_results(a, u, part(group.chunk_begin));
}

// Units [begin, end) of the plan.
inline void attend_units(const AttentionLayer& a, int begin, int end, AttentionScratch& scratch) {
    for (int unit = begin; unit < end; ++unit) {
        switch (a.store->kind) {
            case FS_STORE_BYTES: attend_unit_as<ByteView>(a, unit, end, scratch); break;
            case FS_STORE_BF16: attend_unit_as<HeadView<uint16_t>>(a, unit, end, scratch); break;
            default: attend_unit_as<HeadView<float>>(a, unit, end, scratch);
        }
    }
}

}  // namespace fs::FS_ISA
