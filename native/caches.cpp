// Reads the sizes of the caches: by sysconf on Linux, which on x86 asks the processor and on ARM often reports nothing,
// by sysctl on macOS. Where nothing is reported, a size is that of most machines.
#include "caches.h"

#include <cstdlib>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#if defined(__APPLE__)
#include <sys/sysctl.h>
#else
#include <unistd.h>
#endif

namespace regard {
namespace {

#if defined(__APPLE__)
int64_t reported(const char *name) {
    int64_t bytes = 0;
    size_t size = sizeof bytes;
    return sysctlbyname(name, &bytes, &size, nullptr, 0) ? 0 : bytes;
}

// Of the fast cores, where there are several kinds.
Caches reported() {
    const int64_t first = reported("hw.perflevel0.l1dcachesize"), second = reported("hw.perflevel0.l2cachesize");
    return {
        first ? first : reported("hw.l1dcachesize"), second ? second : reported("hw.l2cachesize"), 0, {}, {}, {}, {}};
}
#elif defined(_SC_LEVEL1_DCACHE_SIZE)
Caches reported() { return {sysconf(_SC_LEVEL1_DCACHE_SIZE), sysconf(_SC_LEVEL2_CACHE_SIZE), 0, {}, {}, {}, {}}; }
#else
Caches reported() { return {}; }
#endif

// Kinds of processor that choices below depend on; zen4 includes earlier AMD cores.
enum class Kind { other, arm, intel, zen4, zen5 };

Kind kind() {
#if defined(__x86_64__)
    unsigned a, b, c, d;
    if (!__get_cpuid(0, &a, &b, &c, &d)) return Kind::other;
    if (b == signature_INTEL_ebx) return Kind::intel;
    if (b != signature_AMD_ebx || !__get_cpuid(1, &a, &b, &c, &d)) return Kind::other;
    const unsigned family = (a >> 8 & 15) + (a >> 20 & 255);
    return family < 26 ? Kind::zen4 : family == 26 ? Kind::zen5 : Kind::other;
#else
    return Kind::arm;
#endif
}

// Zen 4 starts one 512-bit product a cycle, and operands may as well come from its second level: smaller blocks cost
// 1 to 2 % there. Zen 5, Skylake and Cascade Lake start two and wait: on Zen 5 two tiles that share what streams take
// 0.98 to 0.99 of the time.
bool second_is_near() { return kind() == Kind::zen4; }

// On Zen 5 prefetching into the first took 1 / 1.4 of the time that the second took. On Zen 4 it takes 1.3 to 1.6 times
// as long: a line on its way to the first cache occupies one of 24 places (12 on Cascade Lake) that loads from the
// second need as well, and of lines that are asked for a block ahead, 64 KiB, few are still there.
bool asks_into_first() { return kind() == Kind::zen5 || kind() == Kind::arm; }

// Intel's cores with 2 MiB of the second level: Golden Cove and later.
bool has_far_second(int64_t second) { return kind() == Kind::intel && second >= int64_t(2) << 20; }

// Zen 5: with one row `all` takes 0.91 to 0.97 of the time of `keys`, with four 0.90 to 0.97. Zen 4: `far` takes 0.83
// to 1.1 of the time of `keys` with pairs, 1.02 to 1.12 with float32, and 0.71 to 0.88 of the time block by block with
// pages that are apart; one and two rows as streams take 0.73 to 1.0 of that time. Intel's cores with 2 MiB: on a Xeon
// with AMX `far` takes 0.87 to 0.96, and `places` 0.89 to 1.01 of that; pages are not measured there, and nothing on
// other Intel cores, with 1.25 MiB and less.
Streams streams(int64_t second) {
    if (kind() == Kind::zen5) return {Asks::all, Asks::all, Asks::all, true, true, true};
    if (kind() == Kind::zen4) return {Asks::keys, Asks::far, Asks::far, true, true, true};
    if (has_far_second(second)) return {Asks::places, Asks::places, Asks::far, true, false, false};
    return {Asks::keys, Asks::keys, Asks::keys, false, false, false};
}

// Skylake and Zen 1 to 4 have 32 KiB; no machine since then has less than 256 KiB for a core.
Caches found() {
    Caches sizes = reported();
    const bool is_pinned = std::getenv("REGARD_CACHES");
    int64_t *const all[] = {&sizes.first, &sizes.second};
    if (const char *at = std::getenv("REGARD_CACHES"))
        for (int64_t *size : all) {
            char *end = nullptr;
            const long long bytes = std::strtoll(at, &end, 10);
            if (end == at) break;
            *size = bytes;
            at = *end == ',' ? end + 1 : end;
        }
    if (sizes.first <= 0) sizes.first = int64_t(32) << 10;
    if (sizes.second < sizes.first) sizes.second = int64_t(512) << 10;
    sizes.near = !is_pinned && second_is_near() ? sizes.second : sizes.first;
    // 0.93 to 0.98 of the time on a Xeon with AMX, with 512-bit and 256-bit products; on Zen 4 with 256-bit ones 0.98
    // to 1.05
    sizes.shares = has_far_second(sizes.second);
    sizes.asks_into_first = asks_into_first();
    sizes.lists_each = has_far_second(sizes.second);
    sizes.streams = streams(sizes.second);
    return sizes;
}

}  // namespace

const Caches &caches() {
    static const Caches once = found();
    return once;
}

}  // namespace regard
