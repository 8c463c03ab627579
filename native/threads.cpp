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

struct Work {
    void (*work)(void *, int64_t);
    void *data;
    std::atomic<int64_t> next{0};

    static void enter(void *self) {
        Work &w = *static_cast<Work *>(self);
        w.work(w.data, w.next.fetch_add(1, std::memory_order_relaxed));
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
    Work shared{work, data};
    if (Parallel run = pool()) return run(Work::enter, &shared, unsigned(threads), 0);
    std::vector<std::thread> others;
    for (int64_t i = 1; i < threads; ++i) others.emplace_back(Work::enter, &shared);
    Work::enter(&shared);
    for (std::thread &other : others) other.join();
}

}  // namespace regard
