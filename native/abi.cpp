// The C interface: checks, then units of work on several threads, until all are done or the time is up.
#include "abi.h"

#include <atomic>
#include <chrono>
#include <cstring>

#include "check.h"
#include "detect.h"
#include "kernels.h"
#include "linear_pass.h"
#include "listing.h"
#include "threads.h"

namespace regard {
namespace {

// Multiply-adds that take about 20 us on one core, below which waking another costs more than it gains. Where up to 4
// rows share a key head, keys are loaded and transposed for few products: 8 to 12 multiply-adds a nanosecond on Zen 4,
// against 100 of a prompt.
constexpr double TINY = 1 << 21, TINY_DECODE = 1 << 18;

struct Named {
    const char *name;
    const Kernels *kernels;
};

constexpr Named built[] = {
    {"portable", &portable},
#if REGARD_WITH_AVX2
    {"avx2", &avx2},
#endif
#if REGARD_WITH_AVX512
    {"avx512", &avx512},
#endif
#if REGARD_WITH_AVX512VNNI
    {"avx512vnni", &avx512vnni},
#endif
#if REGARD_WITH_AVX512BF16
    {"avx512bf16", &avx512bf16},
#endif
#if REGARD_WITH_AMX
    {"amx", &amx},
#endif
#if REGARD_WITH_NEON
    {"neon", &neon},
#endif
};

using Clock = std::chrono::steady_clock;

// What a thread's part of the workspace is at: a unit that was left, which goes on there, or none.
struct Slot {
    int64_t unit = -1, done = 0;
    char more[48];  // so that no two share a cache line

    bool is_busy() const { return unit >= 0; }
};

// One half of a pass: threads take unit after unit. The units that were taken are the first ones; what of them was left
// when the time was up waits in the slots.
struct Half {
    const Kernels &kernels;
    const regard_call &call;
    const regard_gradient *gradient;
    const int half;
    const int64_t units;
    const Clock::time_point until;
    char *const shared;
    Slot *const slots;
    const int64_t slot_count;
    char *const scratch;
    const int64_t scratch_bytes;
    std::atomic<int64_t> next;
    std::atomic<int64_t> next_slot{0};
    std::atomic<int64_t> status{REGARD_DONE};

    // A thread takes a slot, and another one when no units are left: fewer threads may come than there are slots.
    static void work(void *self, int64_t) {
        Half &h = *static_cast<Half *>(self);
        for (;;) {
            const int64_t slot = h.next_slot.fetch_add(1, std::memory_order_relaxed);
            if (slot >= h.slot_count) return;
            if (!h.slots[slot].is_busy() && h.next.load(std::memory_order_relaxed) >= h.units) continue;
            h.work_in(h.slots[slot], h.scratch + slot * h.scratch_bytes);
            if (!h.goes_on()) return;
        }
    }

    void work_in(Slot &slot, char *mine) {
        do {
            if (!slot.is_busy()) {
                const int64_t unit = next.fetch_add(1, std::memory_order_relaxed);
                if (unit >= units) return;
                slot.unit = unit, slot.done = 0;
            }
            const regard_status found = compute(slot, mine);
            if (found == REGARD_MORE) return;
            slot.unit = -1;
            if (found != REGARD_DONE) status.store(found, std::memory_order_relaxed);
        } while (goes_on());
    }

    regard_status compute(Slot &slot, char *mine) {
        if (const regard_sweep *sweep = sweep_of(call))
            return kernels.sweep(*sweep, half, slot.unit, slot.done, {is_late, this}, shared, mine);
        if (!gradient) return kernels.forward(call, half, slot.unit, shared, mine);
        return kernels.backward(*gradient, half, slot.unit, slot.done, {is_late, this}, shared, mine);
    }

    static bool is_late(const void *self) {
        const Half &h = *static_cast<const Half *>(self);
        return h.until != Clock::time_point::max() && Clock::now() >= h.until;
    }

