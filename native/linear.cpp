// Linear attention on several threads: by heads, or by chunks where heads are too few for the threads.
#include <atomic>
#include <cstddef>
#include <vector>

#include "caches.h"
#include "check.h"
#include "kernels.h"
#include "linear_pass.h"
#include "threads.h"

namespace regard {
namespace {

// Multiply-adds that take about 20 us on one core, as in abi.cpp.
constexpr double TINY = 1 << 21;

// Chunks of a head that are parted at once, at least: or entering three parallel regions takes longer than what is
// computed.
constexpr int64_t LEAST = 16;

int64_t chunks_of(const regard_linear &c) { return (c.tokens + c.chunk - 1) / c.chunk; }

int64_t threads_of(const regard_linear &c) {
    const double rows = double(c.batch) * double(c.heads + c.kv_heads) * double(c.tokens);
    const double each = double(c.features) * double(c.v_dim) + double(c.chunk) / 2 * double(c.features + c.v_dim);
    return c.threads < 1 || rows * each < TINY ? 1 : c.threads;
}

// Chunks of each head that are parted at once; 0: heads are not parted.
int64_t parted(const Kernels &kernels, const regard_linear &c) {
    const int64_t threads = threads_of(c), heads = c.batch * c.kv_heads, chunks = chunks_of(c);
    const int64_t state = kernels.linear_state(c);
    if (threads == 1 || !state || chunks < 2 || heads % threads == 0 || heads >= 8 * threads) return 0;
    // their states take half of the second level cache of each thread, in floats
    const int64_t fit = caches().second / 8 * threads / (heads * state), many = fit > LEAST ? fit : LEAST;
    if (many >= chunks) return chunks;
    // blocks of one length, but for the last, with as many chunks for each thread
    const int64_t count = (chunks + many - 1) / many, each = (chunks + count - 1) / count;
    const int64_t even = (each + threads - 1) / threads * threads;
    return even < chunks ? even : chunks;
}

struct Pass {
    struct alignas(64) Share {
        std::atomic<int64_t> next{0};
        int64_t end = 0;
    };

    const Kernels &kernels;
    const regard_linear &call;
    const LinearPass pass;
    const int64_t first, count, threads;
    float *const scratch, *const shared;
    std::vector<Share> shares;
    std::atomic<bool> spoilt{false};

    Pass(const Kernels &its_kernels, const regard_linear &c, LinearPass its_pass, int64_t units, int64_t first_chunk,
         int64_t chunks)
        : kernels(its_kernels),
          call(c),
          pass(its_pass),
          first(first_chunk),
          count(chunks),
          threads(threads_of(c) < units ? threads_of(c) : units),
          scratch(static_cast<float *>(c.workspace)),
          shared(scratch + threads_of(c) * kernels.linear_scratch(c)),
          shares(std::size_t(threads)) {
        for (int64_t i = 0; i < threads; ++i)
            share(i).next = i * units / threads, share(i).end = (i + 1) * units / threads;
    }

    Share &share(int64_t i) { return shares[std::size_t(i % threads)]; }

    // A thread begins with units of its own: what it has made of a chunk is in its cache when it computes the rows.
    // Then it takes what others have left. (A pool may have fewer threads than were asked for.)
    static void work(void *self, int64_t thread) {
        Pass &p = *static_cast<Pass *>(self);
        float *mine = p.scratch + thread * p.kernels.linear_scratch(p.call);
        for (int64_t i = 0; i < p.threads; ++i) {
            Share &some = p.share(thread + i);
            for (int64_t unit; (unit = some.next.fetch_add(1, std::memory_order_relaxed)) < some.end;)
                if (!p.kernels.linear(p.call, p.pass, unit, p.first, p.count, p.shared, mine)) p.spoilt = true;
        }
    }
};

bool run(const Kernels &kernels, const regard_linear &c, LinearPass pass, int64_t units, int64_t first, int64_t count) {
    Pass work(kernels, c, pass, units, first, count);
    parallel(work.threads, Pass::work, &work);
    return !work.spoilt;
}

bool run(const Kernels &kernels, const regard_linear &c) {
    const int64_t heads = c.batch * c.kv_heads, chunks = chunks_of(c), some = parted(kernels, c);
    if (!some) return run(kernels, c, LinearPass::heads, heads, 0, chunks);
    for (int64_t first = 0; first < chunks; first += some) {
        const int64_t count = chunks - first < some ? chunks - first : some;
        const int64_t scans = c.beta.data ? (c.v_dim + COLUMNS - 1) / COLUMNS : (c.features + SCANNED - 1) / SCANNED;
        if (c.k.data) {
            if (!run(kernels, c, LinearPass::sums, heads * count, first, count)) return false;
            if (c.feature == REGARD_FAVOR) run(kernels, c, LinearPass::raise, heads, first, count);
            run(kernels, c, LinearPass::scan, heads * scans, first, count);
        }
        if (c.q.data && !run(kernels, c, LinearPass::rows, heads * count, first, count)) return false;
    }
    return true;
}

}  // namespace

int64_t linear_workspace(const regard_linear &c) {
    if (regard_status wrong = check(c)) return wrong;
    const Kernels *kernels = kernels_of(c.isa);
    if (!kernels) return REGARD_BAD_ISA;
    const int64_t states = c.batch * c.kv_heads * parted(*kernels, c) * kernels->linear_state(c);
    return 4 * (threads_of(c) * kernels->linear_scratch(c) + states);
}

}  // namespace regard

int64_t regard_attend_linear(regard_linear *linear) {
    if (!linear) return REGARD_BAD_POINTER;
    const int64_t needed = regard::linear_workspace(*linear);
    if (needed < 0) return needed;
    if (linear->workspace_bytes < needed || reinterpret_cast<uintptr_t>(linear->workspace) % 64)
        return REGARD_BAD_WORKSPACE;
    if (!linear->workspace) return REGARD_BAD_POINTER;
    if (!linear->batch || !linear->kv_heads || !linear->tokens) return REGARD_DONE;
    linear->spoilt = !regard::run(*regard::kernels_of(linear->isa), *linear);
    return REGARD_DONE;
}
