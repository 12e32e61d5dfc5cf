// What this machine can do at most, for benchmarks: bytes streamed from memory and multiply-adds per second, by the whole team.
#pragma once

#include <chrono>

#include "lanes.h"
#include "team.h"

namespace fs::FS_ISA {

struct LimitJob {
    const uint8_t* data;
    size_t bytes;
    int parts;
    int rounds;
    float sink[256];  // keeps the compiler from dropping the work
};

inline double timed(Team& team, LimitJob& job, PhaseFn run) {
    const Phase phase{run, job.parts, 1, 1};
    const auto begun = std::chrono::steady_clock::now();
    team.run(&job, &phase, 1);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}

// Bytes per second when each byte is read once.
inline double limit_stream(Team& team, const uint8_t* data, size_t bytes) {
    LimitJob job{data, bytes / 4096 * 4096, 64, 0, {}};
    const double seconds = timed(team, job, [](void* p, int, int begin, int end, int thread) {
        auto& j = *static_cast<LimitJob*>(p);
        const size_t first = j.bytes / 4096 * static_cast<size_t>(begin) / static_cast<size_t>(j.parts) * 4096;
        const size_t last = j.bytes / 4096 * static_cast<size_t>(end) / static_cast<size_t>(j.parts) * 4096;
        F sum[4] = {zero(), zero(), zero(), zero()};
        for (size_t i = first; i < last; i += 256) {
#pragma GCC unroll 4
            for (size_t k = 0; k < 4; ++k) {
                prefetch(j.data + i + 64 * k + 4096);
                sum[k] = max(sum[k], load(reinterpret_cast<const float*>(j.data + i + 64 * k)));
            }
        }
        j.sink[thread & 255] = reduce_max(max(max(sum[0], sum[1]), max(sum[2], sum[3])));
    });
    return static_cast<double>(job.bytes) / seconds;
}

// int8 multiply-adds per second of the vector dot product, operands in registers.
inline double limit_dot(Team& team, int rounds) {
    LimitJob job{nullptr, 0, 4 * team.threads(), rounds, {}};
    const double seconds = timed(team, job, [](void* p, int, int begin, int end, int thread) {
        auto& j = *static_cast<LimitJob*>(p);
        alignas(64) uint8_t bytes[64];
        alignas(64) int8_t rows[8 * 64];
        for (int i = 0; i < 64; ++i) bytes[i] = static_cast<uint8_t>(i + thread);
        for (int i = 0; i < 512; ++i) rows[i] = static_cast<int8_t>(i % 127);
        const Line w = load_line(bytes);
        I s[8] = {set1(0), set1(1), set1(2), set1(3), set1(4), set1(5), set1(6), set1(7)};
        for (int unit = begin; unit < end; ++unit) {
            for (int i = 0; i < j.rounds; ++i) {
#pragma GCC unroll 8
                for (int k = 0; k < 8; ++k) {
#pragma GCC unroll 8
                    for (int r = 0; r < 8; ++r) s[r] = dot4(s[r], w, rows + 64 * r + 4 * k);
                }
            }
        }
        I sum = set1(0);
        for (const I& x : s) sum = add(sum, x);
        j.sink[thread & 255] = static_cast<float>(reduce_max(sum));
    });
    return 8.0 * 16 * 32 * job.parts * rounds / seconds;
}

// float32 multiply-adds per second, operands in registers.
inline double limit_fma(Team& team, int rounds) {
    LimitJob job{nullptr, 0, 4 * team.threads(), rounds, {}};
    const double seconds = timed(team, job, [](void* p, int, int begin, int end, int thread) {
        auto& j = *static_cast<LimitJob*>(p);
        F a[12];
        for (int i = 0; i < 12; ++i) a[i] = set1(static_cast<float>(i));
        const F b = set1(0.5f + static_cast<float>(thread));
        for (int unit = begin; unit < end; ++unit) {
            for (int i = 0; i < j.rounds; ++i) {
#pragma GCC unroll 12
                for (int k = 0; k < 12; ++k) a[k] = fma(a[k], b, b);
            }
        }
        F sum = zero();
        for (const F& x : a) sum = add(sum, x);
        j.sink[thread & 255] = reduce_add(sum);
    });
    return 12.0 * 16 * job.parts * rounds / seconds;
}

}  // namespace fs::FS_ISA