    bool goes_on() const { return status.load(std::memory_order_relaxed) == REGARD_DONE && !is_late(this); }
};

int64_t busy(const Slot *slots, int64_t count) {
    int64_t found = 0;
    for (int64_t i = 0; i < count; ++i) found += slots[i].is_busy();
    return found;
}

int64_t units_of(const Kernels &kernels, const regard_call &call, const regard_gradient *gradient, int half) {
    if (const regard_sweep *sweep = sweep_of(call)) return kernels.sweep_units(*sweep, half);
    return gradient ? kernels.backward_units(*gradient, half) : kernels.forward_units(call, half);
}

// Rows that share keys count as a multiple of 16, since products with tiles of queries compute whole vectors of them.
// In a forward pass 5 to 16 rows are computed one by one, and 5 take half as long as 16 (Intel Xeon with AMX).
bool is_tiny(const regard_call &c, const regard_gradient *gradient) {
    const int64_t rows = c.kv_heads ? c.heads / c.kv_heads * c.queries : 0;
    const bool decodes = !gradient && !sweep_of(c) && rows && rows <= 4;
    const double computed = decodes ? double(rows) : 16 * double((rows + 15) / 16);
    const double pairs = double(c.batch) * double(c.kv_heads) * computed * double(c.keys);
    return pairs * double(c.qk_dim + c.v_dim) * (gradient ? 3 : 1) < (decodes ? TINY_DECODE : TINY);
}

// Whether there is a row, or in the gradient's pass and in a sweep a key, to write.
bool is_empty(const regard_call &c, const regard_gradient *gradient) {
    const bool rows = c.batch && c.heads && c.queries;
    const bool keys = (gradient || sweep_of(c)) && c.batch && c.kv_heads && c.keys;
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
    const int64_t of_thread = kernels.scratch(c, gradient) + int64_t(sizeof(Slot));
    if (__builtin_mul_overflow(threads_of(kernels, c, gradient), of_thread, &bytes)) return REGARD_BAD_SIZE;
    if (__builtin_add_overflow(bytes, kernels.shared(c, gradient), &bytes)) return REGARD_BAD_SIZE;
    return bytes + listing_bytes(c);
}

// When to return; never for a call so short that asking for the time would be a tenth of it.
Clock::time_point end_of(const regard_call &c, const regard_gradient *gradient) {
    if (c.seconds == 0 || (c.seconds > 0.01 && is_tiny(c, gradient))) return Clock::time_point::max();
    return Clock::now() + std::chrono::microseconds(int64_t(c.seconds < 1e9 ? c.seconds * 1e6 : 1e15));
}

regard_status run(regard_call &call, const regard_gradient *gradient) {
    const Kernels *kernels = kernels_of(call.isa);
    if (!kernels) return REGARD_BAD_ISA;
    if (is_empty(call, gradient)) return REGARD_DONE;
    const int64_t needed = workspace(*kernels, call, gradient);
    if (needed < 0) return regard_status(needed);
    if (call.workspace_bytes < needed || reinterpret_cast<uintptr_t>(call.workspace) % 64) return REGARD_BAD_WORKSPACE;
    if (needed && !call.workspace) return REGARD_BAD_POINTER;
    const int64_t threads = threads_of(*kernels, call, gradient), bytes = kernels->scratch(call, gradient);
    char *const own = static_cast<char *>(call.workspace) + list_tiles(call, static_cast<char *>(call.workspace));
    Slot *const slots = reinterpret_cast<Slot *>(own);
    char *const memory = own + threads * int64_t(sizeof(Slot));
    if (!call.next)
        for (int64_t i = 0; i < threads; ++i) slots[i] = Slot{};
    const auto until = end_of(call, gradient);
    int64_t before = 0;
    for (int half = 0; half < 2; ++half) {
        const int64_t units = units_of(*kernels, call, gradient, half);
        const int64_t left = call.next < before + units ? before + units - call.next : 0;
        if (const int64_t open = call.next <= before + units ? left + busy(slots, threads) : 0) {
            Half work{*kernels, call,          gradient, half,    units,
                      until,    memory,        slots,    threads, memory + kernels->shared(call, gradient),
                      bytes,    {units - left}};
            parallel(open < threads ? open : threads, Half::work, &work);
            if (work.status != REGARD_DONE) return regard_status(work.status.load());
            const int64_t taken = work.next < units ? work.next.load() : units;
            call.next = before + taken;
            if (taken < units || busy(slots, threads)) return REGARD_MORE;
        }
        before += units;
    }
    return REGARD_DONE;
}

// The call of a form with its operands. Without a place for lse, there is one at the front of the workspace.
struct Whole {
    regard_call call;
    int64_t lse_bytes = 0;

