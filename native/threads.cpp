// See threads.h.
#include "threads.h"

#if !defined(_WIN32)
#include <dlfcn.h>
#endif

#include <atomic>
#include <thread>
#include <vector>

namespace regard {
namespace {

using Parallel = void (*)(void (*)(void *), void *, unsigned, unsigned);

// Numbers of the threads that work, a bit for each.
constexpr int64_t NUMBERED = 64;

struct Work {
    void (*work)(void *, int64_t);
    void *data;
    int64_t threads;
    std::atomic<int64_t> next{0};
    std::atomic<uint64_t> taken{0};

    static void enter(void *self) {
        Work &w = *static_cast<Work *>(self);
        w.work(w.data, w.threads <= NUMBERED ? w.number() : w.next.fetch_add(1, std::memory_order_relaxed));
    }

    // The number that the thread had last if no other has it, so that its memory is in the cache of its core.
    int64_t number() {
        static thread_local int64_t last = 0;
        for (int64_t n = last < threads ? last : 0;; n = n + 1 < threads ? n + 1 : 0)
            if (!(taken.fetch_or(uint64_t(1) << n, std::memory_order_relaxed) >> n & 1)) return last = n;
    }
};

// torch's OpenMP, whichever library that is: GCC's and LLVM's both have this function. On Windows (untested), torch's
// has not, and each call starts its own threads.
Parallel pool() {
#if defined(_WIN32)
    return nullptr;
#else
    static const Parallel found = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    return found;
#endif
}

}  // namespace

void parallel(int64_t threads, void (*work)(void *, int64_t), void *data) {
    if (threads <= 1) return work(data, 0);
    Work shared{work, data, threads};
    if (Parallel run = pool()) return run(Work::enter, &shared, unsigned(threads), 0);
    std::vector<std::thread> others;
    for (int64_t i = 1; i < threads; ++i) others.emplace_back(Work::enter, &shared);
    Work::enter(&shared);
    for (std::thread &other : others) other.join();
}

}  // namespace regard
