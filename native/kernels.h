// What an instruction set offers: the same functions, compiled for it. abi.cpp calls them and knows nothing inside.
//
// A pass is cut into units that can be done in any order by any thread; their results do not depend on either.
#pragma once

#include "abi.h"

namespace regard {

// Asks whether the time is up. A unit that may take long asks after each part of it, and may be left there.
struct Pause {
    bool (*is_due)(const void *of);
    const void *of;

    bool operator()() const { return is_due(of); }
};

// The sweep that the call begins, or null. (Static: no instruction set may share its code with others.)
static inline const regard_sweep *sweep_of(const regard_call &c) {
    return c.bytes == int64_t(sizeof(regard_sweep)) ? reinterpret_cast<const regard_sweep *>(&c) : nullptr;
}

enum class LinearPass { heads, sums, raise, scan, rows };
constexpr int64_t SCANNED = 8;   // features of a unit of the scan
constexpr int64_t COLUMNS = 32;  // columns of values of one with Delta

struct Kernels {
    // Bytes that all threads share, and bytes for each thread; both multiples of 64. `gradient` is null for other
    // passes; a sweep is known by the size of its struct (sweep_of).
    int64_t (*shared)(const regard_call &, const regard_gradient *gradient);
    int64_t (*scratch)(const regard_call &, const regard_gradient *gradient);

    // A pass has two halves, 0 and 1: every unit of the first is done before the second begins. Forward: what threads
    // share, if anything; then rows, or spans of their keys. Backward: all of dq and delta, and what units alone add
    // to; then what several units add to, put together.
    int64_t (*forward_units)(const regard_call &, int half);
    regard_status (*forward)(const regard_call &, int half, int64_t unit, char *shared, char *scratch);
    int64_t (*backward_units)(const regard_gradient &, int half);
    // Forward units are short: a tile against a million keys takes 0.15 s. Backward ones may be left with REGARD_MORE;
    // they go on with the same scratch and with `done`, which counts their parts and is 0 at first.
    regard_status (*backward)(const regard_gradient &, int half, int64_t unit, int64_t &done, const Pause &,
                              char *shared, char *scratch);

    // Tiles of queries; then what several units add to, put together. Units may be left as backward ones are.
    int64_t (*sweep_units)(const regard_sweep &, int half);
    regard_status (*sweep)(const regard_sweep &, int half, int64_t unit, int64_t &done, const Pause &, char *shared,
                           char *scratch);

    // Linear attention; floats of a parted chunk and of a thread. A unit is a head of keys, and chunks are `first` and
    // on, `count` of them; with `sums` and `rows` it is chunk `first`, and `count` says what memory is next (linear.h).
    // With `scan` it is some of a head's features. `place` holds what is kept of these chunks. False: a value is not
    // finite.
    int64_t (*linear_state)(const regard_linear &);
    int64_t (*linear_scratch)(const regard_linear &);
    bool (*linear)(const regard_linear &, LinearPass, int64_t unit, int64_t first, int64_t count, float *place,
                   float *scratch);

    // How fast this machine is with these instructions: see limits.h.
    double (*products)(int64_t dtype, int64_t rounds);
    uint64_t (*stream)(const void *data, int64_t bytes);
};

extern const Kernels plain;  // the loops that every kernel must equal
extern const Kernels portable;
#if defined(__x86_64__)
extern const Kernels avx2, avx512, avx512vnni, avx512bf16, amx;
#elif defined(__aarch64__)
extern const Kernels neon;
#endif

// Those of regard_isas()[isa], or with -1 the plain ones; null if there are none.
const Kernels *kernels_of(int64_t isa);

}  // namespace regard
