// A persistent team of threads that walks a list of phases together.
//
// Knows threads and counters; refuses to know what a phase computes. A phase is a number of independent units. Each thread
// claims units of its own share first and then helps with the others'; a phase ends when all its units are *done*, not when
// all threads arrived. So a thread that wakes late, or that the system put aside between two units, holds nobody up.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <pthread.h>
#include <vector>

namespace fs {

// Runs units [begin, end) of phase `phase` on thread `thread` (0 = the caller of run()).
using PhaseFn = void (*)(void* job, int phase, int begin, int end, int thread);

struct Phase {
    PhaseFn run;
    int units;
    int min_grain;  // at least this many units are claimed at a time (the last claim may be smaller)
    int max_grain;  // and at most this many
    // Memory that the units read in order, unit u at [data[i] + u * unit_bytes, + unit_bytes): a thread that waits for the phase before
    // asks for the start of its share. Null: nothing worth asking for.
    const uint8_t* data[2] = {nullptr, nullptr};
    size_t unit_bytes = 0;
};

class Team {
  public:
    static constexpr int kMaxPhases = 4096;

    explicit Team(int threads);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int threads() const { return threads_; }

    // Runs the phases in order; phase p + 1 starts after every unit of phase p is done. One call at a time (others wait).
    // Returns false when there are more than kMaxPhases phases. With `seconds`, the caller's time in each phase is written there.
    bool run(void* job, const Phase* phases, int count, double* seconds = nullptr);

  private:
    // Claims and counts carry the number of the run in their high half, so a thread left over from an earlier run finds a
    // foreign number and leaves without having touched anything.
    struct alignas(64) Claim {
        std::atomic<uint64_t> next{0};
    };
    struct alignas(64) Slot {
        std::atomic<uint64_t> done{0};
        std::atomic<PhaseFn> fn{nullptr};
        std::atomic<int32_t> units{0};
        std::atomic<int32_t> min_grain{1};
        std::atomic<int32_t> max_grain{1};
        std::atomic<const uint8_t*> data[2] = {nullptr, nullptr};
        std::atomic<size_t> unit_bytes{0};
    };

    static void* entry(void* arg);
    void start_workers();
    void worker(int thread);
    void work(uint32_t run, void* job, int count, int thread, double* seconds);
    bool claim(int phase, int share, uint32_t run, int* begin, int* end);
    bool claim_any(int phase, uint32_t run, int thread, int* begin, int* end);
    void look_ahead(int phase, int count, int thread) const;
    int share_begin(int units, int share) const { return static_cast<int>(static_cast<int64_t>(units) * share / threads_); }

    int threads_;
    int pid_ = 0;
    std::vector<Slot> slots_;
    std::vector<Claim> claims_;  // [phase][thread's share]
    std::vector<pthread_t> workers_;
    alignas(64) std::atomic<uint32_t> open_{0};  // number of the run that is open
    std::atomic<void*> job_{nullptr};
    std::atomic<int> count_{0};
    alignas(64) std::atomic<int> sleepers_{0};
    std::atomic<bool> stop_{false};
    std::mutex mutex_;  // guards sleeping only
    std::condition_variable wake_;
    std::mutex callers_;  // one run at a time
};

}  // namespace fs
