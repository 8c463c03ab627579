// The C interface: checks, then units of work on several threads, until all are done or the time is up.
#include "abi.h"

#include <atomic>
#include <chrono>
#include <cstring>

#include "check.h"
#include "detect.h"
#include "kernels.h"
#include "threads.h"

namespace regard {
namespace {

// Multiply-adds that take about 20 us on one core, below which waking another costs more than it gains.
constexpr double TINY = 1 << 21;

struct Named {
    const char *name;
    const Kernels *kernels;
};

constexpr Named built[] = {
    {"portable", &portable},
#if defined(__x86_64__)
    {"avx2", &avx2},
    {"avx512", &avx512},
    {"avx512bf16", &avx512bf16},
#elif defined(__aarch64__)
    {"neon", &neon},
#endif
};

using Clock = std::chrono::steady_clock;

// One half of a pass: threads take unit after unit. A unit that was taken is finished, so what is done is always the
// first units, in whatever order.
struct Half {
    const Kernels &kernels;
    const regard_call &call;
    const regard_gradient *gradient;
    const int half;
    const int64_t units;
    const Clock::time_point until;
    char *const shared, *const scratch;
    const int64_t scratch_bytes;
    std::atomic<int64_t> next;
    std::atomic<int64_t> status{REGARD_DONE};

    static void work(void *self, int64_t thread) {
        Half &h = *static_cast<Half *>(self);
        char *mine = h.scratch + thread * h.scratch_bytes;
        do {
            const int64_t unit = h.next.fetch_add(1, std::memory_order_relaxed);
            if (unit >= h.units) return;
            const regard_status found = h.gradient ? h.kernels.backward(*h.gradient, h.half, unit, h.shared, mine)
                                                   : h.kernels.forward(h.call, h.half, unit, h.shared, mine);
            if (found != REGARD_DONE) h.status.store(found, std::memory_order_relaxed);
        } while (h.status.load(std::memory_order_relaxed) == REGARD_DONE && h.in_time());
    }

    bool in_time() const { return call.seconds == 0 || Clock::now() < until; }
};

int64_t units_of(const Kernels &kernels, const regard_call &call, const regard_gradient *gradient, int half) {
    return gradient ? kernels.backward_units(*gradient, half) : kernels.forward_units(call, half);
}

bool is_tiny(const regard_call &c, const regard_gradient *gradient) {
    const double pairs = double(c.batch) * double(c.heads) * double(c.queries) * double(c.keys);
    return pairs * double(c.qk_dim + c.v_dim) * (gradient ? 3 : 1) < TINY;
}

// Whether there is a row, or in the gradient's pass a key, to write.
bool is_empty(const regard_call &c, const regard_gradient *gradient) {
    const bool rows = c.batch && c.heads && c.queries, keys = gradient && c.batch && c.kv_heads && c.keys;
    return !rows && !keys;
}

int64_t threads_of(const Kernels &kernels, const regard_call &c, const regard_gradient *gradient) {
    if (c.threads == 1 || is_tiny(c, gradient)) return 1;
    const int64_t first = units_of(kernels, c, gradient, 0), second = units_of(kernels, c, gradient, 1);
    const int64_t most = first > second ? first : second;
    return most < 1 ? 1 : c.threads < most ? c.threads : most;
}

// Bytes, or a status below 0. The call was checked.
int64_t workspace(const Kernels &kernels, const regard_call &c, const regard_gradient *gradient) {
    if (is_empty(c, gradient)) return 0;
    int64_t bytes = 0;
    if (__builtin_mul_overflow(threads_of(kernels, c, gradient), kernels.scratch(c, gradient), &bytes))
        return REGARD_BAD_SIZE;
    if (__builtin_add_overflow(bytes, kernels.shared(c, gradient), &bytes)) return REGARD_BAD_SIZE;
    return bytes;
}

regard_status run(regard_call &call, const regard_gradient *gradient) {
    const Kernels *kernels = kernels_of(call.isa);
    if (!kernels) return REGARD_BAD_ISA;
    if (is_empty(call, gradient)) return REGARD_DONE;
    const int64_t needed = workspace(*kernels, call, gradient);
    if (needed < 0) return regard_status(needed);
    if (call.workspace_bytes < needed || reinterpret_cast<uintptr_t>(call.workspace) % 64) return REGARD_BAD_WORKSPACE;
    if (needed && !call.workspace) return REGARD_BAD_POINTER;
    char *const memory = static_cast<char *>(call.workspace);
    const int64_t threads = threads_of(*kernels, call, gradient), bytes = kernels->scratch(call, gradient);
    const auto until =
        Clock::now() + std::chrono::microseconds(int64_t(call.seconds < 1e9 ? call.seconds * 1e6 : 1e15));
    int64_t before = 0;
    for (int i = 0; i < 2; ++i) {
        const int64_t units = units_of(*kernels, call, gradient, i);
        if (call.next < before + units) {
            Half half{*kernels, call,
                      gradient, i,
                      units,    until,
                      memory,   memory + kernels->shared(call, gradient),
                      bytes,    {call.next - before}};
            const int64_t left = units - half.next;
            parallel(left < threads ? left : threads, Half::work, &half);
            if (half.status != REGARD_DONE) return regard_status(half.status.load());
            call.next = before + (half.next < units ? half.next.load() : units);
            if (half.next < units) return REGARD_MORE;
        }
        before += units;
    }
    return REGARD_DONE;
}

}  // namespace

const Kernels *kernels_of(int64_t isa) {
    if (isa == -1) return &plain;
    const char *const *names = isas();
    for (int64_t i = 0; names[i]; ++i)
        if (i == isa)
            for (const Named &one : built)
                if (!std::strcmp(one.name, names[i])) return one.kernels;
    return nullptr;
}

}  // namespace regard

int regard_abi_version() { return REGARD_ABI_VERSION; }

const char *const *regard_isas() { return regard::isas(); }

const char *regard_isa() {
    const char *const *isa = regard_isas();
    while (isa[1]) ++isa;
    return *isa;
}

int64_t regard_workspace(const regard_call *call) {
    if (!call) return REGARD_BAD_POINTER;
    const bool backward = call->bytes == sizeof(regard_gradient);
    const auto *gradient = backward ? reinterpret_cast<const regard_gradient *>(call) : nullptr;
    if (regard_status wrong = gradient ? regard::check(*gradient) : regard::check(*call)) return wrong;
    const regard::Kernels *kernels = regard::kernels_of(call->isa);
    return kernels ? regard::workspace(*kernels, *call, gradient) : REGARD_BAD_ISA;
}

int64_t regard_forward(regard_call *call) {
    if (!call) return REGARD_BAD_POINTER;
    if (regard_status wrong = regard::check(*call)) return wrong;
    return regard::run(*call, nullptr);
}

int64_t regard_backward(regard_gradient *gradient) {
    if (!gradient) return REGARD_BAD_POINTER;
    if (regard_status wrong = regard::check(*gradient)) return wrong;
    return regard::run(gradient->call, gradient);
}
