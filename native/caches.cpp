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
    return {first ? first : reported("hw.l1dcachesize"), second ? second : reported("hw.l2cachesize"), 0, Asks::keys};
}
#elif defined(_SC_LEVEL1_DCACHE_SIZE)
Caches reported() { return {sysconf(_SC_LEVEL1_DCACHE_SIZE), sysconf(_SC_LEVEL2_CACHE_SIZE), 0, Asks::keys}; }
#else
Caches reported() { return {}; }
#endif

// Zen 4 starts one 512-bit product a cycle, and operands may as well come from its second level: smaller blocks cost
// 1 to 2 % there. Zen 5 (family 26), Skylake and Cascade Lake start two and wait: on Zen 5 two tiles that share what
// streams take 0.98 to 0.99 of the time.
bool second_is_near() {
#if defined(__x86_64__)
    unsigned a, b, c, d;
    if (!__get_cpuid(0, &a, &b, &c, &d) || b != signature_AMD_ebx) return false;
    return __get_cpuid(1, &a, &b, &c, &d) && (a >> 8 & 15) + (a >> 20 & 255) < 26;
#else
    return false;
#endif
}

// Zen 5: with one row 0.91 to 0.97 of the time of `keys`, with four 0.90 to 0.97. Intel's cores with 2 MiB: on a Xeon
// with AMX `far` takes 0.87 to 0.96. On Zen 4 both are slower (native/README.md), and other Intel cores, with 1.25 MiB
// and less, are not measured.
Asks asks([[maybe_unused]] int64_t second) {
#if defined(__x86_64__)
    unsigned a, b, c, d;
    if (!__get_cpuid(0, &a, &b, &c, &d)) return Asks::keys;
    if (b == signature_INTEL_ebx) return second >= int64_t(2) << 20 ? Asks::far : Asks::keys;
    if (b != signature_AMD_ebx || !__get_cpuid(1, &a, &b, &c, &d)) return Asks::keys;
    return (a >> 8 & 15) + (a >> 20 & 255) == 26 ? Asks::all : Asks::keys;  // family 26
#else
    return Asks::keys;
#endif
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
    sizes.asks = asks(sizes.second);
    return sizes;
}

}  // namespace

const Caches &caches() {
    static const Caches once = found();
    return once;
}

}  // namespace regard
