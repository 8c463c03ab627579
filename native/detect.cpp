// Finds out which instruction sets this machine, and its operating system, let a program use.
//
// This code decides whether newer instructions may run, so it must hold none itself: CMakeLists.txt compiles it for the
// oldest machine of its family and keeps it out of link-time optimisation. Otherwise an old machine dies of an illegal
// instruction before anybody could ask. (ggml states the same caution in its ggml-cpu/CMakeLists.txt.)
//
// A kernel is compiled with exactly the features that its row names, and with no others. Which rows are compiled is
// chosen when regard is installed: CMakeLists.txt defines REGARD_WITH_... as 1 or leaves it undefined (detect.h).
#include "detect.h"

namespace regard {
namespace {

struct Isa {
    const char *name;
    bool (*runs_here)();
    bool built;  // whether this library has kernels for it
};

bool always() { return true; }

#if defined(__x86_64__)
// F16C, which kernels of this row may use too, came before AVX2 everywhere; Clang before 17 cannot ask for it.
bool avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool avx512() {
    return avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

// Cascade Lake, Ice Lake.
bool avx512vnni() { return avx512() && __builtin_cpu_supports("avx512vnni"); }

// Cooper Lake, which has bf16 and no VBMI, takes the row above.
bool avx512bf16() {
    return avx512vnni() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
}
#endif

// Plainest first; a machine that runs a row runs all rows above it.
constexpr Isa table[] = {
    {"portable", always, true},
#if defined(__x86_64__)
    {"avx2", avx2, REGARD_WITH_AVX2},
    {"avx512", avx512, REGARD_WITH_AVX512},
    {"avx512vnni", avx512vnni, REGARD_WITH_AVX512VNNI},
    {"avx512bf16", avx512bf16, REGARD_WITH_AVX512BF16},
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
