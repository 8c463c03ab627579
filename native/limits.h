// How fast this machine is with one instruction set: products that never leave the registers, and a read of memory.
//
// Kernels are judged by their share of these two. Neither loop does anything useful, so each hands back what depends on
// all that it did; limits.cpp takes the time.
//
// On 2 cores of AMD Zen 5: 273 GFLOP/s in fp32 and 543 in bf16 on one thread, twice that on two; 43 and 51 GB/s.
#pragma once

#include "abi.h"
#include "float16.h"

namespace regard {
namespace REGARD_ISA {

// Sums that do not wait for one another. Two multiply-adds begin in every cycle and each takes 4 to 6, so that 12 keep
// the machine busy; as many as there are registers for are steadier. Two operands take registers beside them.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int SUMS = 24;
#else
constexpr int SUMS = 12;
#endif

// One lane of what is left after `rounds` rounds of `step` on each of the sums.
template <typename V, typename Step>
REGARD_INLINE double repeated(int64_t rounds, Step step) {
    V sums[SUMS];
#pragma GCC unroll 24
    for (int i = 0; i < SUMS; ++i) sums[i] = V{} + float(i);
    for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
        for (int i = 0; i < SUMS; ++i) sums[i] = step(sums[i]);
    }
#pragma GCC unroll 24
    for (int i = 1; i < SUMS; ++i) sums[0] += sums[i];
    return double(sums[0][0]);
}

// Does `rounds` rounds of multiply-adds of that type, and returns the FLOPs. bf16 has products
// of its own where there are such; else it is, as f16 always is, computed in floats.
inline double products(int64_t dtype, int64_t rounds) {
    volatile double kept;  // what is written here must be computed
    // x * 0.999 + 0.001: neither product nor sum is the same in the next round, and x stays near 1
    if (dtype == REGARD_F64) {
        const D factor = broadcast(0.999), term = broadcast(0.001);
        kept = repeated<D>(rounds, [&](D x) { return fma(x, factor, term); });
        return 2.0 * Vec<double>::lanes * SUMS * double(rounds);
    }
#if defined(REGARD_PAIRS)
    if (dtype == REGARD_BF16) {
        const U pair = broadcast_pair(0x3c003c00);  // two bf16 of 2^-7
        kept = repeated<F>(rounds, [&](F x) { return dot_pairs(pair, pair, x); });
        return 4.0 * Vec<float>::lanes * SUMS * double(rounds);
    }
#endif
    const F factor = broadcast(0.999f), term = broadcast(0.001f);
    kept = repeated<F>(rounds, [&](F x) { return fma(x, factor, term); });
    (void)kept;
    return 2.0 * Vec<float>::lanes * SUMS * double(rounds);
}

// Reads all bytes, but for less than 4 KiB at the end, and gives their sum of a kind. In four places at once: 41 and 48
// GB/s on one and two threads, where one place gave 39 and 42, and prefetches gained nothing.
inline uint64_t stream(const void *data, int64_t bytes) {
    constexpr int PLACES = 4, AT_ONCE = 8;
    constexpr int64_t step = AT_ONCE * VECTOR_BYTES;
    const char *from = static_cast<const char *>(data);
    const int64_t part = bytes / PLACES / step * step;
    U sums[AT_ONCE] = {};
    for (int64_t at = 0; at < part; at += step) {
        for (int place = 0; place < PLACES; ++place) {
            const char *here = from + place * part + at;
#pragma GCC unroll 8
            for (int i = 0; i < AT_ONCE; ++i) {
                sums[i] ^= load(reinterpret_cast<const uint32_t *>(here + i * VECTOR_BYTES));
            }
        }
    }
    for (int i = 1; i < AT_ONCE; ++i) sums[0] ^= sums[i];
    return sums[0][0];
}

}  // namespace REGARD_ISA
}  // namespace regard
