// Which weights dropout drops: a pure function of a seed, a head, a row and a key, so that the backward pass, every
// kernel and every number of threads drop the same ones, and nothing is stored.
//
// The mixer is that of Wellons' search for 32-bit hashes of low bias (lowbias32): each bit of what goes in turns each
// bit of what comes out with a probability within 0.1 % of a half.
#pragma once

#include <cstdint>

#include "simd.h"

namespace regard {
namespace REGARD_ISA {

// T: a 32-bit unsigned number, or a vector of them.
template <typename T>
REGARD_INLINE T dropout_mixed(T x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    x ^= x >> 16;
    return x;
}

// What row i of head h of batch row b draws from: head is b * heads + h.
REGARD_INLINE uint32_t dropout_row(uint64_t seed, uint32_t head, uint32_t i) {
    const uint32_t low = dropout_mixed(uint32_t(seed)), high = uint32_t(seed >> 32);
    return dropout_mixed(dropout_mixed(low ^ (high + 0x9e3779b9u * head)) + 0x85ebca6bu * i);
}

// What key j draws from, the same for all rows.
REGARD_INLINE uint32_t dropout_column(uint32_t j) { return dropout_mixed(0xc2b2ae35u * j + 0x27d4eb2fu); }

// The pair is dropped if this is below the threshold. Either may be a vector.
template <typename T>
REGARD_INLINE T dropout_bits(T row, T column) {
    return dropout_mixed(T(row ^ column));
}

// A probability as the share of all 32-bit integers.
REGARD_INLINE uint32_t dropout_threshold(double probability) {
    const double share = probability * 0x1p32 + 0.5;
    return share >= 0x1p32 - 1 ? 0xffffffffu : uint32_t(share);
}

}  // namespace REGARD_ISA
}  // namespace regard
