#include "team.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <new>
#include <sched.h>
#include <unistd.h>

namespace fs {
namespace {

// A worker without work spins this long before it sleeps: longer than the gap between two steps of a busy engine,
// short enough to leave the core to others when the engine is idle.
constexpr auto kIdleSpin = std::chrono::microseconds(80);
// Pauses before a thread that waits for the others starts to yield its core (about 50 microseconds).
constexpr int kPausesBeforeYield = 1000;
// Bytes a waiting thread asks for ahead of the next phase: what memory delivers in the time of a barrier.
constexpr size_t kLookAhead = size_t{16} << 10;

inline void pause_core() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

struct Start {
    Team* team;
    int thread;
};

inline uint64_t tagged(uint32_t run, uint32_t value) { return (uint64_t{run} << 32) | value; }
inline uint32_t tag(uint64_t word) { return static_cast<uint32_t>(word >> 32); }
inline uint32_t value(uint64_t word) { return static_cast<uint32_t>(word); }

}  // namespace

Team::Team(int threads) : threads_(std::max(1, threads)), slots_(kMaxPhases), claims_(static_cast<size_t>(kMaxPhases * threads_)) { start_workers(); }

Team::~Team() {
    stop_.store(true);
    if (pid_ != getpid()) return;  // a forked child has no workers to join
    {
        std::lock_guard<std::mutex> lock(mutex_);
        wake_.notify_all();
    }
    for (pthread_t worker : workers_) pthread_join(worker, nullptr);
}

void Team::start_workers() {
    pid_ = getpid();
    workers_.clear();
    // Signals belong to the caller's threads (Python handles them there), so workers block them all.
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    for (int thread = 1; thread < threads_; ++thread) {
        pthread_t handle;
        auto* start = new Start{this, thread};
        if (pthread_create(&handle, nullptr, &Team::entry, start) != 0) {
            delete start;  // fewer workers is slower, not wrong
            break;
        }
        workers_.push_back(handle);
    }
    pthread_sigmask(SIG_SETMASK, &old, nullptr);
}

void* Team::entry(void* arg) {
    Start start = *static_cast<Start*>(arg);
    delete static_cast<Start*>(arg);
    start.team->worker(start.thread);
    return nullptr;
}

void Team::worker(int thread) {
    uint32_t last = 0;
    for (;;) {
        const auto deadline = std::chrono::steady_clock::now() + kIdleSpin;
        int round = 0;
        while (open_.load(std::memory_order_acquire) == last && !stop_.load(std::memory_order_relaxed)) {
            pause_core();
            if ((++round & 63) == 0 && std::chrono::steady_clock::now() > deadline) {
                std::unique_lock<std::mutex> lock(mutex_);
                sleepers_.fetch_add(1);
                wake_.wait(lock, [&] { return open_.load() != last || stop_.load(); });
                sleepers_.fetch_sub(1);
                break;
            }
        }
        if (stop_.load()) return;
        last = open_.load(std::memory_order_acquire);
        work(last, job_.load(std::memory_order_acquire), count_.load(std::memory_order_acquire), thread, nullptr);
    }
}

bool Team::claim(int phase, int share, uint32_t run, int* begin, int* end) {
    std::atomic<uint64_t>& claimed = claims_[static_cast<size_t>(phase * threads_ + share)].next;
    const Slot& slot = slots_[static_cast<size_t>(phase)];
    uint64_t word = claimed.load(std::memory_order_acquire);
    for (;;) {
        if (tag(word) != run) return false;
        const int units = slot.units.load(std::memory_order_relaxed);
        const int next = static_cast<int>(value(word));
        const int left = share_begin(units, share + 1) - next;
        if (left <= 0) return false;
        // Half of what is left at a time: large ranges first, small ones at the end, so that threads finish together.
        int take = std::max(left / 2, slot.min_grain.load(std::memory_order_relaxed));
        take = std::min({take, slot.max_grain.load(std::memory_order_relaxed), left});
        if (claimed.compare_exchange_weak(word, tagged(run, static_cast<uint32_t>(next + take)), std::memory_order_acq_rel)) {
            *begin = next;
            *end = next + take;
            return true;
        }
    }
}

bool Team::claim_any(int phase, uint32_t run, int thread, int* begin, int* end) {
    for (int i = 0; i < threads_; ++i) {
        if (claim(phase, (thread + i) % threads_, run, begin, end)) return true;
    }
    return false;
}

// Prefetches never fault, so this is harmless even for a thread left over from an earlier run.
void Team::look_ahead(int phase, int count, int thread) const {
    do {
        if (++phase >= count) return;
    } while (slots_[static_cast<size_t>(phase)].unit_bytes.load(std::memory_order_relaxed) == 0);
    const Slot& slot = slots_[static_cast<size_t>(phase)];
    const size_t unit_bytes = slot.unit_bytes.load(std::memory_order_relaxed);
    const int units = slot.units.load(std::memory_order_relaxed);
    const auto begin = static_cast<size_t>(share_begin(units, thread)), end = static_cast<size_t>(share_begin(units, thread + 1));
    const size_t bytes = std::min(kLookAhead, (end - begin) * unit_bytes);
    for (const auto& data : slot.data) {
        const uint8_t* start = data.load(std::memory_order_relaxed);
        if (start == nullptr) continue;
        for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(start + begin * unit_bytes + i, 0, 2);
    }
}

void Team::work(uint32_t run, void* job, int count, int thread, double* seconds) {
    using Clock = std::chrono::steady_clock;
    for (int p = 0; p < count; ++p) {
        const auto begun = seconds != nullptr ? Clock::now() : Clock::time_point{};
        Slot& slot = slots_[static_cast<size_t>(p)];
        int begin, end;
        while (claim_any(p, run, thread, &begin, &end)) {
            slot.fn.load(std::memory_order_relaxed)(job, p, begin, end, thread);
            slot.done.fetch_add(static_cast<uint64_t>(end - begin), std::memory_order_acq_rel);
        }
        look_ahead(p, count, thread);
        for (int spins = 0;; ++spins) {
            const uint64_t word = slot.done.load(std::memory_order_acquire);
            if (tag(word) != run) return;
            if (value(word) == static_cast<uint32_t>(slot.units.load(std::memory_order_relaxed))) break;
            if (spins < kPausesBeforeYield) {
                pause_core();
            } else {
                sched_yield();
            }
        }
        if (seconds != nullptr) seconds[p] = std::chrono::duration<double>(Clock::now() - begun).count();
    }
}

bool Team::run(void* job, const Phase* phases, int count, double* seconds) {
    if (count > kMaxPhases) return false;
    if (pid_ != getpid()) {  // forked: the workers stayed in the parent, locks may be in any state
        new (&mutex_) std::mutex;
        new (&callers_) std::mutex;
        new (&wake_) std::condition_variable;
        sleepers_.store(0);
        start_workers();
    }
    std::lock_guard<std::mutex> one(callers_);
    uint32_t run = open_.load() + 1;
    if (run == 0) run = 1;
    for (int p = 0; p < count; ++p) {
        Slot& slot = slots_[static_cast<size_t>(p)];
        // The tags go first: once they are foreign, a leftover thread can neither claim nor count here.
        for (int share = 0; share < threads_; ++share) {
            const auto first = static_cast<uint32_t>(share_begin(phases[p].units, share));
            claims_[static_cast<size_t>(p * threads_ + share)].next.store(tagged(run, first), std::memory_order_release);
        }
        slot.done.store(tagged(run, 0), std::memory_order_release);
        slot.units.store(phases[p].units, std::memory_order_release);
        slot.fn.store(phases[p].run, std::memory_order_relaxed);
        slot.min_grain.store(std::max(1, phases[p].min_grain), std::memory_order_relaxed);
        slot.max_grain.store(std::max(1, phases[p].max_grain), std::memory_order_relaxed);
        for (int i = 0; i < 2; ++i) slot.data[i].store(phases[p].data[i], std::memory_order_relaxed);
        slot.unit_bytes.store(phases[p].unit_bytes, std::memory_order_relaxed);
    }
    job_.store(job, std::memory_order_release);
    count_.store(count, std::memory_order_release);
    open_.store(run);
    if (sleepers_.load() > 0) {
        std::lock_guard<std::mutex> lock(mutex_);
        wake_.notify_all();
    }
    work(run, job, count, 0, seconds);
    return true;
}

}  // namespace fs
