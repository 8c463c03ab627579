// Linear attention on several threads: by heads, or by chunks where heads are too few for the threads.
#include <atomic>
#include <cstddef>
#include <vector>

#include "check.h"
#include "linear_chain.h"
#include "linear_pass.h"
#include "threads.h"

namespace regard {
namespace {

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

    bool compute(int64_t unit, float *mine) const {
        const int64_t step = kernels.linear_state(call);
        if (pass == LinearPass::sums || pass == LinearPass::rows)
            return kernels.linear(call, pass, unit / count, first + unit % count, 0, shared + unit * step, mine);
        const int64_t head = pass == LinearPass::scan ? unit / scans_of(call) : unit;
        return kernels.linear(call, pass, unit, first, count, shared + head * count * step, mine);
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
                if (!p.compute(unit, mine)) p.spoilt = true;
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
    if (is_chained(kernels, c)) {
        Chain chain(kernels, c);
        parallel(threads_of(c), Chain::work, &chain);
        return !chain.spoilt;
    }
    for (int64_t first = 0; first < chunks; first += some) {
        const int64_t count = chunks - first < some ? chunks - first : some;
        if (c.k.data) {
            if (!run(kernels, c, LinearPass::sums, heads * count, first, count)) return false;
            if (c.feature == REGARD_FAVOR) run(kernels, c, LinearPass::raise, heads, first, count);
            run(kernels, c, LinearPass::scan, heads * scans_of(c), first, count);
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
    const int64_t chunks =
        is_chained(*kernels, c) ? threads_of(c) * links_of(c) : c.batch * c.kv_heads * parted(*kernels, c);
    const int64_t states = chunks * kernels->linear_state(c);
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