    Whole(const regard_call &form, const regard_operands &o, int64_t next) : call(form) {
        call.q = o.q, call.k = o.k, call.v = o.v, call.out = o.out;
        call.lse = o.lse, call.threads = o.threads, call.queries = o.queries, call.keys = o.keys;
        if (o.interval_count) {
            regard_schedule &s = call.by_query;
            s.intervals = o.intervals, s.interval_count = o.interval_count, s.offset = o.offset;
            s.rows = (o.queries + 63) / 64;
            call.maps_batch = o.maps_batch, call.maps_head = 1;
        }
        call.workspace = o.workspace, call.workspace_bytes = o.workspace_bytes, call.next = next;
    }

    regard_status check() {
        if (call.lse) return regard::check(call);
        call.lse = this;  // until there is a workspace
        const regard_status wrong = regard::check(call);
        if (wrong == REGARD_DONE) lse_bytes = (call.batch * call.heads * call.queries * 8 + 63) / 64 * 64;
        return wrong;
    }

    int64_t workspace() const {
        const Kernels *kernels = kernels_of(call.isa);
        if (!kernels) return REGARD_BAD_ISA;
        const int64_t rest = regard::workspace(*kernels, call, nullptr);
        return rest < 0 ? rest : rest + lse_bytes;
    }

    regard_status run() {
        if (lse_bytes > call.workspace_bytes) return REGARD_BAD_WORKSPACE;
        if (lse_bytes) call.lse = call.workspace;
        call.workspace = static_cast<char *>(call.workspace) + lse_bytes, call.workspace_bytes -= lse_bytes;
        return regard::run(call, nullptr);
    }
};

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

const char *regard_best_isa() { return regard::best_isa(); }

int64_t regard_workspace(const regard_call *call) {
    if (!call) return REGARD_BAD_POINTER;
    if (call->bytes == sizeof(regard_linear))
        return regard::linear_workspace(*reinterpret_cast<const regard_linear *>(call));
    const bool backward = call->bytes == sizeof(regard_gradient);
    const auto *gradient = backward ? reinterpret_cast<const regard_gradient *>(call) : nullptr;
    const auto *sweep = regard::sweep_of(*call);
    if (regard_status wrong = gradient ? regard::check(*gradient)
                              : sweep  ? regard::check(*sweep)
                                       : regard::check(*call))
        return wrong;
    const regard::Kernels *kernels = regard::kernels_of(call->isa);
    return kernels ? regard::workspace(*kernels, *call, gradient) : REGARD_BAD_ISA;
}

int64_t regard_forward(regard_call *call) {
    if (!call) return REGARD_BAD_POINTER;
    if (regard_status wrong = regard::check(*call)) return wrong;
    return regard::run(*call, nullptr);
}

int64_t regard_attend(const regard_call *form, const regard_operands *operands, int64_t next) {
    if (!form || !operands) return REGARD_BAD_POINTER;
    regard::Whole whole(*form, *operands, next);
    if (regard_status wrong = whole.check()) return wrong;
    const regard_status status = whole.run();
    return status == REGARD_MORE ? whole.call.next : status;
}

int64_t regard_attend_workspace(const regard_call *form, const regard_operands *operands) {
    if (!form || !operands) return REGARD_BAD_POINTER;
    regard::Whole whole(*form, *operands, 0);
    if (regard_status wrong = whole.check()) return wrong;
    return whole.workspace();
}

int64_t regard_backward(regard_gradient *gradient) {
    if (!gradient) return REGARD_BAD_POINTER;
    if (regard_status wrong = regard::check(*gradient)) return wrong;
    return regard::run(gradient->call, gradient);
}

int64_t regard_gather(regard_sweep *sweep) {
    if (!sweep) return REGARD_BAD_POINTER;
    if (regard_status wrong = regard::check(*sweep)) return wrong;
    return regard::run(sweep->call, nullptr);
}
