// The chunks of heads that are too few for the threads, as chains: each thread takes some chunks that follow each
// other.
//
//     thread 0   sums 0-3    scan 0-3    rows 0-3                 sums 8-11 ...
//     thread 1   sums 4-7    (wait)      scan 4-7    rows 4-7     sums 12-15 ...
//
// Sums and rows need no other thread, and the scan waits for the chunks before. So what a thread makes of a chunk stays
// in its cache, and nobody waits for the slowest of all threads, as after a pass over many chunks: on a machine that
// others use as well, Delta took 2.8 ms by this and 4.6 by passes, and Elu1 1.6 and 1.9 (16,384 tokens, one head of 64
// dims, two threads of Zen 5); on an idle one 0.98 and 1.0 of the time.
#pragma once

#include <atomic>
#include <cstddef>
#include <thread>
#include <vector>

#include "linear_division.h"

namespace regard {

// Chunks of a thread at once: 4 where all threads have enough of them. (2 to 8: 0.98 to 1.02 of the time.)
inline int64_t links_of(const regard_linear &c) {
    const int64_t each = c.batch * c.kv_heads * chunks_of(c) / (4 * threads_of(c));
    return each < 1 ? 1 : each < 4 ? each : 4;
}

struct Chain {
    struct alignas(64) Done {
        std::atomic<int64_t> chunks{0};
    };

    const Kernels &kernels;
    const regard_linear &call;
    const int64_t heads, links, units, threads, step;
    float *const scratch, *const shared;
    std::vector<Done> done;  // of each head, the chunks whose state is known
    std::atomic<int64_t> next{0};
    std::atomic<bool> spoilt{false};

    Chain(const Kernels &its_kernels, const regard_linear &c)
        : kernels(its_kernels),
          call(c),
          heads(c.batch * c.kv_heads),
          links(links_of(c)),
          units(heads * ((chunks_of(c) + links - 1) / links)),
          threads(threads_of(c)),
          step(kernels.linear_state(c)),
          scratch(static_cast<float *>(c.workspace)),
          shared(scratch + threads * kernels.linear_scratch(c)),
          done(std::size_t(heads)) {}

    static void work(void *self, int64_t thread) {
        Chain &chain = *static_cast<Chain *>(self);
        for (int64_t unit; (unit = chain.next.fetch_add(1, std::memory_order_relaxed)) < chain.units;)
            chain.compute(unit, thread);
    }

    void compute(int64_t unit, int64_t thread) {
        float *const mine = scratch + thread * kernels.linear_scratch(call);
        float *const place = shared + thread * links * step;
        const int64_t head = unit % heads, first = unit / heads * links, left = chunks_of(call) - first;
        const int64_t count = left < links ? left : links, later = links * (threads / heads ? threads / heads : 1);
        for (int64_t i = 0; i < count; ++i)
            if (!kernels.linear(call, LinearPass::sums, head, first + i, later, place + i * step, mine)) spoilt = true;
        std::atomic<int64_t> &chunks = done[std::size_t(head)].chunks;
        for (int64_t spins = 0; chunks.load(std::memory_order_acquire) < first; ++spins)
            if (spins > 1000) std::this_thread::yield();
        const int64_t scans = scans_of(call);
        if (call.feature == REGARD_FAVOR) kernels.linear(call, LinearPass::raise, head, first, count, place, mine);
        for (int64_t i = 0; i < scans; ++i)
            kernels.linear(call, LinearPass::scan, head * scans + i, first, count, place, mine);
        chunks.store(first + count, std::memory_order_release);
        for (int64_t i = 0; i < count && call.q.data; ++i)
            if (!kernels.linear(call, LinearPass::rows, head, first + i, later, place + i * step, mine)) spoilt = true;
    }
};

}  // namespace regard
