// How linear attention is divided among threads: by heads; where those are too few, by chunks.
//
// Chunks of a head form a chain (linear_chain.h) up to some threads a head. Beyond that they are parted: blocks of
// them, each in three passes, what the chunks add, their scan, their rows (linear.cpp).
#pragma once

#include "caches.h"
#include "kernels.h"

namespace regard {

// Multiply-adds that take about 20 us on one core, as in abi.cpp.
constexpr double TINY = 1 << 21;

// Chunks of a head that are parted at once, at least: or entering three parallel regions takes longer than what is
// computed.
constexpr int64_t LEAST = 16;

inline int64_t chunks_of(const regard_linear &c) { return (c.tokens + c.chunk - 1) / c.chunk; }

inline int64_t threads_of(const regard_linear &c) {
    const double rows = double(c.batch) * double(c.heads + c.kv_heads) * double(c.tokens);
    const double each = double(c.features) * double(c.v_dim) + double(c.chunk) / 2 * double(c.features + c.v_dim);
    return c.threads < 1 || rows * each < TINY ? 1 : c.threads;
}

// Chunks of each head that are parted at once; 0: heads are not parted.
inline int64_t parted(const Kernels &kernels, const regard_linear &c) {
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

inline int64_t scans_of(const regard_linear &c) {
    return c.beta.data ? (c.v_dim + COLUMNS - 1) / COLUMNS : (c.features + SCANNED - 1) / SCANNED;
}
// Whether chunks form a chain. A thread waits while others have the state: for some 0.5 us of the 12 of a chunk, on Zen
// 5; with Delta 3 of 16, and 1,024 tokens took 1.0 of the time before, and in passes 0.93.
inline bool is_chained(const Kernels &kernels, const regard_linear &c) {
    const int64_t most = c.beta.data ? 2 : 4, least = c.beta.data ? 48 : 2;  // threads a head, and chunks
    const bool few = threads_of(c) <= most * c.batch * c.kv_heads;
    return c.k.data && parted(kernels, c) && few && chunks_of(c) >= least;
}

}  // namespace regard
