// Finds out which instruction sets this machine, and its operating system, let a program use.
//
// This code decides whether newer instructions may run, so it must hold none itself: CMakeLists.txt compiles it for the
// oldest machine of its family and keeps it out of link-time optimisation. Otherwise an old machine dies of an illegal
// instruction before anybody could ask. (ggml states the same caution in its ggml-cpu/CMakeLists.txt.)
//
// A kernel is compiled with exactly the features that its row names, and with no others. Which rows are compiled is
// chosen when regard is installed: CMakeLists.txt defines REGARD_WITH_... as 1 or leaves it undefined (detect.h).
#include "detect.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace regard {
namespace {

struct Isa {
    const char *name;
    bool (*runs_here)();
    bool built;  // whether this library has kernels for it
};

bool always() { return true; }

#if defined(__x86_64__)
// What the processor and the operating system let a program use, asked of them and not of the compiler's runtime: that
// of Zig answers no to everything, and Clang before 17 cannot ask for F16C. Bits: Intel's manual, volume 2, CPUID, and
// volume 1, 13.3 (the registers that the system saves, XCR0).
struct Features {
    bool avx2 = false, avx512 = false, vnni = false, bf16 = false, amx = false;

    Features() {
        unsigned a, b, c, d, more = 0;
        if (!__get_cpuid(1, &a, &b, &c, &d) || !all(c, FMA | OSXSAVE | AVX | F16C)) return;
        const unsigned saved = saved_registers();
        if (!all(saved, 0x6) || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
        avx2 = all(b, AVX2);
        avx512 = avx2 && all(saved, 0xe0) && all(b, AVX512F | AVX512DQ | AVX512BW | AVX512VL);
        vnni = avx512 && all(c, AVX512VNNI);
        const unsigned tiles = d;
        if (a < 1 || !__get_cpuid_count(7, 1, &more, &a, &b, &d)) return;
        bf16 = vnni && all(c, AVX512VBMI) && all(more, AVX512BF16);
        amx = bf16 &&
              (REGARD_TILES_IN_MEMORY || (all(tiles, AMXTILE | AMXBF16) && all(saved, 0x60000) && may_use_tiles()));
    }

  private:
    static constexpr unsigned FMA = 1u << 12, OSXSAVE = 1u << 27, AVX = 1u << 28, F16C = 1u << 29;  // 1, ecx
    static constexpr unsigned AVX2 = 1u << 5, AVX512F = 1u << 16, AVX512DQ = 1u << 17;              // 7, ebx
    static constexpr unsigned AVX512BW = 1u << 30, AVX512VL = 1u << 31;                             // 7, ebx
    static constexpr unsigned AVX512VBMI = 1u << 1, AVX512VNNI = 1u << 11;                          // 7, ecx
    static constexpr unsigned AMXBF16 = 1u << 22, AMXTILE = 1u << 24;                               // 7, edx
    static constexpr unsigned AVX512BF16 = 1u << 5;                                                 // 7.1, eax

    static bool all(unsigned value, unsigned bits) { return (value & bits) == bits; }

    // Linux gives a process 8 KiB of tiles when it asks for them; to ask again does no harm. (Linux,
    // arch/x86/xstate.rst.)
    static bool may_use_tiles() {
#if defined(__linux__)
        constexpr long REQUEST = 0x1023, TILES = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
        return syscall(SYS_arch_prctl, REQUEST, TILES) == 0;
#else
        return false;
#endif
    }

    static unsigned saved_registers() {  // the intrinsic would need -mxsave
        unsigned low, high;
        __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
        return low;
    }
};

const Features &features() {
    static const Features once;
    return once;
}

bool avx2() { return features().avx2; }

bool avx512() { return features().avx512; }

// Cascade Lake, Ice Lake.
bool avx512vnni() { return features().vnni; }

// Cooper Lake, which has bf16 and no VBMI, takes the row above.
bool avx512bf16() { return features().bf16; }

// Sapphire Rapids and later, on Linux.
bool amx() { return features().amx; }
#endif

// Plainest first; a machine that runs a row runs all rows above it.
constexpr Isa table[] = {
    {"portable", always, true},
#if defined(__x86_64__)
    {"avx2", avx2, REGARD_WITH_AVX2},
    {"avx512", avx512, REGARD_WITH_AVX512},
    {"avx512vnni", avx512vnni, REGARD_WITH_AVX512VNNI},
    {"avx512bf16", avx512bf16, REGARD_WITH_AVX512BF16},
    {"amx", amx, REGARD_WITH_AMX},
#elif defined(__aarch64__)
    {"neon", always, REGARD_WITH_NEON},  // every 64-bit ARM has it
#endif
};

struct Found {
    const char *names[sizeof table / sizeof *table + 1] = {};
    const char *best = nullptr;

    Found() {
        const char **next = names;
        for (const Isa &isa : table) {
            if (!isa.runs_here()) continue;
            best = isa.name;
            if (isa.built) *next++ = isa.name;
        }
    }
};

const Found &found() {
    static const Found once;
    return once;
}

}  // namespace

const char *const *isas() { return found().names; }

const char *best_isa() { return found().best; }

}  // namespace regard
